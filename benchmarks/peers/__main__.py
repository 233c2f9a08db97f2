"""Train beside TRL's GRPOTrainer: `python -m benchmarks.peers --python PEER/bin/python`.

PEER is an environment of its own, made by:

    python3.11 -m venv PEER
    PEER/bin/pip install -r benchmarks/peers/requirements.txt

Both start from the model that `benchmarks.objectives` has for seed 0, with the same problems,
prompts, reward, sequences a batch, optimizer steps, learning rate, temperature and clipping (of
each ratio from both sides, and from above where advantages are negative), and take turns. The rate
is constant after its warm-up, and there is no UAQ, which TRL does not have. Both have two threads:
TRL's process has two, and each of ours has one: two ranks and two servers take turns. TRL samples
in float32 with transformers, we from INT8 servers.

    --settings quickstart   words of five letters backward, 64 x 8 answers of 6 tokens a batch
    --settings long         rows of 64 digits, 32 x 8
    --settings longest      rows of 256 digits, 32 x 8
    --settings smollm2      the recipe `smollm2`: a real model, 16 x 8 answers of at most 32 tokens

With `--vocabulary 151936`, which is Qwen's, both start from random weights of the quickstart's
shape, and a batch is 8 x 4 answers, which hardly end. It shows what a step takes, and nothing is
learned.

With `--adapters 16` both train adapters (LoRA) of that rank on all linear layers, with the alpha
and the learning rate of `quickstart_adapters`: TRL with peft over the float32 model, we over an
INT4 base in groups of 32.

A step is one batch. Seconds and CPU-seconds (of all processes, from the kernel) are those of the
steps after the first `SKIPPED`; the phases of our steps are medians. Memory is the sum
of all processes' proportional set sizes after the last step. Accuracy is greedy, of both final
models in float32, by transformers, on problems that neither has trained on. Tokens a second are
sampled ones over the seconds of sampling, and the reward is the mean over the same steps.
"""

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.objectives import SETTINGS, Setting, make_start, recipe
from benchmarks.runs import QURL
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.prompts import load_prompts, set_aside
from qurl_megatron.files import read_json_lines, write_whole
from qurl_megatron.launch.recipe import load_recipe
from qurl_megatron.model.tokenizer import load_tokenizer
from qurl_megatron.recipes import quickstart, quickstart_adapters

SKIPPED = 2  # first steps, in which both start threads, caches and connections
CALL = (
    "import importlib, json, sys; module, name, fields = sys.argv[1:]; "
    "getattr(importlib.import_module(module), name)(**json.loads(fields))"
)
NAMES = ("quickstart", "long", "longest", "smollm2")
PHASES = ("rollout", "proximal", "update", "publish")
EQUAL = ["optimizer.schedule=constant", "quantization.uaq.scale=1"]  # as the peer trains


@dataclass(frozen=True)
class Measured:
    """What one side took for a step, and what it learned."""

    step_s: float
    cpu_s: float
    memory_bytes: int
    accuracy: float
    tokens_per_s: float  # of the rollout, median
    reward: float
    phases_s: dict[str, float]  # medians; empty: the peer does not tell


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the peer's environment")
    parser.add_argument("--settings", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--vocabulary", type=int, help="of a random start; more than 258")
    parser.add_argument("--adapters", type=int, default=0, help="their rank; 0: train all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/peers"))
    arguments = parser.parse_args()
    machine.print_machine("torch", "sglang", "megatron-core")
    for name in arguments.settings:
        compare(name, arguments)


def compare(setting: str, arguments: argparse.Namespace) -> None:
    """Run both in turn in this setting, and print their figures."""
    output_dir = arguments.output_dir.absolute()
    directory = output_dir / setting
    start, words = task(SETTINGS[setting], output_dir, directory, arguments.vocabulary)
    words += [f"model={start}", f"steps={arguments.steps}", *EQUAL]
    words += ["evaluation.problems=0"]
    if arguments.adapters:
        words += adapter_words(arguments.adapters)
    recipe_name = SETTINGS[setting].recipe
    config = with_overrides(load_recipe(recipe_name).config, words)
    sides: dict[str, Callable[[Path, int], list[str]]] = {
        "trl": lambda run, seed: peer(
            arguments.python, "trl_grpo", "train", **settings(config, directory, run, seed)
        ),
        "qurl": lambda run, seed: [
            *[*QURL, "train", recipe_name, *words, f"seed={seed}"],
            *[f"name={run.name}", f"output_dir={run.parent}"],
        ],
    }
    lines = {"trl": "lines.jsonl", "qurl": "metrics.jsonl"}
    models = {"trl": ".", "qurl": "final_model"}
    measured: dict[str, list[Measured]] = {name: [] for name in sides}
    for seed in range(arguments.rounds):
        for name, command in sides.items():
            run = directory / f"{name}-{seed}-{time.strftime('%H%M%S')}"
            figures = measure(command(run, seed), run, run / lines[name], config.steps)
            model = run / models[name]
            score = peer(
                arguments.python,
                "trl_grpo",
                "accuracy",
                model=str(model),
                problems=str(directory / "tested_rendered.jsonl"),
                completion_length=config.rollout.max_completion_length,
                reward=config.reward,
            )
            done = subprocess.run(score, env=environment(), check=True, capture_output=True)
            steps = read_json_lines(run / lines[name])[SKIPPED:]
            result = Measured(
                *figures,
                accuracy=float(done.stdout),
                tokens_per_s=median(step["rollout_tokens_per_s"] for step in steps),
                reward=fmean(step["reward_mean"] for step in steps),
                phases_s=phases_s(steps) if name == "qurl" else {},
            )
            measured[name].append(result)
            print(f"{setting}, round {seed}, {name}: {result}", flush=True)
    show(setting, measured)


def task(
    setting: Setting, output_dir: Path, directory: Path, vocabulary: int | None
) -> tuple[Path, list[str]]:
    """Write the start to `output_dir`, and problems to train and to test on to `directory`.

    Each file is written twice: with questions, and with the prompts that the policy continues.

    Returns:
        The model to start from, and the overrides of the recipe for these problems.
    """
    name, *words = recipe(output_dir, setting)
    config = with_overrides(load_recipe(name).config, words)
    if vocabulary:
        start = output_dir / f"start-{vocabulary}"
        quickstart.build_model(start, seed=0, vocab_size=vocabulary)
        words += ["rollout.prompts_per_step=8", "rollout.completions_per_prompt=4"]
    else:
        start = make_start(output_dir, setting, seed=0)
    tokenizer = load_tokenizer(start)
    train, held_out, *_ = load_prompts(config, tokenizer)
    tested, rest = set_aside(held_out, config.evaluation.problems)
    directory.mkdir(exist_ok=True)
    for split, prompts in (("tested", tested), ("trained", [*train, *rest])):
        for suffix in ("", "_rendered"):
            rows = [
                {
                    "question": tokenizer.decode(each.token_ids) if suffix else each.question,
                    "answer": each.answer,
                }
                for each in prompts
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_whole(directory / f"{split}{suffix}.jsonl", lines)
    words += [f"data={directory / 'trained.jsonl'}", "prompts.options={}"]
    if setting.recipe == "quickstart":
        words.append("reward=exact")
    if setting.digits:
        words.append(f"rollout.server.max_total_tokens={32 * 8 * (setting.digits + 8)}")
    return start, words


def adapter_words(rank: int) -> list[str]:
    """Return the overrides that make the quickstart one of adapters."""
    config = quickstart_adapters.recipe()
    return [
        f"adapters.rank={rank}",
        f"quantization.format={config.quantization.format}",
        f"quantization.group_size={config.quantization.group_size}",
        f"quantization.uaq.scale={config.quantization.uaq.scale}",
        f"optimizer.learning_rate={config.optimizer.learning_rate}",
    ]


def settings(config: Config, directory: Path, run: Path, seed: int) -> dict[str, Any]:
    """Return what `trl_grpo.train` is called with."""
    rollout, optimizer, objective = config.rollout, config.optimizer, config.objective
    return {
        "model": config.model,
        "problems": str(directory / "trained_rendered.jsonl"),
        "reward": config.reward,
        "lines": str(run / "lines.jsonl"),
        "directory": str(run),
        "steps": config.steps,
        "minibatches": optimizer.minibatches_per_step,
        "prompts": rollout.prompts_per_step,
        "completions": rollout.completions_per_prompt,
        "completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "learning_rate": optimizer.learning_rate,
        "warmup_steps": optimizer.warmup_steps,
        "beta2": optimizer.beta2,
        "eps_low": objective.eps_low,
        "eps_high": objective.eps_high,
        "dual_clip": objective.dual_clip,
        "seed": seed,
        "adapter_rank": config.adapters.rank,
        "adapter_alpha": config.adapters.alpha,
    }


def peer(python: Path, module: str, function: str, **fields: Any) -> list[str]:
    """Return the command that calls a function of a module of this folder."""
    return [str(python.absolute()), "-c", CALL, module, function, json.dumps(fields)]


def environment(threads: int = 2) -> dict[str, str]:
    """Return the environment of a peer's process, with this folder to import from."""
    here = str(Path(__file__).parent)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": here}


def measure(command: list[str], run: Path, lines: Path, steps: int) -> tuple[float, float, int]:
    """Run a command that appends a line after each step.

    Returns:
        Seconds and CPU-seconds of a step, and the bytes of memory after the last.

    Raises:
        RuntimeError: the command failed; the message names its log.
    """
    is_own = command[: len(QURL)] == list(QURL)
    run.parent.mkdir(parents=True, exist_ok=True)
    log = run.parent / f"{run.name}.log"
    if not is_own:
        run.mkdir()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=None if is_own else environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        marks: list[tuple[float, float]] = []
        for number in (SKIPPED, steps):
            while process.poll() is None and count(lines) < number:
                time.sleep(0.02)
            marks.append((time.perf_counter(), over_tree(process.pid, cpu_s)))
        memory = over_tree(process.pid, lambda each: each.memory_full_info().pss)
        if process.wait():
            raise RuntimeError(f"a run ended with {process.returncode}; see {log}")
    (begin, cpu_begin), (end, cpu_end) = marks
    counted = steps - SKIPPED
    return (end - begin) / counted, (cpu_end - cpu_begin) / counted, int(memory)


def count(lines: Path) -> int:
    """Return the number of whole lines in a file that may not exist yet."""
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def phases_s(steps: list[Any]) -> dict[str, float]:
    """Return the median seconds of each phase of a run's steps."""
    return {phase: median(step[f"time_{phase}_s"] for step in steps) for phase in PHASES}


def over_tree(pid: int, figure: Callable[[psutil.Process], float]) -> float:
    """Return the sum of a figure over a process and all its descendants that still run."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += figure(each)
    return total


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds that a process, and those it has waited for, have computed."""
    return float(sum(process.cpu_times()[:4]))


def show(setting: str, measured: dict[str, list[Measured]]) -> None:
    """Print the median of each figure with its least and largest, and the ratios of the rounds."""
    for name, results in measured.items():
        print(
            f"{setting}, {name}: "
            f"{machine.spread([each.step_s for each in results])} s, "
            f"{machine.spread([each.cpu_s for each in results])} CPU-s a step, "
            f"{median(each.memory_bytes for each in results) / machine.MIB:.0f} MiB, "
            f"accuracy {machine.spread([100 * each.accuracy for each in results], '.1f')} %, "
            f"reward {machine.spread([each.reward for each in results], '.3f')}, "
            f"rollout {machine.spread([each.tokens_per_s for each in results], '.0f')} tokens/s"
        )
    pairs = list(zip(measured["qurl"], measured["trl"], strict=True))
    for phase in PHASES:
        seconds = [each.phases_s[phase] for each in measured["qurl"]]
        print(f"{setting}, {phase} of qurl: {machine.spread(seconds)} s")
    for what in ("step_s", "cpu_s"):
        ratios = [getattr(own, what) / getattr(peer, what) for own, peer in pairs]
        print(f"{setting}, {what} of qurl over trl: {machine.spread(ratios)}", flush=True)


if __name__ == "__main__":
    main()
