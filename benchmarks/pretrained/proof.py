"""Does the proof of a run let right servers pass? Starts of the recipe, each in its own way.

An arm is `qurl train smollm2` with one step and one server. Nothing is wrong with any of them, so
a run that ends at its proof is a false end. An arm with `resumed` is resumed with these words from
the checkpoint of its last step, for one more step. Its servers are then proven by answers that are
drawn for this alone. The row has what the last proof found; in older rows, where `resumed` is true,
it has the metrics of the resumed step. An arm with `rope` changes the model's config.json: the
learner and the servers have to rotate by it alike. An arm may name another recipe, a toy's.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import QURL, complete_run

SHORT = """steps=1 checkpoint.every_steps=0 evaluation.problems=0 prompts.options.size=400
    learner.data_parallel_size=1 rollout.servers=1 rollout.prompts_per_step=16
    rollout.completions_per_prompt=2 learner.micro_batch_size=4""".split()
INT4 = "quantization.format=int4 quantization.group_size=32"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
# A step of the long runs has few prompts; a proof needs tokens.
RESUMED = "rollout.prompts_per_step=16"
MANY_STEPS = """steps=200 optimizer.minibatches_per_step=1 rollout.prompts_per_step=1
    rollout.completions_per_prompt=4 rollout.max_completion_length=8"""
TOY = """steps=1000 prompts.options.size=10000 rollout.prompts_per_step=32
    rollout.completions_per_prompt=4 learner.micro_batch_size=128"""
LONG_ANSWERS = """data=reasoning_gym:gsm_symbolic prompts.options={"size":400}
    rollout.max_prompt_length=384 rollout.max_completion_length=512"""
ARMS: list[dict[str, Any]] = [
    {"words": f"{words} rollout.temperature={temperature}"}
    for words in (
        "quantization.format=int8",
        "quantization.format=fp8",
        INT4,
        "quantization.format=bf16",
    )
    for temperature in (0.3, 0.6, 1)
] + [
    {"words": "quantization.format=fp8-tensor"},
    {"words": "quantization.uaq.scale=1"},
    {"words": "quantization.smoothing=0.5"},
    {"words": "quantization.smoothing=0.5 quantization.format=fp8"},
    {"words": "quantization.keep=[down_proj]"},
    {"words": "rollout.top_p=0.9"},
    {"words": "rollout.servers=2"},
    {"words": f"rollout.servers=2 {LONG_ANSWERS}"},
    {"words": f"rollout.servers=2 {LONG_ANSWERS} {INT4}"},
    {"words": "rollout.server.tensor_parallel_size=3"},
    {"words": "learner.tensor_parallel_size=3"},
    {"words": "learner.pipeline_parallel_size=2"},
    {"words": "learner.dtype=bfloat16"},
    {"words": "learner.quantized_forward=all"},
    {"words": f"learner.quantized_forward=weights {INT4}"},
    {"words": "adapters.rank=16 optimizer.learning_rate=2e-4"},
    {"words": f"adapters.rank=16 optimizer.learning_rate=2e-4 {INT4}"},
    {"words": "steps=8 optimizer.learning_rate=3e-5", "resumed": RESUMED},
    {"words": f"steps=8 optimizer.learning_rate=3e-5 {INT4}", "resumed": RESUMED},
    *({"words": f"quantization.format={name}", "rope": YARN} for name in ("bf16", "int8")),
    {"words": MANY_STEPS, "resumed": RESUMED},
    {"words": TOY, "resumed": RESUMED, "recipe": "quickstart"},
]


def measure(
    model: Path,
    words: str,
    resumed: str = "",
    rope: dict[str, Any] | None = None,
    recipe: str = "smollm2",
) -> dict[str, Any]:
    """Return what the proof of a run found, and why it ended the run, if it did."""
    with tempfile.TemporaryDirectory(prefix="qurl-proof-") as directory:
        run_dir, log = Path(directory, "run"), Path(directory, "run.log")
        if rope:
            model = rotated(model, rope, Path(directory, "model"))
        given = [recipe, *SHORT, *words.split()]
        given += [f"model={model}"] if recipe == "smollm2" else []  # others make their own
        given += ["checkpoint.every_steps=1000"] if resumed else []  # and after the last step
        row: dict[str, Any] = {"ended": ""}
        try:
            _, (*_, last) = complete_run(run_dir, given)
            if resumed:
                words_again = [f"steps={last['step'] + 1}", *resumed.split()]
                again = [*QURL, "resume", str(run_dir), *words_again]
                with log.open("a") as output:
                    subprocess.run(again, check=True, stdout=output, stderr=subprocess.STDOUT)
        except (RuntimeError, subprocess.CalledProcessError):
            row["ended"] = " ".join(
                log.read_text().splitlines()[-4:]
            )  # the last says how to resume
        if (file := run_dir / "mismatch.json").exists():
            found = json.loads(file.read_text())
            row |= found.get("new_servers" if resumed else "rollout", {})
    print(words, {name: row.get(name) for name in ("ended", *MEANS)}, flush=True)
    return row


def rotated(model: Path, rope: dict[str, Any], directory: Path) -> Path:
    """Write the model with scaled rotary positions to `directory`."""
    shutil.copytree(model, directory)
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"rope_scaling": rope}
    file.write_text(json.dumps(config))
    return directory


MEANS = ("logprob_abs_diff", "predicted_logprob_abs_diff", "kl_behaviour_proximal_k3")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, and the number of false ends."""
    lines = [
        "| `qurl train smollm2` | mean distance | predicted | k3 | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        arm = row["arm"]
        means = [f"{row[name]:.2g}" if name in row else "" for name in MEANS]
        words = " ".join(f"{arm.get('recipe', '')} {arm['words']}".split())
        words += ", YaRN" if "rope" in arm else ", resumed" if arm.get("resumed") else ""
        cells = [words, *means, row["ended"] or "right"]
        lines.append(f"| {' | '.join(cells)} |")
    false = sum(bool(row["ended"]) for row in rows)
    return "\n".join([*lines, f"\n{false} of {len(rows)} right runs were ended."])
