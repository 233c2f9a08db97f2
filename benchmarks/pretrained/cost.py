"""What does rounding without bias cost? Each way from masters to BF16, beside Adam's step.

One thread; tensors of the model's shapes, one at a time; all ways in turn. Seconds are this
process's own time on its core, so others that wait for it change little.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from qurl_megatron.quantization.rounding import round_rows, row_keys

TURNS = 5
ARMS: list[dict[str, Any]] = [{"threads": 1}]


def measure(model: Path, threads: int) -> dict[str, Any]:
    """Return the seconds of each way over all tensors: the median of the turns, least and most."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        values = weight.float()
        master = torch.nn.Parameter(values)
        master.grad = torch.full_like(values, 1e-3)
        keys = row_keys(name, 0, len(weight), weight.device)
        ways: dict[str, Callable[[], object]] = {
            "nearest": partial(weight.copy_, values),
            "unbiased": partial(round_rows, weight, values, keys),
            "adam": torch.optim.AdamW([master], lr=1e-6, fused=True).step,
        }
        for turn in range(-1, TURNS):  # the first warms up
            for way, run in ways.items():
                start = time.process_time()
                run()
                if turn >= 0:
                    seconds.setdefault(way, [0.0] * TURNS)[turn] += time.process_time() - start
    return {f"{way}_s": [median(turns), min(turns), max(turns)] for way, turns in seconds.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| | seconds |", "| --- | --- |"]
    for way in ("nearest", "unbiased", "adam"):
        for row in rows:
            lines.append("| {} | {:.3f} [{:.3f}, {:.3f}] |".format(way, *row[f"{way}_s"]))
    return "\n".join(lines)
