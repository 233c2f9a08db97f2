"""Compare what each objective learns from the same start: `python -m benchmarks.objectives`.

All arms of a seed start from the same model, which has seen right answers. Each arm is one complete
`qurl train` with its own objective, weight format and UAQ scale. The arms compare
truncated importance sampling (TIS), adaptive clipping range (ACR) and update-aware quantization
(UAQ) with BF16 rollouts and with the uncorrected objectives.

    setting        what differs from 50 steps of the quickstart with 8-bit rollouts
    quickstart     half the learning rate
    large_gap      INT4 in groups of 32, and twice the learning rate
    asynchronous   the large gap, and servers that sample up to four steps ahead
    long           INT4, and answers of 64 tokens: four digits are continued by 64 more, each
                   the sum modulo 10 of the one before and the fourth before. An answer is right if
                   all of them are. 32 x 8 answers a step, at two thirds of the learning rate
    longest        the same with 256 digits, 12 steps of 16 x 8 answers, and a third more than the
                   quickstart's learning rate
    experts        a mixture of experts, and 8-bit or 4-bit rollouts whose choice of experts the
                   learner compares with its own, or replays
    agent          the 60 steps of quickstart_agent, whose episodes have three turns
    smollm2        a real model, as it comes: 16 steps of the recipe `smollm2` with half of its
                   prompts and a constant learning rate
    rounding       the same by learning rate, with a BF16 learner and each way to round masters, and
                   with a float32 learner
    many_updates   the same model, with 16 minibatches a step and three times the learning rate:
                   tokens are clipped, which alone can tell ACR from TIS

The figures of a run are appended to benchmarks/results/objectives.jsonl when it ends. A second call
skips the runs that have figures of the installed versions, and resumes the runs that were
interrupted. Then it prints a table. `qurl report` overlays the runs themselves, and `--plot` draws
their rewards: README has those of `--setting smollm2 --arms "acr int8" --seeds 1 2`.
"""

import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from benchmarks import machine
from benchmarks.runs import QURL, complete_run, plot_rewards
from qurl_megatron.config.text import load, with_overrides
from qurl_megatron.files import read_json_lines, write_whole
from qurl_megatron.launch.recipe import load_recipe, run_function
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids
from qurl_megatron.recipes import quickstart

RESULTS = Path(__file__).parent / "results" / "objectives.jsonl"
STEPS = 50
PACKAGES = ("torch", "sglang", "megatron-core")

NO_UAQ = "quantization.uaq.scale=1"
UAQ = "quantization.uaq.scale=1.5"


@dataclass(frozen=True)
class Setting:
    """Arms that start from the same models."""

    arms: dict[str, list[str]]  # name -> overrides of the arm; the others are compared to the first
    overrides: list[str] = field(default_factory=list)  # of every arm
    digits: int = 0  # of an answer; 0: the quickstart's task
    recipe: str = "quickstart"
    goes_on_from: str = ""  # a setting whose start is shown answers of this one
    is_taught: bool = True  # the start was shown right answers
    late: float = 0.1  # the fraction of the steps, the last, over which figures are means


def arm(objective: str, weight_format: str, uaq: str = NO_UAQ) -> list[str]:
    """Return the config overrides of one arm."""
    words = [f"objective.objective={objective}", f"quantization.format={weight_format}", uaq]
    # 128 divides none of the model's widths.
    return [*words, *["quantization.group_size=32"] * (weight_format == "int4")]


def int4_arms(*objectives: str) -> dict[str, list[str]]:
    """Return an arm with 4-bit codes in groups of 32 for each objective.

    Recorded rows with "int4" alone are older, with one scale for each output channel.
    """
    return {f"{objective} int4-g32": arm(objective, "int4") for objective in objectives}


BF16 = {"bf16": arm("on_policy", "bf16")}
AWARE = [*arm("acr", "int4"), "learner.quantized_forward=all"]
ADAPTERS = [*arm("acr", "int4"), "adapters.rank=16", "optimizer.learning_rate=2e-4"]
LEARNING_RATE = ["optimizer.learning_rate=1.5e-4", "optimizer.warmup_steps=20"]
TWICE_THE_RATE = "optimizer.learning_rate=3e-4"
SETTINGS = {
    "quickstart": Setting(
        BF16
        | {f"{name} int8": arm(name, "int8") for name in ("naive", "on_policy", "tis", "acr")}
        | {
            "acr+uaq int8": arm("acr", "int8", UAQ),
            "tis fp8": arm("tis", "fp8"),
            "acr fp8": arm("acr", "fp8"),
        }
    ),
    "large_gap": Setting(
        BF16
        | int4_arms("naive", "on_policy", "tis", "acr", "sequence_tis")
        | {"acr+uaq int4-g32": arm("acr", "int4", UAQ)},
        [TWICE_THE_RATE],
    ),
    # on_policy is refused where tokens are stale: it corrects for nothing.
    "asynchronous": Setting(
        {"bf16": arm("tis", "bf16")}
        | int4_arms("naive", "decoupled", "tis", "acr", "sequence_tis"),
        [TWICE_THE_RATE, "rollout.max_staleness=4"],
    ),
    "long": Setting(
        BF16 | int4_arms("naive", "tis", "acr", "sequence_tis"),
        ["optimizer.learning_rate=1e-4"],
        digits=64,
    ),
    "longest": Setting(
        BF16 | int4_arms("tis", "sequence_tis"),
        [
            "steps=12",
            "rollout.prompts_per_step=16",
            "optimizer.learning_rate=2e-4",
            "optimizer.warmup_steps=4",
            "evaluation.problems=512",
        ],
        digits=256,
        goes_on_from="long",  # 256 digits are learned much sooner after 64
    ),
    "experts": Setting(
        {"compare bf16": [*arm("tis", "bf16"), "rollout.routing=compare"]}
        | {
            f"{routing} {name}": [*arm("tis", weight_format), f"rollout.routing={routing}"]
            for name, weight_format in (("int8", "int8"), ("int4-g32", "int4"))
            for routing in ("compare", "replay")
        },
        recipe="quickstart_experts",
    ),
    "agent": Setting(
        BF16 | {"acr+uaq int8": arm("acr", "int8", UAQ)} | int4_arms("naive", "tis"),
        ["steps=60"],
        recipe="quickstart_agent",
    ),
    # In the order in which the first hours answer most.
    "smollm2": Setting(
        BF16
        | {"bf16 nearest": [*arm("on_policy", "bf16"), "optimizer.rounding=nearest"]}
        | int4_arms("naive", "acr", "tis")
        | {f"{name} int8": arm(name, "int8") for name in ("naive", "acr", "tis")}
        | {"acr+uaq int8": arm("acr", "int8", UAQ)}
        | {
            "acr aware int4-g32": AWARE,
            **{
                f"acr smoothed {name}": [*words, "quantization.smoothing=0.5"]
                for name, words in (("int8", arm("acr", "int8")), ("int4-g32", arm("acr", "int4")))
            },
        }
        | {
            f"acr aware int4-g32 {rate}": [*AWARE, f"optimizer.learning_rate={rate}"]
            for rate in ("3e-5", "1e-4")
        }
        # What servers have, as with adapters; the copy of the others is made of the BF16 export.
        | {
            f"acr aware int4-g32 3e-5 served{name}": [
                *AWARE,
                "optimizer.learning_rate=3e-5",
                "evaluation.quantized=true",
                *words,
            ]
            for name, words in (("", []), (" bf16 learner", ["learner.dtype=bfloat16"]))
        }
        | {"acr adapters int4-g32": ADAPTERS, "acr adapters int4-g32 long": [*ADAPTERS, "steps=32"]}
        | int4_arms("on_policy", "sequence_tis", "decoupled")
        | {"acr+uaq int4-g32": arm("acr", "int4", UAQ)}
        | {f"{name} fp8": arm(name, "fp8") for name in ("naive", "acr")}
        | {"on_policy int8": arm("on_policy", "int8")},
        [
            "steps=16",
            "rollout.prompts_per_step=8",
            "optimizer.minibatches_per_step=4",
            "optimizer.learning_rate=1e-5",
            "optimizer.warmup_steps=4",
            "optimizer.schedule=constant",
            "checkpoint.every_steps=8",
        ],
        recipe="smollm2",
        is_taught=False,
        late=0.5,
    ),
}
RATES = {rate: [f"optimizer.learning_rate={rate}"] for rate in ("3e-6", "1e-5", "1e-6", "3e-7")}
RATES["1e-6 long"] = [*RATES["1e-6"], "steps=60"]
SETTINGS["rounding"] = replace(
    SETTINGS["smollm2"],
    arms={
        f"{name} {rate}": [*arm("acr", "int8"), *steps, *words]
        for rate, steps in RATES.items()
        for name, words in {
            "unbiased": ["learner.dtype=bfloat16"],
            "nearest": ["learner.dtype=bfloat16", "optimizer.rounding=nearest"],
            "float32": [],
        }.items()
    }
    # Rollouts without a mismatch: what only the learner's rounding costs.
    | {
        f"{name} 1e-6 bf16": [
            *arm("acr", "bf16"),
            "optimizer.learning_rate=1e-6",
            "learner.dtype=bfloat16",
            f"optimizer.rounding={name}",
        ]
        for name in ("unbiased", "nearest")
    },
    # A minibatch in one pass, for without BF16 instructions every pass makes weights float32.
    overrides=[*SETTINGS["smollm2"].overrides, "learner.micro_batch_size=16"],
)
SETTINGS["many_updates"] = replace(
    SETTINGS["smollm2"],
    arms=int4_arms("tis", "acr", "naive"),
    overrides=[
        *SETTINGS["smollm2"].overrides,
        "steps=8",
        "rollout.prompts_per_step=16",
        "optimizer.minibatches_per_step=16",
        "optimizer.learning_rate=3e-5",
        "checkpoint.every_steps=4",
    ],
)
# With one learner rank and one server, each waits while the other works. So a run keeps about one
# core busy, and two runs share two cores.
ONE_RANK = [
    "rollout.servers=1",
    "learner.data_parallel_size=1",
    "learner.tensor_parallel_size=1",
    "learner.expert_parallel_size=1",
]
ALONE = Lock()  # concurrent runs share the file of problems, and transformers' lazy imports


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", help="default: all of the setting")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--show", action="store_true", help="print the table of the runs there are")
    parser.add_argument("--plot", type=Path, help="SVG file of the runs in the output directory")
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.setting]
    arms = arguments.arms or list(setting.arms)
    if unknown := [name for name in arms if name not in setting.arms]:
        parser.error(f"--arms: {unknown[0]!r}; {arguments.setting} has {', '.join(setting.arms)}")
    output_dir = arguments.output_dir.absolute()
    rows = read_rows(arguments.setting)
    missing = (
        []
        if arguments.show
        else [(name, seed) for seed in arguments.seeds for name in arms if (name, seed) not in rows]
    )

    def directory(name: str, seed: int) -> Path:
        return output_dir / f"{arguments.setting}-{name.replace(' ', '-')}-{seed}"

    def run_arm(key: tuple[str, int]) -> None:
        name, seed = key
        start = make_start(output_dir, setting, seed)
        words = [*recipe(output_dir, setting), *overrides(setting, name, seed), f"model={start}"]
        run_dir = directory(name, seed)
        rows[key] = summarize(*complete_run(run_dir, words), setting.late)
        # Verifiers of other tasks read more than a right answer's text; BF16 has no other copy, and
        # with adapters the policy is what servers have.
        has_copy = "quantization.format=bf16" not in words and "adapters" not in name
        if (setting.digits or not setting.is_taught) and has_copy:
            rows[key]["copy_accuracy"] = copy_accuracy(run_dir)
        add_row(arguments.setting, name, seed, rows[key])
        shutil.rmtree(run_dir / "checkpoints")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = sorted({seed for _, seed in missing})
        list(pool.map(lambda seed: make_start(output_dir, setting, seed), seeds))
        list(pool.map(run_arm, missing))
    show(rows, arms, arguments.seeds)
    if arguments.plot:
        runs = {
            f"{name}, seed {seed}": directory(name, seed)
            for seed in arguments.seeds
            for name in arms
        }
        plot_rewards(arguments.plot, {name: path for name, path in runs.items() if path.exists()})


def read_rows(setting: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the runs of a setting that the installed versions made, by arm and seed."""
    wanted = {"setting": setting, **machine.package_versions(PACKAGES)}
    lines = [line for line in read_json_lines(RESULTS) if wanted.items() <= line.items()]
    return {(line["arm"], line["seed"]): line for line in lines}


def add_row(setting: str, name: str, seed: int, row: dict[str, Any]) -> None:
    """Append a run to the file of results."""
    line = {
        "setting": setting,
        "arm": name,
        "seed": seed,
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {machine.processor()} ({machine.instructions()})",
        "python": platform.python_version(),
        **machine.package_versions(PACKAGES),
        **row,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{name}, seed {seed}: {row['held_out_accuracy']:.1%}", flush=True)


def show(rows: dict[tuple[str, int], dict[str, Any]], arms: list[str], seeds: list[int]) -> None:
    """Print a Markdown table of all arms that have runs.

    The gain is the mean difference to the first arm's run of the same seed.
    """

    def mean_and_error(values: list[float]) -> str:
        percent = [100 * value for value in values]
        return f"{fmean(percent):.1f} ± {machine.standard_error(percent):.1f}"

    print(
        f"| arm | held-out, %, by seed | mean ± s.e. | gain over {arms[0]}, points | "
        "quantized copy | entropy | KL k3 | max ratio | above C | clipped | widened | "
        "other experts |"
    )
    print(f"|{'---|' * 12}")
    for name in arms:
        runs = {seed: rows[name, seed] for seed in seeds if (name, seed) in rows}
        if not runs:
            continue

        def column(metric: str, runs: dict[int, Any] = runs) -> list[float]:
            """Return a figure of each run, or nothing: older rows, and other models, lack some."""
            values = [row.get(metric) for row in runs.values()]
            return [] if None in values else values

        after = column("held_out_accuracy")
        gains = [
            row["held_out_accuracy"] - rows[arms[0], seed]["held_out_accuracy"]
            for seed, row in runs.items()
            if name != arms[0] and (arms[0], seed) in rows
        ]
        copies, entropies = column("copy_accuracy"), column("entropy")
        changed = column("routing_changed_fraction")
        cells = (
            name,
            ", ".join(f"{value:.1%}"[:-1] for value in after),
            mean_and_error(after),
            mean_and_error(gains) if gains else "",
            mean_and_error(copies) if copies else "",
            f"{fmean(entropies):.2f}" if entropies else "",
            f"{fmean(column('kl_behaviour_proximal_k3')):.1e}",
            f"{max(column('ratio_proximal_behaviour_max')):.1f}",
            f"{fmean(column('tis_truncated_fraction')):.2%}",
            f"{fmean(column('clip_fraction')):.2%}",
            f"{fmean(column('acr_widened_fraction')):.3%}",
            f"{fmean(changed):.2%}" if changed else "",
        )
        print(f"| {' | '.join(cells)} |")


def recipe(output_dir: Path, setting: Setting) -> list[str]:
    """Return the recipe of the setting's task and its overrides; write problems of its own."""
    if not setting.digits:
        return [setting.recipe]
    path = output_dir / f"digits-{setting.digits}.jsonl"
    with ALONE:
        if not path.exists():
            output_dir.mkdir(parents=True, exist_ok=True)
            problems = rows_of_digits(setting.digits)
            write_whole(path, "".join(json.dumps(problem) + "\n" for problem in problems))
    return [
        "quickstart",
        f"data={path}",
        "prompts.options={}",
        "reward=exact",
        "rollout.max_prompt_length=4",
        f"rollout.max_completion_length={setting.digits + 1}",
        "rollout.prompts_per_step=32",
        "evaluation.problems=256",
    ]


def overrides(setting: Setting, name: str, seed: int) -> list[str]:
    """Return the overrides of an arm's run, the model aside."""
    run = [f"seed={seed}", f"steps={STEPS}", "checkpoint.keep_last=1"]
    rate = [] if setting.recipe == "quickstart_agent" else LEARNING_RATE
    return [*run, *rate, *ONE_RANK, *setting.overrides, *setting.arms[name]]


def rows_of_digits(digits: int) -> Iterator[dict[str, str]]:
    """Yield four digits as a question and the next ones as its answer, for all four digits."""
    for start in itertools.product(range(10), repeat=4):
        row = list(start)
        while len(row) < len(start) + digits:
            row.append((row[-1] + row[-len(start)]) % 10)
        text = "".join(map(str, row))
        yield {"question": text[: len(start)], "answer": text[len(start) :]}


def copy_accuracy(run_dir: Path) -> float:
    """Return the greedy accuracy of the final model's quantized copy on the held-out problems.

    With smoothing its scales are by held-out prompts and the final model, so the run's servers had
    others.
    """
    config = load(run_dir / "config.yaml")
    data = max(run_dir.glob("evaluation/step_*/held_out.jsonl"))  # of the last evaluation
    with TemporaryDirectory() as scratch:
        output = Path(scratch) / "copy"
        words = [
            *[str(run_dir / "final_model"), str(data), f"output={output}"],
            *["prompts.question_key=question", f"reward={config.reward}"],
            f"format={config.quantization.format}",
            f"group_size={config.quantization.group_size}",
            f"smoothing={config.quantization.smoothing:g}",
            f"max_prompt_length={config.rollout.max_prompt_length}",
            f"max_completion_length={config.rollout.max_completion_length}",
            f"server.mem_fraction_static={config.evaluation.server.mem_fraction_static}",
            f"server.max_total_tokens={config.evaluation.server.max_total_tokens}",
        ]
        ended = subprocess.run([*QURL, "eval", *words], capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"qurl eval {' '.join(words)}: {ended.stderr[-500:]}")
        summary = json.loads((output / "summary.json").read_text())
    (averages,) = summary["results"].values()
    return float(averages["Avg@1"]["mean"])


def make_start(output_dir: Path, setting: Setting, seed: int) -> Path:
    """Return a model that was shown right answers until it gives some of them."""
    task = f"digits-{setting.digits}" if setting.digits else setting.recipe
    directory = output_dir / f"start-{task}-{seed}"
    if directory.exists():
        return directory
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    name, *words = recipe(output_dir, setting)
    config = with_overrides(load_recipe(name).config, [*words, f"model={partial}", f"seed={seed}"])
    if setting.goes_on_from:
        shutil.copytree(make_start(output_dir, SETTINGS[setting.goes_on_from], seed), partial)
    else:
        with ALONE:
            run_function(config.model_builder, partial, seed)
    tokenizer = load_tokenizer(partial)
    architecture = Architecture.from_directory(partial)
    config.rollout.stop_token_ids = stop_token_ids(architecture, tokenizer)
    if setting.is_taught:  # RL learns little if less than half of the answers are right
        quickstart.teach(config, *((0.5, 32) if setting.digits else ()))
    partial.rename(directory)
    return directory


def summarize(
    summary: dict[str, Any], steps: list[dict[str, Any]], fraction: float
) -> dict[str, Any]:
    """Return the figures of a finished run; `means` are over the last `fraction` of its steps."""
    late = steps[-max(1, int(len(steps) * fraction)) :]
    means = (
        "reward_mean",
        "entropy",
        "kl_behaviour_proximal_k3",
        "tis_truncated_fraction",
        "acr_widened_fraction",
        "clip_fraction",
        "code_flip_fraction",
        "routing_changed_fraction",  # only in a mixture of experts
    )
    return {
        "held_out_accuracy_before": summary["held_out_accuracy_before"],
        "held_out_accuracy": summary["held_out_accuracy_after"],
        "held_out_accuracy_by_step": {
            step["step"]: step["held_out_accuracy"]
            for step in steps
            if step["held_out_accuracy"] is not None
        },
        "update_shown_fraction": steps[-1]["update_shown_fraction"],
        "steps": len(steps),
        "ratio_proximal_behaviour_max": max(step["ratio_proximal_behaviour_max"] for step in steps),
        # A mean over late steps does not show what happens in a single one.
        **{
            f"{metric}_by_step": [round(step[metric], 6) for step in steps]
            for metric in ("reward_mean", "tis_truncated_fraction", "acr_widened_fraction")
        },
        **{
            metric: fmean(step[metric] for step in late)
            for metric in means
            if late[0][metric] is not None
        },
    }


if __name__ == "__main__":
    main()
