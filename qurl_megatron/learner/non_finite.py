"""NaN and infinity: every rank ends with the same line, which names the rank and the tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from qurl_megatron import device


class NonFinite(device.SharedError, FloatingPointError):
    """A tensor of one rank holds NaN or infinity. The text names both, and is one line."""


Suspect = tuple[tuple[int, ...], str, Tensor]
"""Order, name, and a tensor that may hold NaN or infinity, and spoil those of a higher order."""


def refuse(problem: str, suspects: Iterable[Suspect]) -> NoReturn:
    """Raise `NonFinite` on every rank: `problem`, and where it comes from.

    Collective. Of all ranks' suspects that are not finite, the one of the first order is named.
    """
    rank = dist.get_rank()
    own = [(order, rank, name) for order, name, tensor in suspects if not tensor.isfinite().all()]
    found: list[list[tuple[tuple[int, ...], int, str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, own[:1])
    where = "though every tensor is finite"
    if any(found):
        _, rank, name = min(itertools.chain(*found))
        where = f"on learner rank {rank} {name} holds NaN or infinity"
    raise NonFinite(f"{problem}: {where}; resume from a checkpoint")
