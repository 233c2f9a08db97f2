"""A replica's sequences as the micro batches that Megatron's schedule runs over.

A micro batch is one row of sequences, one behind another. Every rank of the replica has the same
sequences; a context-parallel rank lays out only its part of each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.learner import packing
from qurl_megatron.learner.layers import FP8_TOKENS, context_index
from qurl_megatron.learner.model import virtual_stages
from qurl_megatron.model.architecture import Architecture


@dataclass
class MicroBatch:
    """Packed sequences, or this context-parallel rank's part of them, on this rank's device.

    Position t of `rows` and `index` describes the token that follows `inputs` at t. The learner
    keeps its scores of these tokens in `rows`.
    """

    inputs: Tensor  # [1, tokens] int64
    rows: TrainBatch  # [1, tokens]
    index: Tensor  # [tokens] int64, positions among the replica's tokens; -1 is padding
    sequences: PackedSeqParams
    # [tokens, layers, experts per token] int64, the experts that the engine chose for each input;
    # -1: padding, or an input that the engine did not read; None: not recorded
    routed_experts: Tensor | None = None


def plan(
    batch: TrainBatch, layout: LearnerConfig, architecture: Architecture
) -> list[list[packing.MicroBatch]]:
    """Return which sequences are in each micro batch of each data-parallel replica.

    A sequence without a token to train on is in no micro batch.
    """
    lengths = _num_inputs(batch)
    padded = [packing.round_up(length, _pieces(layout)) for length in lengths]
    by_tokens = layout.tokens_per_micro_batch
    return packing.plan(
        sizes=padded if by_tokens else [min(length, 1) for length in lengths],
        costs=[architecture.forward_flops(length) for length in lengths],
        budget=by_tokens or layout.micro_batch_size,
        ranks=layout.data_parallel_size,
        # Megatron's interleaved schedule needs whole groups of micro batches.
        unit=layout.pipeline_parallel_size if virtual_stages(layout) else 1,
    )


def lay_out(batch: TrainBatch, counts: Sequence[int], layout: LearnerConfig) -> list[MicroBatch]:
    """Pack a replica's sequences, in their order: `counts[i]` of them in micro batch i.

    Sequences beyond the sum of the counts are in no micro batch.
    """
    lengths = _num_inputs(batch)
    padded = [packing.round_up(length, _pieces(layout)) for length in lengths]
    stops = list(itertools.accumulate(counts))
    spans = [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
    # Sequence and context parallelism divide the tokens of a micro batch, and FP8 recipes blocks of
    # them.
    multiple = _pieces(layout) * layout.tensor_parallel_size * FP8_TOKENS[layout.fp8]
    totals = [packing.round_up(sum(padded[n] for n in span), multiple) for span in spans]
    # Pipeline stages exchange tensors of one shape. A rank without sequences computes padding
    # to take part in the collectives.
    totals = [max(total, multiple) for total in totals]
    if layout.pipeline_parallel_size > 1:
        totals = [max(totals)] * len(totals)
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    batch = batch.map(lambda tensor: tensor.to(device.device()))
    return [
        _pack(
            batch,
            [(starts[number], lengths[number], padded[number]) for number in span],
            total,
            batch.lengths[span.start : span.stop],
        )
        for span, total in zip(spans, totals, strict=True)
    ]


def take(tensor: Tensor, index: Tensor, *, back: int = 0, padding: int = 0) -> Tensor:
    """Return `tensor` [replica's tokens, ...] at `index - back` as a row [1, tokens, ...]."""
    row = tensor.new_full((len(index), *tensor.shape[1:]), padding)
    is_real = index >= 0
    row[is_real] = tensor[index[is_real] - back]
    return row[None]


def _num_inputs(batch: TrainBatch) -> list[int]:
    """Return how many tokens of each sequence are inputs: those before the last one to score.

    The last token that is scored is a target and no input, and nothing precedes the first token.
    """
    starts = batch.lengths.cumsum(0) - batch.lengths
    positions = torch.arange(len(batch.tokens)) - starts.repeat_interleave(batch.lengths)
    of_sequence = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    last = torch.zeros(len(batch), dtype=torch.int64)
    return last.scatter_reduce(0, of_sequence, positions * batch.loss_mask, "amax").tolist()


def _pieces(layout: LearnerConfig) -> int:
    """Return into how many pieces context parallelism cuts every sequence."""
    return 2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1


def _pack(
    batch: TrainBatch, sequences: list[tuple[int, int, int]], total: int, lengths: Tensor
) -> MicroBatch:
    """Lay inputs of sequences one behind another, each padded, and all of them to `total`.

    Padding at the end is one more sequence.

    Args:
        sequences: first token, number of inputs, and that number with padding, of each.
        total: tokens of the micro batch.
        lengths: tokens of each sequence.
    """
    index = torch.full((total,), -1, dtype=torch.int64)
    bounds = [0]
    for start, length, padded in sequences:
        place = slice(bounds[-1], bounds[-1] + length)
        index[place] = torch.arange(start + 1, start + 1 + length)
        bounds.append(bounds[-1] + padded)
    if bounds[-1] < total:
        bounds.append(total)
    context = context_index(
        bounds,
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )
    index = index[context].to(device.device())
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    # Megatron caches its rotary tables by this number. If it were that of all tokens, Megatron
    # would rotate a token by its position in the micro batch.
    max_length = 1 << (longest - 1).bit_length()
    max_length *= 2 if max_length == total else 1
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device.device())
    routed = batch.routed_experts
    rows = dataclasses.replace(batch, routed_experts=None).map(lambda tensor: take(tensor, index))
    return MicroBatch(
        inputs=take(batch.tokens, index, back=1).long(),
        rows=dataclasses.replace(rows, lengths=lengths, tokens=rows.tokens.long()),
        index=index,
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_length,
            max_seqlen_kv=max_length,
        ),
        routed_experts=None
        if routed is None
        else take(routed, index, back=1, padding=-1)[0].long(),
    )
