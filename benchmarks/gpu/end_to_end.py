"""Whole runs on the GPU: `python -m benchmarks.gpu.end_to_end`.

First `qurl train quickstart` as a user types it. Then a larger model (103M parameters) on a harder
task (words of seven letters, spelt backward), with INT8 and with BF16 rollouts, from the same seeds
and the same model, for as long each; the report that lays them over each other is kept beside the
rows. Learning rates of the larger model are guesses until they have been run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu import record

QURL = "from qurl_megatron.cli import main; main()"  # works where no script was installed
LARGER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
LARGER_WORDS = [
    "data_options.min_word_len=7",
    "data_options.max_word_len=7",
    "rollout.max_prompt_length=8",
    "rollout.max_response_length=10",
    "learner.dtype=bfloat16",
    "optimizer.learning_rate=2e-5",
    "warmup.learning_rate=3e-4",
    "warmup.max_steps=600",
    "steps=150",
]
REHEARSED_WORDS = [
    "steps=2",
    "warmup.max_steps=0",
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
    if "quickstart" not in results.rows:
        results.add("quickstart", one_run("quickstart", [], results))
    for seed in seeds:
        model = results.log_dir / f"model_{seed}"
        if not model.exists():
            build(model, seed, {} if arguments.rehearsal else LARGER)
        for weight_format in ("int8", "bf16"):
            key = f"{weight_format} seed {seed}"
            if key not in results.rows:
                words = [f"model={model}", f"seed={seed}", f"quantization.format={weight_format}"]
                words += [] if arguments.rehearsal else LARGER_WORDS
                results.add(key, one_run(key.replace(" ", "_"), words, results))
    write_report(results, arguments)
    results.finish()


def build(model: Path, seed: int, dimensions: dict[str, int]) -> None:
    from recipes.quickstart import build_model

    partial = model.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    build_model(partial, seed, **dimensions)
    partial.rename(model)


def one_run(name: str, words: list[str], results: record.Record) -> dict[str, Any]:
    """A run to its end, after a kill from its newest checkpoint; what it came to.

    Raises:
        RuntimeError: it failed; the message names its output.
    """
    run_dir = results.log_dir / "runs" / name
    words = [*words, *(REHEARSED_WORDS if results.rehearsal else [])]
    begin = ["train", "quickstart", f"output_dir={run_dir.parent}", f"name={name}", *words]
    command = ["resume", str(run_dir)] if run_dir.exists() else begin
    log = results.log_dir / f"{name}.log"
    if record.run(["-c", QURL, *command], log, OMP_NUM_THREADS="1"):
        raise RuntimeError(f"{name} failed; see {log}")
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
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


def write_report(results: record.Record, arguments: argparse.Namespace) -> None:
    from qurl_megatron.report.page import write_report

    runs = results.log_dir / "runs"
    compared = [runs / key.replace(" ", "_") for key in results.rows if key != "quickstart"]
    write_report(compared, results.path.with_suffix(".html"))


if __name__ == "__main__":
    main()
