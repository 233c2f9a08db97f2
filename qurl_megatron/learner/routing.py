"""The experts that the engine chose, compared with the learner's or chosen again by the learner.

A server computes in low precision, so its router chooses other experts than the learner's for some
tokens. A log-prob that was sampled with one expert is then trained with another. There are two ways
to deal with that:

- Compare: the learner chooses for itself, and counts the tokens for which it chose otherwise.
- Replay: it takes the engine's experts. Their weights are still the learner's: a softmax over the
  learner's own logits of these experts, through which the router is trained.

A token whose experts are not known, such as padding, gets the learner's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from qurl_megatron import device


class RecordedChoice:
    """Stands for Megatron's `RouterReplay` in one router."""

    def __init__(self, replays: bool, counts: Tensor) -> None:
        """Store the parts; `counts` are the numbers of changed and of known choices, added to."""
        self._replays = replays
        self._counts = counts
        self.recorded: Tensor | None = None  # [tokens, experts per token] int64; -1: not known

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of each token's experts, `[tokens, topk]`.

        `scores` `[tokens, experts]` are the router's; `choose` makes the learner's own choice.
        """
        values, own = choose(scores, topk, num_groups, group_topk)
        if self.recorded is None:
            return values, own
        recorded = self.recorded
        if len(recorded) != len(scores):  # sequence parallelism divides the tokens over ranks
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            recorded = recorded.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        known = recorded[:, 0] >= 0
        changed = (recorded.sort(dim=1)[0] != own.sort(dim=1)[0]).any(dim=1)
        self._counts += torch.stack([(changed & known).sum(), known.sum()])
        if not self._replays:
            return values, own
        experts = torch.where(known[:, None], recorded, own)
        return scores.gather(1, experts), experts


class Routing:
    """The recorded choices of all routers of this rank."""

    def __init__(self, chunks: Sequence[torch.nn.Module], replays: bool) -> None:
        """Put a `RecordedChoice` into every router of the model's chunks."""
        self._counts = torch.zeros(2, dtype=torch.int64, device=device.device())
        self._routers: dict[int, list[Any]] = {}  # by chunk
        for chunk in chunks:
            routers = [each for each in chunk.modules() if isinstance(each, TopKRouter)]
            for router in routers:
                router.router_replay = RecordedChoice(replays, self._counts)  # type: ignore[assignment]
            self._routers[id(chunk)] = routers

    def expect(self, chunk: torch.nn.Module, experts: Tensor | None) -> None:
        """Give the routers of a chunk what the engine chose for the inputs of its next pass.

        Args:
            experts: [tokens, layers of the whole model, experts per token] int64; None: not
                recorded.
        """
        for router in self._routers[id(chunk)]:
            layer = router.layer_number - 1  # Megatron counts from 1
            router.router_replay.recorded = None if experts is None else experts[:, layer]

    def reset_counts(self) -> None:
        """Count from 0."""
        self._counts.zero_()

    def counts(self) -> tuple[int, int]:
        """Return how many choices of the engine differ from the learner's, and how many are known.

        A choice is that of one token in one layer. Collective over all learner ranks.
        """
        total = self._counts.clone()
        dist.all_reduce(total)
        changed, known = total.tolist()
        return changed, known
