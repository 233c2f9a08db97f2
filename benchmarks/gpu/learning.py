"""Train a real model on this GPU: `python -m benchmarks.gpu.learning`.

Each run is a complete `qurl train smollm2` of `--steps` steps, with learner and servers on all GPUs
of the machine, one run after the other:

    int8, fp8  a quantized copy, with UAQ as in the recipe
    bf16       BF16 rollouts
    adapters   rank 16 over an INT8 base

A row has the held-out accuracy before and after, medians of a step and of each of its phases, and
of every step the reward, the KL of the rollouts (k3) and the entropy.
"""

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import record
from benchmarks.objectives import NO_UAQ
from benchmarks.runs import complete_run
from qurl_megatron.report.metrics import PHASES

ADAPTERS = ["adapters.rank=16", "optimizer.learning_rate=2e-4", NO_UAQ]
RUNS = {
    "int8": ["quantization.format=int8"],
    "bf16": ["quantization.format=bf16", NO_UAQ],
    "fp8": ["quantization.format=fp8"],
    "adapters": ["quantization.format=int8", *ADAPTERS],
}
CURVES = ("reward_mean", "kl_behaviour_proximal_k3", "entropy")


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, help="of each run; 60, and 2 in a rehearsal")
    arguments = parser.parse_args()
    log = record.Record("learning", arguments)
    words = ["smollm2", f"steps={arguments.steps or 60}", "learner.dtype=bfloat16"]
    if arguments.rehearsal:
        words = ["quickstart", f"steps={arguments.steps or 2}", "evaluation.problems=16"]
    for name in arguments.runs:
        if name not in log.rows:
            run_dir: Path = log.log_dir / f"learning-{name}"
            log.add(name, summarize(*complete_run(run_dir, [*words, *RUNS[name]])))
    if log.rows.keys() >= RUNS.keys():
        log.finish()


def summarize(summary: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a finished run. The first step, in which much is compiled, is left out."""
    phases = [f"time_{phase}_s" for phase in PHASES]
    later = steps[1:] or steps
    return {
        "held_out_accuracy_before": summary["held_out_accuracy_before"],
        "held_out_accuracy_after": summary["held_out_accuracy_after"],
        "step_s": median(sum(step[phase] for phase in phases) for step in later),
        **{phase: median(step[phase] for step in later) for phase in phases},
        **{name: [step[name] for step in steps] for name in CURVES},
    }


if __name__ == "__main__":
    main()
