"""Attention for machines without a GPU: many sequences of a batch in one call.

SGLang's `torch_native` backend makes a call for each sequence and layer, which takes most of a
small model's time. Here neighbouring sequences of a batch are padded to the longest and computed
together. Keys and values are gathered from SGLang's cache by index. A cached prefix is the part of
a sequence that has keys but no queries; decoding is a batch with one query per sequence. Sums are
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

# A group of several sequences has at most this many query-key pairs and keys, padding included.
MAX_GROUP_PAIRS = 1 << 20  # they take time and memory
MAX_GROUP_KEYS = 1 << 12  # so that a small model's keys stay in a core's cache


@dataclass(frozen=True)
class SequenceGroup:
    """Neighbouring sequences of a batch that are computed together."""

    tokens: slice  # the group's queries among the batch's packed queries
    is_query: Tensor  # [sequences, queries] bool, False on padding
    slots: Tensor  # [sequences, keys] int64, indices into the key/value cache
    mask: Tensor  # [sequences, 1, queries, keys] float32, 0 where a query sees a key, else -inf


def group_sequences(
    slots: Tensor, lengths: Tensor, num_new: Tensor, first: int = 0
) -> list[SequenceGroup]:
    """Halve a batch until each group is small enough, or one sequence; return the groups in order.

    Args:
        slots: [sequences, max length] int64, each token's index into the key/value cache.
        lengths: [sequences] int64, tokens of each sequence.
        num_new: [sequences] int64, new tokens at the end of each; these are the queries.
        first: number of queries in the batch before these sequences.
    """
    num_queries, num_keys = int(num_new.max()), int(lengths.max())
    all_keys = len(lengths) * num_keys
    is_large = all_keys > MAX_GROUP_KEYS or all_keys * num_queries > MAX_GROUP_PAIRS
    if len(lengths) > 1 and is_large:
        half = len(lengths) // 2
        second = first + int(num_new[:half].sum())
        return group_sequences(slots[:half], lengths[:half], num_new[:half], first) + (
            group_sequences(slots[half:], lengths[half:], num_new[half:], second)
        )
    query, key = torch.arange(num_queries), torch.arange(num_keys)
    position = (lengths - num_new)[:, None] + query  # padding lies beyond the end and sees all keys
    unseen = key > position[..., None]
    return [
        SequenceGroup(
            tokens=slice(first, first + int(num_new.sum())),
            is_query=query < num_new[:, None],
            slots=slots[:, :num_keys],
            mask=torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None],
        )
    ]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, group: SequenceGroup, scale: float
) -> Tensor:
    """Compute the attention of one group.

    Args:
        query: [tokens, heads, head size], the group's.
        keys, values: [slots, key heads, head size], the whole cache.
        scale: factor of the products of queries and keys.

    Returns:
        [tokens, heads, head size] float32.
    """
    padded = query.new_zeros(*group.is_query.shape, *query.shape[1:], dtype=torch.float32)
    padded[group.is_query] = query.float()

    def gather(cache: Tensor) -> Tensor:  # -> [sequences, key heads, keys, head size]
        rows = embedding(group.slots, cache.flatten(1)).float()
        return rows.unflatten(-1, cache.shape[1:]).transpose(1, 2)

    # Heads that share a key head become more queries of it: torch would copy the keys per head.
    shared = query.shape[1] // keys.shape[1]
    heads = padded.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4)
    out = scaled_dot_product_attention(
        heads.flatten(2, 3),
        gather(keys),
        gather(values),
        attn_mask=group.mask.repeat(1, 1, shared, 1),
        scale=scale,
    )
    return out.view_as(heads).permute(0, 3, 1, 2, 4).flatten(2, 3)[group.is_query]


class BatchedAttentionBackend(TorchNativeAttnBackend):
    """SGLang's `torch_native` backend, with its loops over sequences replaced.

    Cross attention and sliding windows still go through the loops.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens
        decoding = forward_batch.forward_mode.is_decode()
        num_new = torch.ones_like(lengths) if decoding else forward_batch.extend_seq_lens
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        self.groups = group_sequences(slots[:, : int(lengths.max())].long(), lengths, num_new)

    def _run_sdpa_forward_extend(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self._attend(super()._run_sdpa_forward_extend, *tensors, **options)

    def _run_sdpa_forward_decode(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self._attend(super()._run_sdpa_forward_decode, *tensors, **options)

    def _attend(
        self, loop_over_sequences: Callable[..., Tensor], *tensors: Tensor, **options: Any
    ) -> Tensor:
        if options["is_cross_attn"] or options["sliding_window_size"] is not None:
            return loop_over_sequences(*tensors, **options)
        query, output, keys, values, *_ = tensors
        for group in self.groups:
            output[group.tokens] = attend(
                query[group.tokens], keys, values, group, options["scaling"]
            ).to(output.dtype)
        return output
