"""What `learner.quantized_forward` costs, and how near to a server its log-probs can come.

A server computes in BF16 what the learner computes in float32. `kl_of_bf16` is how far the learner
is from itself, as served or in full precision, if each layer's output is rounded to BF16 as well.
`kl_of_1e-6` is how far it is if the embeddings change by that part of them, and nothing else.

Updates within `as_served` and outside of it alternate, and `ratio` is of their CPU times. A load
that changes still shows in it: look at the seconds. Codes of the weights are made once in an
update, however many tokens it has.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.pretrained import smoothing
from qurl_megatron.algorithm.batch import TrainBatch, pack
from qurl_megatron.config.schema import QuantizedForward, ServerConfig
from qurl_megatron.extensions.mismatch.mismatch import divergence
from qurl_megatron.learner.learner import Learner
from qurl_megatron.weight_sync.reshard import Converter

ANSWERS, PAIRS = 4, 2  # of a minibatch, and pairs of updates
ARMS: list[dict[str, Any]] = [{"format": name} for name in ("int8", "fp8", "int4-g32")]


def measure(model: Path, format: Any) -> dict[str, Any]:
    """Return distances of the learner from itself, and CPU times of updates."""
    learner = smoothing.learner_of(model)
    learner.smoothing = None
    converter = Converter(learner, format, 2**26)
    batch = pack(smoothing.asked(model, ANSWERS)[0]).only()
    share = learner.share(batch)
    row: dict[str, Any] = {}
    kinds: dict[str, QuantizedForward | None] = {"exact": None, "served": "all"}
    for name, what in kinds.items():
        with learner.as_served(converter, ServerConfig(), what):
            own = smoothing.scored(learner, share)
            for noise in ("bf16", "1e-6"):
                with _noise(learner, noise):
                    kl = divergence(smoothing.scored(learner, share), own)
                row[f"{name}_kl_of_{noise}"] = float(kl.mean())
                row[f"{name}_kl_of_{noise}_median"] = float(kl.median())
    row |= _times(learner, converter, batch)
    print(format, row, flush=True)
    return row


@contextmanager
def _noise(learner: Learner, noise: str) -> Iterator[None]:
    """Round the output of each layer to BF16, or change the embeddings by a part of them."""

    def rounded(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        hidden, *others = output
        return (hidden.bfloat16().float(), *others)

    def changed(_: Any, __: Any, output: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        return output * (1 + float(noise) * torch.randn(output.shape, generator=draw))

    (chunk,) = (chunk.module for chunk in learner.chunks)
    with ExitStack() as stack:
        if noise == "bf16":
            for layer in chunk.decoder.layers:
                stack.callback(layer.register_forward_hook(rounded).remove)
        else:
            stack.callback(chunk.embedding.register_forward_hook(changed).remove)
        yield


def _times(learner: Learner, converter: Converter, batch: TrainBatch) -> dict[str, Any]:
    """Return CPU times of updates, after one of each kind that is not counted."""
    share = learner.share(batch)
    seconds: dict[str, list[float]] = {"plain": [], "served": []}
    for _ in range(PAIRS + 1):
        for name, kept in seconds.items():
            served = learner.as_served(converter, ServerConfig())
            with served if name == "served" else nullcontext():
                start = time.process_time()
                learner.update(share, _nothing, temperature=1.0)
                kept.append(time.process_time() - start)
    plain, served_s = (kept[1:] for kept in seconds.values())
    return {
        "tokens": len(batch.tokens),
        "threads": torch.get_num_threads(),
        "load": psutil.getloadavg()[0],
        "plain_cpu_s": plain,
        "served_cpu_s": served_s,
        "ratio": median(served_s) / median(plain),
    }


def _nothing(logprobs: Tensor, *_: Any) -> Any:
    return logprobs.sum() * 0, {}  # so the weights stay as they are


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["format", "KL of BF16", "as served", "KL of 1e-6", "as served", "update as served"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        noises = [
            f"{name}_kl_of_{noise}" for noise in ("bf16", "1e-6") for name in ("exact", "served")
        ]
        cells = [row["arm"]["format"], *(f"{row[noise]:.1e}" for noise in noises)]
        lines.append([*cells, f"{row['ratio']:.2f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
