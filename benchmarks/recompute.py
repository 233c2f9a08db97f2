"""Measure what each recomputation costs and saves: `python benchmarks/recompute.py`.

Learners of one rank on the CPU take updates on the same batch, in turn: one that keeps all
activations, then one for each mode. Printed for each mode:

- the CPU seconds of an update on one thread, and their ratio to those of the update of the same
  round that keeps everything: median and range over the rounds;
- the most bytes that autograd holds for the backward pass, without parameters.

The model has Qwen2.5-32B's proportions at a tenth of its width, so its layers, and not the output
layer, take most of the time and memory. On a CPU norms and SwiGLU are several operations each,
which keep more than a GPU's fused ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # what measures learners

from learner_memory import allocated  # noqa: E402
from qurl_megatron import device  # noqa: E402
from qurl_megatron.algorithm.batch import TrainBatch  # noqa: E402
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig  # noqa: E402
from qurl_megatron.learner.learner import Learner  # noqa: E402
from qurl_megatron.loop.warmup import negative_log_likelihood  # noqa: E402
from tiny import VOCAB_SIZE, build_tiny_model  # noqa: E402

LAYERS = 8
DIMS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2752,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": LAYERS,
}
KEPT = "nothing recomputed"
MODES: dict[str, dict[str, Any]] = {
    KEPT: {},
    "offload_optimizer=true": {"offload_optimizer": True},
    "recompute=selective": {"recompute": "selective"},
    f"recompute=full, {LAYERS // 2} of {LAYERS} layers": {
        "recompute": "full",
        "recompute_layers": LAYERS // 2,
    },
    "recompute=full": {"recompute": "full"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of updates in each mode")
    parser.add_argument("--rows", type=int, default=4, help="number of sequences in an update")
    parser.add_argument("--time", type=int, default=64, help="tokens in a sequence")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")))
    device.initialize_distributed()
    with tempfile.TemporaryDirectory() as directory:
        model = build_tiny_model(Path(directory), "qwen2", **DIMS)
        num_bytes = {
            mode: allocated(model, _learner(fields), arguments.rows, arguments.time)["activations"]
            for mode, fields in MODES.items()
        }
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(arguments.rounds):
            for mode, fields in MODES.items():
                seconds[mode].append(update_s(model, fields, arguments.rows, arguments.time))
    torch.distributed.destroy_process_group()
    for mode, times in seconds.items():
        ratios = [own / kept for own, kept in zip(times, seconds[KEPT], strict=True)]
        print(
            f"{mode}: update {median(times):.2f} CPU s, "
            f"x {median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]; "
            f"activations {num_bytes[mode] / 2**20:.1f} MiB, "
            f"x {num_bytes[mode] / num_bytes[KEPT]:.3f}"
        )


def update_s(model: Path, fields: dict[str, Any], rows: int, time_: int) -> float:
    """Return the CPU seconds of a new learner's second update."""
    tokens = torch.randint(
        2, VOCAB_SIZE, (rows, time_ + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = TrainBatch(
        lengths=torch.full((rows,), time_ + 1),
        tokens=tokens.flatten().int(),
        loss_mask=torch.ones(tokens.numel(), dtype=torch.bool),
        loss_weights=torch.full((tokens.numel(),), 1 / tokens.numel()),
    )
    learner = Learner(model, _learner(fields), OptimizerConfig())
    try:
        for _ in range(2):
            start = time.process_time()
            share = learner.share(batch)
            learner.update(share, negative_log_likelihood, temperature=1.0)
        return time.process_time() - start
    finally:
        learner.close()


def _learner(fields: dict[str, Any]) -> LearnerConfig:
    return LearnerConfig(dtype="float32", **fields)


if __name__ == "__main__":
    main()
