"""Attention for a machine without a GPU: all sequences of a batch at once.

SGLang's `torch_native` backend makes one call a sequence and layer, which on a small model is most
of the server's time. Here the sequences of a batch are padded to the longest and go through one
call; keys and values come out of SGLang's cache by index, so a cached prefix is simply the part of
a sequence that has no queries, and decoding is a batch with one query a sequence. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

# Padding costs time and memory: a run has at most this many query-key pairs, or one sequence.
LARGEST_RUN = 1 << 20


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of a batch that are computed together."""

    tokens: slice  # theirs among the batch's packed queries
    is_query: Tensor  # [sequences, queries] bool, False on padding
    slots: Tensor  # [sequences, keys] int64, places in the key/value cache
    mask: Tensor  # [sequences, 1, queries, keys] float32, 0 where a query sees a key, else -inf


def plan_runs(slots: Tensor, lengths: Tensor, num_new: Tensor, first: int = 0) -> list[Run]:
    """Halve a batch until its runs are small enough.

    slots [sequences, max length] int64; lengths and num_new [sequences] int64 count all tokens of
    a sequence and the new ones at its end, which are the queries. `first` counts the queries before
    this part of the batch.
    """
    num_queries, num_keys = int(num_new.max()), int(lengths.max())
    if len(lengths) > 1 and len(lengths) * num_queries * num_keys > LARGEST_RUN:
        half = len(lengths) // 2
        second = first + int(num_new[:half].sum())
        return plan_runs(slots[:half], lengths[:half], num_new[:half], first) + plan_runs(
            slots[half:], lengths[half:], num_new[half:], second
        )
    query, key = torch.arange(num_queries), torch.arange(num_keys)
    position = (lengths - num_new)[:, None] + query  # padding lies beyond the end and sees it all
    unseen = key > position[..., None]
    return [
        Run(
            tokens=slice(first, first + int(num_new.sum())),
            is_query=query < num_new[:, None],
            slots=slots[:, :num_keys],
            mask=torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None],
        )
    ]


def attend(query: Tensor, keys: Tensor, values: Tensor, run: Run, scale: float) -> Tensor:
    """Attention of one run.

    query [tokens, heads, head size]; keys and values [slots, key heads, head size], the whole
    cache. Returns [tokens, heads, head size] float32.
    """
    padded = query.new_zeros(*run.is_query.shape, *query.shape[1:], dtype=torch.float32)
    padded[run.is_query] = query.float()

    def gather(cache: Tensor) -> Tensor:  # -> [sequences, key heads, keys, head size]
        rows = embedding(run.slots, cache.flatten(1)).float()
        return rows.unflatten(-1, cache.shape[1:]).transpose(1, 2)

    out = scaled_dot_product_attention(
        padded.transpose(1, 2),
        gather(keys),
        gather(values),
        attn_mask=run.mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out.transpose(1, 2)[run.is_query]


class BatchedAttentionBackend(TorchNativeAttnBackend):
    """`torch_native` for causal self-attention, with its loops over sequences replaced."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens
        decoding = forward_batch.forward_mode.is_decode()
        num_new = torch.ones_like(lengths) if decoding else forward_batch.extend_seq_lens
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        self.runs = plan_runs(slots[:, : int(lengths.max())].long(), lengths, num_new)

    def _run_sdpa_forward_extend(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self._attend(super()._run_sdpa_forward_extend, *tensors, **options)

    def _run_sdpa_forward_decode(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self._attend(super()._run_sdpa_forward_decode, *tensors, **options)

    def _attend(
        self, one_by_one: Callable[..., Tensor], *tensors: Tensor, **options: Any
    ) -> Tensor:
        if options["is_cross_attn"] or options["sliding_window_size"] is not None:
            return one_by_one(*tensors, **options)
        query, output, keys, values, *_ = tensors
        for run in self.runs:
            output[run.tokens] = attend(
                query[run.tokens], keys, values, run, options["scaling"]
            ).to(output.dtype)
        return output
