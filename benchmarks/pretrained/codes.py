"""Do codes show a small update? Each weight moves up or down by one amount, and is then quantized.

Shown is the length of the projection of a copy's move on that of the float32 weights, 1 if the copy
follows. Nothing is trained.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.rounding import write_rounded

EVERY = 6  # of the model's linear layers, in alphabetical order
FORMATS = ("bf16", "int8", "fp8", "int4-g32")
MADE_OF = ("nearest", "unbiased", "masters")
ARMS: list[dict[str, Any]] = [{"move": move} for move in (1e-6, 2e-5)]


def measure(model: Path, move: float) -> dict[str, Any]:
    """Return what is shown, by format and by what is quantized: BF16 values or masters."""
    stored = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    sums = {(name, made_of): [0.0, 0.0] for name in FORMATS for made_of in MADE_OF}
    for name in sorted(name for name in stored if name.endswith("_proj.weight"))[::EVERY]:
        start = stored[name].float()
        master = start + move * (torch.randint(0, 2, start.shape, generator=generator) * 2 - 1)
        moved = (master - start).double()
        for (weight_format, made_of), total in sums.items():
            values = master
            if made_of != "masters":
                values = torch.empty_like(stored[name])
                write_rounded(values, master, name, made_of)  # type: ignore[arg-type]
            copy = _copy(values, weight_format) - _copy(stored[name], weight_format)
            total[0] += float((copy * moved).sum())
            total[1] += float(moved.square().sum())
    shown = {" of ".join(way): along / squares for way, (along, squares) in sums.items()}
    return {"shown": shown}


def _copy(weight: Tensor, weight_format: str) -> Tensor:
    if weight_format != "bf16":
        weight = quantize.dequantize(quantize.quantize(weight, weight_format))
    return weight.double()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [["move", "format", *MADE_OF], ["---"] * (2 + len(MADE_OF))]
    for row in rows:
        for name in FORMATS:
            shown = [f"{row['shown'][f'{name} of {made_of}']:.3f}" for made_of in MADE_OF]
            lines.append([f"{row['arm']['move']:g}", name, *shown])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
