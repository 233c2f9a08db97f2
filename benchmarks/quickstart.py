"""Measure what a recipe learns, over several seeds: `python -m benchmarks.quickstart`.

Each seed is one complete `qurl train` of the `--recipe` in each of the `--placements` of learner
and servers, with the given fields, such as `adapters.rank=8`. The runs go one after the other. A
step's time is the sum of its phases. It and k3, the estimate of KL(behaviour, proximal), are
medians over the steps; k3's largest step follows. The README quotes the resulting
table, and shows the plot that `--plot` draws of the first placement's runs.
"""

import itertools
import time
from pathlib import Path
from statistics import fmean, median

from benchmarks import machine
from benchmarks.runs import complete_run, plot_rewards
from qurl_megatron.report.metrics import PHASES

KINDS = ("adapters", "agent", "experts", "hybrid")


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument(
        "--recipe",
        choices=["quickstart", *(f"quickstart_{of}" for of in KINDS), "smollm2"],
        default="quickstart",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--placements", nargs="+", default=["separate"])
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
    parser.add_argument("--plot", type=Path, help="SVG file that is written in the end")
    arguments = parser.parse_args()
    machine.print_machine("torch", "sglang", "megatron-core")
    print(
        "placement  seed  before   after    gain  steps  RL time    a step  whole command  publish"
        "       k3  largest"
    )
    gains: dict[str, list[float]] = {placement: [] for placement in arguments.placements}
    runs = {}
    for seed, placement in itertools.product(arguments.seeds, arguments.placements):
        name = f"{arguments.recipe}-{placement}-seed{seed}-{time.strftime('%H%M%S')}"
        start = time.perf_counter()
        run_dir = arguments.output_dir.absolute() / name
        words = [arguments.recipe, f"seed={seed}", f"rollout.placement={placement}"]
        words += arguments.fields
        summary, steps = complete_run(run_dir, words)
        command_s = time.perf_counter() - start
        k3 = [step["kl_behaviour_proximal_k3"] for step in steps]
        step_s = median(sum(step[f"time_{phase}_s"] for phase in PHASES) for step in steps)
        if placement == arguments.placements[0]:
            runs[f"seed {seed}"] = run_dir
        before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
        gains[placement].append(100 * (after - before))
        print(
            f"{placement:9}  {seed:4}  {before:6.1%}  {after:6.1%}  {gains[placement][-1]:+6.1f}  "
            f"{summary['steps']:5}  {summary['time_s']:5.0f} s  {step_s:6.2f} s  "
            f"{command_s:11.0f} s  {summary['time_publish_s_mean']:5.3f} s  "
            f"{median(k3):7.1e}  {max(k3):7.1e}",
            flush=True,
        )
    for placement, of_seeds in gains.items():
        mean = f"mean gain {fmean(of_seeds):+.1f} ± {machine.standard_error(of_seeds):.1f} points"
        print(f"{placement}: {mean}, minimum {min(of_seeds):+.1f}")
    if arguments.plot:
        plot_rewards(arguments.plot, runs)


if __name__ == "__main__":
    main()
