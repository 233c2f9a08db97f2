"""What it costs that learner and servers take turns: `python -m benchmarks.sharing --what learner`.

    learner   leaves and comes back, as the model grows
    server    sleeps and wakes, by what it gives back, as the model grows
    memory    of learner and servers through the steps of a run; `--output FILE.svg` draws it

Models have one width, and more and more layers; the run of `memory` has the most. For each size the
others print, as medians over cycles with [least, most], the seconds, and the memory that the
process holds before, while and after it is away or asleep: resident memory, or of a learner on a
GPU what torch has allocated there. Slopes are those of straight lines through the logarithms of all
cycles over the bytes that wait or are given back, with their standard errors: 1 is proportional.

The first cycle of a learner maps the host's memory, and is not counted. Without a GPU a server that
wakes gets pages from the kernel only as it uses them, so its wake takes no time.
"""

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import torch
from matplotlib.figure import Figure

from benchmarks import machine
from benchmarks.growth import make_batch, slope, train
from benchmarks.machine import MIB, spread
from benchmarks.runs import QURL
from qurl_megatron import device
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, Releases, ServerConfig
from qurl_megatron.files import read_json_lines
from qurl_megatron.learner.learner import Learner
from qurl_megatron.process import trim_heap
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout.control import RELEASED, ServerControl
from qurl_megatron.rollout.server import Server, ServerPlan, wait_ready

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
KINDS: tuple[Releases, ...] = ("cache", "all")
CACHED_TOKENS = 32768
# How the processes of a run are called, and shown.
SHOWN = {"loop.train": "learner", "scheduler": "servers"}
POLL_S = 0.1


class Cycle(NamedTuple):
    """How something left and came back."""

    leave_s: float
    return_s: float
    before_bytes: int  # that the process holds
    away_bytes: int
    after_bytes: int


class Cycles(NamedTuple):
    """All cycles of a learner, or of a server with one kind of sleep."""

    moved_bytes: int  # what waits, or is given back
    cycles: list[Cycle]


def learner_cycles(model: Path, number: int) -> Cycles:
    """Take a step, and then leave and come back so many times, after a first time."""
    learner = Learner(model, LearnerConfig(), OptimizerConfig(learning_rate=1e-4))
    train(learner, make_batch(2))
    trim_heap()
    cycles = []
    for _ in range(1 + number):
        before, start = machine.held_bytes(), time.perf_counter()
        learner.leave()
        left, away = time.perf_counter(), machine.held_bytes()
        began = time.perf_counter()
        learner.come_back()
        if device.accelerator() == "cuda":
            torch.cuda.synchronize()
        came_back, after = time.perf_counter(), machine.held_bytes()
        cycles.append(Cycle(left - start, came_back - began, before, away, after))
    weights = sum(buffer.param_data.nbytes for chunk in learner.chunks for buffer in chunk.buffers)
    optimizer = sum(tensor.nbytes for tensor in learner._optimizer_shards.own_storages())
    learner.close()
    return Cycles(weights + optimizer, cycles[1:])


def server_cycles(model: Path, number: int) -> dict[str, Cycles]:
    """Put an INT8 server to sleep, and wake it, so many times in each kind of sleep."""
    config = ServerConfig(max_total_tokens=CACHED_TOKENS, mem_fraction_static=0.3, threads=1)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        plan = ServerPlan(model, config, "int8", 512, log, seed=0, releases="all")
        with plan.running() as server:
            wait_ready([server], timeout_s=400)
            control = ServerControl(server)
            processes = psutil.Process(server.pid).children(recursive=True)
            scheduler = next(p for p in processes if "scheduler" in " ".join(p.cmdline()))
            found: dict[str, Cycles] = {}
            for kind in KINDS:
                cycles = []
                for _ in range(number):
                    ask(server)
                    before, start = scheduler.memory_info().rss, time.perf_counter()
                    control.sleep(RELEASED[kind])
                    slept, asleep = time.perf_counter(), scheduler.memory_info().rss
                    began = time.perf_counter()
                    control.wake(RELEASED[kind])
                    woke = time.perf_counter()
                    control.resume()
                    ask(server)
                    after = scheduler.memory_info().rss
                    cycles.append(Cycle(slept - start, woke - began, before, asleep, after))
                given = max(1, max(cycle.before_bytes - cycle.away_bytes for cycle in cycles))
                found[kind] = Cycles(given, cycles)
            return found


def ask(server: Server) -> None:
    """Have the server answer, for which it reads all weights and fills its cache."""
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    prompts = [[5 + (row + 7 * i) % 50 for i in range(256)] for row in range(16)]
    body = {"input_ids": prompts, "sampling_params": sampling}
    url, headers = f"{server.url}/generate", server.headers
    httpx.post(url, json=body, headers=headers, timeout=300).raise_for_status()


def print_cycles(title: str, by_size: Sequence[tuple[int, Cycles]]) -> None:
    """Print what the cycles of each size cost, and the slopes."""
    print(
        f"{title:12} {'MiB moved':>10} {'leave s':>20} {'return s':>20} "
        f"{'before':>8} {'away':>8} {'after MiB':>10}"
    )
    for layers, (moved, cycles) in by_size:
        last = cycles[-1]
        print(
            f"{layers:5} layers {moved / MIB:10.0f} {spread([c.leave_s for c in cycles]):>20} "
            f"{spread([c.return_s for c in cycles]):>20} {last.before_bytes / MIB:8.0f} "
            f"{last.away_bytes / MIB:8.0f} {last.after_bytes / MIB:10.0f}"
        )
    if len(by_size) > 1:
        times = {
            name: slope([(moved, getattr(c, name)) for _, (moved, cs) in by_size for c in cs])
            for name in ("leave_s", "return_s")
        }
        print(f"{'slope':12} {'':>10} {times['leave_s']:>20} {times['return_s']:>20}", flush=True)


def follow(model: Path, steps: int, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Run `qurl train` with shared placement; return MiB by second after each kind of process."""
    words = f"""train quickstart model={model} name=run output_dir={directory} steps={steps}
        warmup.max_steps=0 evaluation.problems=64 evaluation.every_steps={steps // 2}
        data_options.size=1000 rollout.prompts_per_step=16 learner.dtype=bfloat16
        quantization.uaq.scale=1 rollout.placement=shared rollout.server.releases=all""".split()
    with (directory / "log").open("wb") as log:
        run = subprocess.Popen([*QURL, *words], stdout=log, stderr=subprocess.STDOUT)
    measured: dict[str, list[tuple[float, float]]] = {shown: [] for shown in SHOWN.values()}
    metrics, first = directory / "run" / "metrics.jsonl", 0.0
    while run.poll() is None:
        time.sleep(POLL_S)
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if not 0 < done < steps:
            continue
        first = first or time.monotonic()
        sizes = dict.fromkeys(measured, 0)  # what processes share counts once
        for process in psutil.Process(run.pid).children(recursive=True):
            try:
                name = " ".join(process.cmdline())
                shown = next((label for word, label in SHOWN.items() if word in name), None)
                if shown:
                    sizes[shown] += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        for shown, size in sizes.items():
            measured[shown].append((time.monotonic() - first, size / MIB))
    if run.returncode or len(read_json_lines(metrics)) != steps:
        raise RuntimeError((directory / "log").read_text()[-2000:])
    return measured


def draw(measured: dict[str, list[tuple[float, float]]], output: Path) -> None:
    """Draw memory over time."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds after the first step", ylabel="MiB, resident")
    for shown, points in measured.items():
        axes.plot(*zip(*points, strict=True), label=shown, linewidth=1)
    axes.set_ylim(bottom=0)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(output, metadata={"Date": None})


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--what", choices=["learner", "server", "memory"], required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cycles", type=int, default=9, help="of each size")
    parser.add_argument("--steps", type=int, default=10, help="of the run whose memory is drawn")
    parser.add_argument("--output", type=Path, help="SVG file of the memory")
    arguments = parser.parse_args()
    machine.print_machine("torch", "sglang", "megatron-core")
    found: dict[str, list[tuple[int, Cycles]]] = {}
    all_layers = arguments.layers if arguments.what != "memory" else [max(arguments.layers)]
    with tempfile.TemporaryDirectory() as scratch:
        for layers in all_layers:
            model = Path(scratch) / str(layers)
            quickstart.build_model(model, seed=0, num_hidden_layers=layers, **DIMENSIONS)
            if arguments.what == "memory":
                measured = follow(model, arguments.steps, Path(scratch))
                for shown, points in measured.items():
                    print(f"{shown}: {spread([size for _, size in points], '.0f')} MiB")
                if arguments.output:
                    draw(measured, arguments.output)
            if arguments.what == "learner":
                cycles = machine.run_ranks(learner_cycles, 1, model, arguments.cycles)
                found.setdefault("learner", []).append((layers, cycles))
            else:
                for kind, each in server_cycles(model, arguments.cycles).items():
                    found.setdefault(kind, []).append((layers, each))
    for title, by_size in found.items():
        print_cycles(title, by_size)


if __name__ == "__main__":
    main()
