"""Train complete runs on the GPU: `python -m benchmarks.gpu.end_to_end`.

The first run is `qurl train quickstart` with its defaults. Then a larger model (103M parameters)
trains on a harder task (spelling words of seven letters backwards). INT8 and BF16 rollouts get the
same seeds, the same initial model and the same number of steps; `qurl report` overlays the runs,
which are in logs/runs. The learning rates of the larger model are untested guesses.
"""

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu import record
from benchmarks.runs import complete_run
from qurl_megatron import device
from qurl_megatron.config.text import with_overrides

LARGER_DIMENSIONS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
LARGER_OVERRIDES = [
    "data_options.min_word_len=7",
    "data_options.max_word_len=7",
    "rollout.max_prompt_length=8",
    "rollout.max_completion_length=10",
    "learner.dtype=bfloat16",
    "optimizer.learning_rate=2e-5",
    "steps=150",
]
REHEARSAL_OVERRIDES = [
    "steps=2",
    "evaluation.problems=0",
    "rollout.prompts_per_step=8",
    "rollout.completions_per_prompt=4",
    "learner.tensor_parallel_size=1",
]


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+")
    arguments = parser.parse_args()
    seeds = arguments.seeds or ([0] if arguments.rehearsal else [0, 1])
    results = record.Record("end_to_end", arguments)
    device.extend_environment({"OMP_NUM_THREADS": "1"})
    if "quickstart" not in results.rows:
        results.add("quickstart", train("quickstart", [], results))
    for seed in seeds:
        model = results.log_dir / f"model_{seed}"
        if not model.exists():
            write_model(model, seed, arguments.rehearsal)
        for weight_format in ("int8", "bf16"):
            key = f"{weight_format} seed {seed}"
            if key not in results.rows:
                overrides = [
                    f"model={model}",
                    f"seed={seed}",
                    f"quantization.format={weight_format}",
                ]
                overrides += [] if arguments.rehearsal else LARGER_OVERRIDES
                results.add(key, train(key.replace(" ", "_"), overrides, results))
    results.finish()


def write_model(directory: Path, seed: int, is_rehearsal: bool) -> None:
    """Write a larger quickstart model that was shown some answers; it appears once complete."""
    from qurl_megatron.recipes import quickstart

    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if is_rehearsal:
        quickstart.build_model(partial, seed)
    else:
        quickstart.build_model(partial, seed, **LARGER_DIMENSIONS)
        words = [*LARGER_OVERRIDES, f"model={partial}", f"seed={seed}"]
        quickstart.teach(with_overrides(quickstart.recipe(), words), learning_rate=3e-4)
    partial.rename(directory)


def train(name: str, overrides: list[str], results: record.Record) -> dict[str, Any]:
    """Complete the run; return its figures."""
    words = ["quickstart", *overrides, *(REHEARSAL_OVERRIDES if results.rehearsal else [])]
    summary, steps = complete_run(results.log_dir / "runs" / name, words)
    means = {
        field: fmean(step[field] for step in steps)
        for field in (
            "rollout_tokens_per_s",
            "time_rollout_s",
            "time_proximal_s",
            "time_update_s",
            "time_publish_s",
            "kl_behaviour_proximal",
            "logprob_abs_diff",
        )
    }
    return {**summary, **means, "reward_mean_by_step": [step["reward_mean"] for step in steps]}


if __name__ == "__main__":
    main()
