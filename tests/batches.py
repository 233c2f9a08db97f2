"""Padded rows `[batch, time]` as the ragged batches of a learner, and its scores as padded rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch


@dataclass
class Rows:
    """Sequences as padded rows; every tensor but `lengths` is [rows, time]."""

    tokens: Tensor
    loss_mask: Tensor
    lengths: Tensor
    advantages: Tensor

    def ragged(self, **fields: Tensor) -> TrainBatch:
        """Return the rows as a ragged batch with these fields [rows, time]."""
        return ragged(self.tokens, self.loss_mask, self.lengths, **fields)


def random_rows(rows: int, time: int, vocabulary: range) -> Rows:
    """Return rows of different lengths after prompts of different lengths.

    Rows 1 to 3 have the same prompt, and so have the last two. In every other row, as in an agent's
    episode, the policy has not sampled some of the tokens between its first one and its last.
    """
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(time)
    prompt = torch.randint(1, 5, (rows, 1), generator=generator)
    length = torch.randint(6, time + 1, (rows, 1), generator=generator)
    tokens = torch.randint(vocabulary.start, vocabulary.stop, (rows, time), generator=generator)
    for group in (slice(1, 4), slice(-2, None)):
        prompt[group] = 3
        tokens[group, :3] = tokens[group, :3][1].clone()
    advantages = torch.randn(rows, time, generator=generator)
    observed = torch.rand(rows, time, generator=generator) < 0.4
    observed[::2] = False
    observed &= (places > prompt) & (places < length - 1)
    return Rows(
        tokens=tokens,
        loss_mask=(places >= prompt) & (places < length) & ~observed,
        lengths=length.squeeze(1),
        advantages=advantages,
    )


def negative_log_likelihood(
    current_logprobs: Tensor, entropy: Tensor, batch: TrainBatch, loss_weights: Tensor, *_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of supervised training; all tensors are `[1, tokens]` float32."""
    return -(loss_weights * current_logprobs).sum(), {}


def ragged(
    tokens: Tensor, loss_mask: Tensor | None = None, lengths: Tensor | None = None, **fields: Tensor
) -> TrainBatch:
    """Return padded rows as a ragged batch; a row has `lengths` tokens, if given, else all.

    `loss_mask` is True everywhere if it is None, as when all tokens are to be scored.
    """
    rows, time = tokens.shape
    mask = torch.ones(rows, time, dtype=torch.bool) if loss_mask is None else loss_mask
    lengths = torch.full((rows,), time) if lengths is None else lengths
    is_real = torch.arange(time) < lengths[:, None]
    flat = {name: tensor[is_real] for name, tensor in fields.items()}
    return TrainBatch(lengths, tokens[is_real].int(), mask[is_real], **flat)


def with_masks(batch: TrainBatch, kept: Tensor) -> TrainBatch:
    """Return the batch with sampling masks: the ids where `kept` [tokens, vocabulary] is True."""
    kept = kept & batch.loss_mask[:, None]
    return replace(batch, mask_sizes=kept.sum(1).int(), mask_ids=kept.nonzero()[:, 1].int())


def padded(sequences: Sequence[Tensor]) -> Tensor:
    """Return one row for each sequence, which 0 fills up."""
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


def share_of(learner: Any, batch: TrainBatch) -> Any:
    """Deal out a batch that every rank has."""
    return learner.share(batch if dist.get_rank() == 0 else TrainBatch.empty())


def score(
    learner: Any,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    loss_mask: Tensor | None = None,
    names: Sequence[str] = ("proximal_logprobs", "entropy"),
) -> tuple[Tensor, ...]:
    """Return the model's scores of `tokens` [batch, time], on every rank."""
    share = share_of(learner, ragged(tokens, loss_mask))
    learner.score(share, names, temperature=temperature)
    return scores_of(share, names)


def scores_of(share: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return these scores of a share as padded rows, on every rank."""
    collected = [share.collect(name) for name in names]
    return device.from_rank_zero(lambda: tuple(padded(each) for each in collected))


def update(
    learner: Any,
    batch: TrainBatch,
    loss_weights: Tensor,
    loss_function: Any,
    *,
    temperature: float = 1.0,
) -> Any:
    """Take an optimizer step on a batch that every rank has."""
    batch.loss_weights = loss_weights
    return learner.update(share_of(learner, batch), loss_function, temperature=temperature)
