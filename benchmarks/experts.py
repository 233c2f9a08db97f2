"""What many small tensors cost the converter: `python -m benchmarks.experts`.

One pass over 128 experts a layer, each of three tiny weights in INT8, on one learner rank and one
core. Weights this small leave only the host's own work: Python and the calls of torch. It prints
CPU seconds per 10,000 sent tensors (codes and scales are two) of the first pass, which plans, and
of later ones (median and range), and beside them those of a dense model with as many tensors.
Qwen3-30B-A3B sends 37,298 tensors, divided over its expert-parallel ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import time
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.host_cost import Shards
from qurl_megatron import device
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.recipes.qwen3_moe import ARCHITECTURES
from qurl_megatron.weight_sync.reshard import Converter

LAYERS = 3
EXPERTS = dataclasses.replace(
    ARCHITECTURES["Qwen3-30B-A3B"],
    num_layers=LAYERS,
    hidden_size=64,
    moe_intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
)
DENSE = dataclasses.replace(EXPERTS, num_experts=0, experts_per_token=0, intermediate_size=32)
BUCKET_BYTES = 2**29


def measure(architecture: Architecture, layers: int, passes: int) -> tuple[int, list[float]]:
    """Return the tensors that a pass sends, and the CPU seconds of each pass."""
    learner: Any = Shards(architecture, device.device(), layers)
    converter = Converter(learner, "int8", BUCKET_BYTES)
    seconds, num_tensors = [], 0
    for _ in range(passes + 1):
        start = time.process_time()
        conversion = converter.convert(lambda bucket: None)
        seconds.append(time.process_time() - start)
        num_tensors = len(conversion.checksums)
    return num_tensors, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=4)
    passes = parser.parse_args().passes
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    print(f"one of {os.cpu_count()} cores, {platform.machine()}, {versions}")
    device.initialize_distributed()
    with megatron_runtime():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    rows = {"128 experts": (EXPERTS, LAYERS), "dense": (DENSE, 55 * LAYERS)}
    for name, (architecture, layers) in rows.items():
        shape = dataclasses.replace(architecture, num_layers=layers)
        num_tensors, (first, *later) = measure(shape, layers, passes)
        scale = 10_000 / num_tensors
        print(
            f"{name:12} {num_tensors:6,} tensors; CPU seconds per 10,000: first "
            f"{first * scale:.2f}, later {median(later) * scale:.2f} "
            f"({min(later) * scale:.2f} to {max(later) * scale:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
