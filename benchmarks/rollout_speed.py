"""Compare engines without a GPU: `python -m benchmarks.rollout_speed --python PYTHON`.

PYTHON is the one in the environment of `benchmarks.peers`, whose help says how to make it. Without
it only this project's servers run. All engines have random weights of a shape of Qwen2.5's, with a
vocabulary of 152,064. They answer random prompts, from the whole distribution at temperature 1:

    int8, fp8, int4, bf16   this project's server, with weights published as a learner's are
    transformers-DTYPE      transformers' `generate`, which TRL calls
    ctranslate2-int8        CTranslate2, after its own converter

All are started, and then take turns: in each round each answers each batch once, so that what
happens on the machine happens to all. Tokens per second are the sampled tokens over the time of the
whole request. Every measurement is a line of `--rows`. The table and the picture are of all lines
there, so that several calls, such as one for each shape, add up.

The default takes about ten minutes and 16 GB on two cores. The shape of 1.5B takes three times as
much of both: choose `--engines`. All batches and lengths: `--batches 1 16 64 --prompts 64 512`.
"""

import argparse
import itertools
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.gpu import policy
from benchmarks.peers.__main__ import environment, peer
from benchmarks.shards import random_learner
from qurl_megatron.config.schema import FormatName, QuantizationConfig, ServerConfig
from qurl_megatron.files import append_lines, read_json_lines
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.weight_sync.publish import Publisher

OWN: tuple[FormatName, ...] = ("int8", "fp8", "int4", "bf16")
PEERS = ("transformers-float32", "transformers-bfloat16", "ctranslate2-int8")
WARM_UP_TOKENS = 2
Sample = Callable[[int, int, int], None]  # takes the prompts, their length, and sampled tokens
Cell = tuple[str, int, int]  # shape, batch, length of prompts
Rates = dict[Cell, dict[str, list[float]]]  # tokens per second of each engine, by round


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--python", type=Path, help="of the peers' environment")
    parser.add_argument("--engines", nargs="+", choices=OWN + PEERS)
    parser.add_argument("--shape", choices=policy.SHAPES, default="0.5B")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompts", nargs="+", type=int, default=[64], help="their lengths")
    parser.add_argument("--answers", type=int, default=32, help="their length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--rows", type=Path, default=Path("runs/rollout_speed/rows.jsonl"))
    parser.add_argument("--picture", type=Path, help="an SVG file to draw")
    arguments = parser.parse_args()
    if not arguments.engines:
        arguments.engines = OWN + (PEERS if arguments.python else ())
    if not arguments.python and set(arguments.engines) & set(PEERS):
        parser.error("--python must name the Python of the peers' environment")
    machine.print_machine("torch", "sglang")
    print(f"{arguments.threads} threads each", flush=True)
    measure(arguments)
    rates = read_rates(arguments.rows)
    print_table(rates)
    if arguments.picture:
        draw(rates, arguments.picture)


def measure(arguments: argparse.Namespace) -> None:
    """Start all engines, let them take turns, and append a row for each measurement."""
    shape = arguments.shape
    directory = arguments.rows.absolute().parent / shape
    directory.mkdir(parents=True, exist_ok=True)
    policy.write_config(shape, directory)
    batches = list(itertools.product(arguments.batches, arguments.prompts))
    with ExitStack() as running:
        engines: dict[str, Sample] = {}
        for name in arguments.engines:
            if name in OWN:
                engines[name] = running.enter_context(run_own(name, directory, arguments))
        policy.initialize_single_rank()  # starts threads, with which no server can be forked
        for name in arguments.engines:
            if name in PEERS:
                engines[name] = running.enter_context(run_peer(name, directory, arguments))
        for answer, (batch, prompt) in itertools.product(engines.values(), batches):
            answer(batch, prompt, WARM_UP_TOKENS)
        for number, (batch, prompt) in itertools.product(range(arguments.rounds), batches):
            for name, answer in engines.items():
                start_s = time.perf_counter()
                answer(batch, prompt, arguments.answers)
                rate = batch * arguments.answers / (time.perf_counter() - start_s)
                row = {"shape": shape, "batch": batch, "prompt": prompt, "engine": name}
                row |= {"round": number, "tokens_per_s": rate}
                append_lines(arguments.rows, [row])
                print(f"{shape} {batch} x {prompt} {name}: {rate:.1f} tokens/s", flush=True)


@contextmanager
def run_own(name: FormatName, directory: Path, arguments: argparse.Namespace) -> Iterator[Sample]:
    """Start a server, which gets weights before its first answer; stop it at the end."""
    length = max(arguments.prompts) + arguments.answers
    batch = max(arguments.batches)
    server = ServerConfig(
        max_running_requests=batch,
        max_total_tokens=batch * (length + 16) + 1024,
        threads=arguments.threads,
    )
    log = directory / f"{name}.log"
    with policy.run_server(arguments.shape, name, server, length, log) as (running, architecture):
        has_weights = False

        def answer(batch: int, prompt: int, output: int) -> None:
            nonlocal has_weights
            if not has_weights:
                fleet = Fleet("rollout", {0: running})
                publisher = Publisher(random_learner(architecture), fleet, QuantizationConfig(name))
                has_weights = publisher.publish().num_servers == 1
                publisher.close()
            policy.sample(running, batch, prompt, output, architecture.vocab_size)

        yield answer


@contextmanager
def run_peer(name: str, directory: Path, arguments: argparse.Namespace) -> Iterator[Sample]:
    """Start a peer's process and print its versions; end it at the end."""
    fields = {"engine": name, "directory": str(directory), "threads": arguments.threads}
    with (
        (directory / f"{name}.log").open("w") as log,
        subprocess.Popen(
            peer(arguments.python, "generate", "serve", **fields),
            env=environment(arguments.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin and process.stdout

        def answered() -> str:
            assert process.stdout
            if line := process.stdout.readline():
                return line
            raise RuntimeError(f"{name} ended with {process.wait()}; see {log.name}")

        def answer(*sizes: int) -> None:
            assert process.stdin
            print(json.dumps(sizes), file=process.stdin, flush=True)
            answered()

        print(f"{name}: {answered().strip()}", flush=True)
        yield answer


def read_rates(rows: Path) -> Rates:
    """Return all measurements of a file by cell and engine, in their order."""
    rates: Rates = defaultdict(lambda: defaultdict(list))
    for row in read_json_lines(rows):
        cell = row["shape"], row["batch"], row["prompt"]
        rates[cell][row["engine"]].append(row["tokens_per_s"])
    return rates


def print_table(rates: Rates) -> None:
    """Print tokens per second, and the ratios of INT8 to the others round by round."""
    for (shape, batch, prompt), of_engines in rates.items():
        print(f"\n{shape}, {batch} prompts of {prompt} tokens: tokens/s, INT8 over it")
        for engine, of_rounds in of_engines.items():
            pairs = zip(of_engines.get("int8", ()), of_rounds, strict=False)
            ratios = [own / other for own, other in pairs]
            ratio = machine.spread(ratios) if ratios else ""
            print(f"  {engine:22} {machine.spread(of_rounds, '.1f'):24} {ratio}")


def draw(rates: Rates, path: Path) -> None:
    """Draw a panel for each cell: the median of each engine, with its least and most."""
    from matplotlib import pyplot

    from benchmarks.study.figures import save

    figure, panels = pyplot.subplots(1, len(rates), figsize=(3.4 * len(rates), 2.8), squeeze=False)
    for panel, ((shape, batch, prompt), of_engines) in zip(panels[0], rates.items(), strict=True):
        engines = [engine for engine in reversed(OWN + PEERS) if engine in of_engines]
        medians = [median(of_engines[engine]) for engine in engines]
        spreads = [
            [abs(middle - end(of_engines[e])) for e, middle in zip(engines, medians, strict=True)]
            for end in (min, max)
        ]
        colours = ["tab:blue" if engine in OWN else "tab:grey" for engine in engines]
        panel.barh(engines, medians, xerr=spreads, color=colours, capsize=2)
        panel.set_title(f"{shape}, {batch} prompts of {prompt} tokens", fontsize=9)
        panel.set_xlabel("sampled tokens per second", fontsize=8)
        panel.tick_params(labelsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
