"""Measure what a quickstart learns, over several seeds: `python -m benchmarks.quickstart`.

Each seed is one complete `qurl train quickstart`, or of the recipe that `--recipe` names. The seeds
run one after the other. The README quotes the resulting table, and shows the plot that `--plot`
draws: the reward of each step and the held-out accuracy, as `qurl report` does.
"""

import dataclasses
import time
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import machine
from benchmarks.runs import complete_run
from qurl_megatron.report import plots
from qurl_megatron.report.plots import read_run

INK = "#808080"  # text and axes of the plot, legible on light and on dark paper


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument(
        "--recipe",
        choices=["quickstart", "quickstart_agent", "quickstart_experts"],
        default="quickstart",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    parser.add_argument("--plot", type=Path, help="SVG file that is written in the end")
    arguments = parser.parse_args()
    machine.print_machine("torch", "sglang", "megatron-core")
    print("seed  before   after    gain  steps  RL time  whole command  mean publish")
    gains, runs = [], []
    for seed in arguments.seeds:
        name = f"{arguments.recipe}-seed{seed}-{time.strftime('%H%M%S')}"
        start = time.perf_counter()
        run_dir = arguments.output_dir.absolute() / name
        summary, _ = complete_run(run_dir, [arguments.recipe, f"seed={seed}"])
        command_s = time.perf_counter() - start
        runs.append(dataclasses.replace(read_run(run_dir), name=f"seed {seed}"))
        before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
        gains.append(100 * (after - before))
        print(
            f"{seed:4}  {before:6.1%}  {after:6.1%}  {gains[-1]:+6.1f}  {summary['steps']:5}  "
            f"{summary['time_s']:5.0f} s  {command_s:11.0f} s  "
            f"{summary['time_publish_s_mean']:10.3f} s",
            flush=True,
        )
    spread = f", standard deviation {stdev(gains):.1f}" if len(gains) > 1 else ""
    print(f"mean gain {fmean(gains):+.1f} points{spread}, minimum {min(gains):+.1f}")
    if arguments.plot:
        plot = plots.svg("Reward and held-out accuracy", plots.reward, runs)
        arguments.plot.write_text(plot.replace("currentColor", INK))


if __name__ == "__main__":
    main()
