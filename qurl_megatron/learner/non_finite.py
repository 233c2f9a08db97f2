"""NaN and infinity: every rank ends with the same line, which names the rank and the tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from qurl_megatron import device


class NonFinite(device.SharedError, FloatingPointError):
    """A tensor of one rank holds NaN or infinity. The text names both, and is one line."""


class Suspect(NamedTuple):
    """A tensor that may hold NaN or infinity."""

    order: tuple[int, ...]  # a tensor may have spoilt those of a higher order
    name: str
    tensor: Tensor


def refuse(problem: str, suspects: Iterable[Suspect]) -> NoReturn:
    """Raise `NonFinite` on every rank: `problem`, and where it comes from.

    Collective. Of all ranks' suspects that are not finite, the one of the first order is named.
    """
    own = next((s for s in suspects if not s.tensor.isfinite().all()), None)
    found: list[tuple[tuple[int, ...], int, str] | None] = [None] * dist.get_world_size()
    rank = dist.get_rank()
    dist.all_gather_object(found, own and (own.order, rank, own.name))
    where = "though every tensor is finite"
    if any(found):
        _, rank, name = min(entry for entry in found if entry)
        where = f"on learner rank {rank} {name} holds NaN or infinity"
    raise NonFinite(f"{problem}: {where}; resume from a checkpoint")
