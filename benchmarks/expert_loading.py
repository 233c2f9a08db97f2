"""How long a server takes to load and verify many small tensors: the experts of a model.

    python -m benchmarks.expert_loading

A mixture of experts is sent as one tensor an expert and projection, with its scales: 37,000 for
30B-A3B. A dense model of the same bytes has a few large ones. This builds SGLang's model for one
rank of a server, on a CPU, and loads and verifies the same bytes in INT8 in turns, as experts and
as the layers of a dense model.

It prints seconds and seconds per 10,000 tensors, medians and ranges over the rounds, and what a
tensor costs beyond its bytes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))  # SGLang's models without a server

LAYERS, EXPERTS, HIDDEN, CHANNELS = 4, 128, 256, 96  # an expert has 74 kB
DENSE = {"intermediate_size": EXPERTS * CHANNELS}  # the same bytes in one tensor a projection


def main() -> None:
    """Time both models in turns and print the table."""
    import sglang_loader
    from tiny import build_tiny_model, quantized

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN}
    experts = {"num_experts": EXPERTS, "moe_intermediate_size": CHANNELS}
    shapes: dict[str, dict[str, Any]] = {
        "experts": {"architecture": "qwen3_moe", **sizes, **experts},
        "dense": {"architecture": "qwen3", **sizes, **DENSE},
    }
    with tempfile.TemporaryDirectory() as scratch:
        models = {n: build_tiny_model(Path(scratch, n), **shape) for n, shape in shapes.items()}
        sent = {name: quantized(model, "int8") for name, model in models.items()}
        with sglang_loader.engine(models["experts"]), sglang_loader.as_rank(0, 1):
            ranks = {n: sglang_loader.build(model, "int8") for n, model in models.items()}
            seconds = measure(ranks, sent, rounds)
    print(f"{platform.processor() or platform.machine()}, 1 thread, {rounds} rounds in turns,")
    print(f"torch {torch.__version__}, sglang {version('sglang')}")
    print("| model | tensors | MB | load, s | verify, s | load and verify 10,000 tensors, s |")
    print("|---|---|---|---|---|---|")
    medians = {}
    for name, tensors in sent.items():
        load, verify = seconds[name, "load"], seconds[name, "verify"]
        both = [a + b for a, b in zip(load, verify, strict=True)]
        medians[name] = statistics.median(both)
        per_tensor = [10_000 * each / len(tensors) for each in both]
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        columns = [name, f"{len(tensors):,}", f"{size:.0f}", spread(load), spread(verify)]
        print(f"| {' | '.join([*columns, spread(per_tensor)])} |")
    more = len(sent["experts"]) - len(sent["dense"])
    cost_s = (medians["experts"] - medians["dense"]) / more
    print(f"A tensor more costs {1e6 * cost_s:.0f} microseconds at the same bytes.")


def measure(
    ranks: dict[str, Any], sent: dict[str, dict[str, Tensor]], rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each round, by model and by "load" and "verify"."""
    from types import SimpleNamespace

    from qurl_megatron.quantization.checksum import checksum
    from qurl_megatron.sglang_plugin.verify import compute_checksum

    right = {
        name: {tensor: checksum(values) for tensor, values in tensors.items()}
        for name, tensors in sent.items()
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for name, model in ranks.items():
            checker = SimpleNamespace(
                _get_model=lambda model=model: model,
                _parallelism_info=lambda: SimpleNamespace(model_dump=dict),
            )
            load_s, _ = timed(lambda: model.load_weights(sent[name].items()))  # noqa: B023
            verify_s, answer = timed(lambda: compute_checksum(checker))  # noqa: B023
            held = {key.rpartition("@")[0]: int(v) for key, v in answer["checksums"].items()}
            assert held == right[name]
            if turn:  # the first is for warmth
                seconds.setdefault((name, "load"), []).append(load_s)
                seconds.setdefault((name, "verify"), []).append(verify_s)
    return seconds


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds that `work` takes, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def spread(values: list[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
