"""Deal a minibatch out to the data-parallel replicas, and collect the scores of its tokens.

Global rank 0 has the whole minibatch and decides which sequences go to which replica. It sends each
replica its part once, to the replica's first rank, which passes it on to the replica's other ranks.
No other rank holds another replica's part.

A replica lays its sequences out in micro batches, in which equal prompts are computed once. Only
the last token of a prompt is computed for each sequence: it predicts the first token of the
completion. Every pass over the minibatch uses the same micro batches: the proximal pass, the
reference's and the update. So scores stay on the ranks that computed them and need them, and are
comparable bit for bit. `Share.collect` takes scores from the last pipeline stage of each replica.

Megatron's parallel state says which ranks are a replica: those of one context-parallel group and
the model-parallel groups of its members.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.learner import packing
from qurl_megatron.learner.layers import context_index, uses_transformer_engine
from qurl_megatron.learner.model import virtual_stages
from qurl_megatron.learner.sequences import PackedSequences
from qurl_megatron.model.architecture import Architecture


@dataclass
class MicroBatch:
    """Packed sequences, or this context-parallel rank's part of them, on this rank's device.

    Position t of `rows` and `index` describes the token that follows `inputs` at t. The learner
    keeps its scores of these tokens in `rows`.
    """

    batch: TrainBatch  # the whole sequences, on the CPU, as global rank 0 sent them
    inputs: Tensor  # [1, tokens] int64
    rows: TrainBatch  # [1, tokens]
    scored: Tensor  # [scored tokens] int64 on the CPU, where the loss mask of `rows` is True
    index: Tensor  # [tokens] int64, positions among the tokens of `batch`; -1 is padding
    sequences: PackedSequences
    # [tokens, layers, experts per token] int64, the experts that the engine chose for each input;
    # -1: padding, or an input that the engine did not read; None: not recorded
    routed_experts: Tensor | None = None

    def sum_over_sequences(self, values: Tensor) -> Tensor:
        """Return for each token the sum of `values` over its whole sequence.

        Collective over the context-parallel ranks, which have other tokens of the sequences. The
        sums are computed in float64, so that the number of ranks does not show in them.

        Args:
            values: [1, tokens] float32, 0 in padding and without a gradient.

        Returns:
            [1, tokens] float32; meaningless in padding.
        """
        ends = _to_device(self.batch.lengths.cumsum(0))
        number = torch.bucketize(self.index.clamp(min=0), ends, right=True)
        # One sum more, for the padding of a micro batch without a sequence.
        sums = values.new_zeros(len(ends) + 1, dtype=torch.float64)
        sums.index_add_(0, number, values[0].double())
        context = parallel_state.get_context_parallel_group()
        if context.size() > 1:
            dist.all_reduce(sums, group=context)
        return sums[number].to(values.dtype)[None]


@dataclass
class Share:
    """The sequences of a minibatch that this data-parallel replica trains on."""

    micro_batches: list[MicroBatch]
    dealt: list[list[int]]  # on global rank 0: numbers of each replica's sequences; else empty
    lengths: list[int]  # on global rank 0: of all sequences of the minibatch; else empty

    def collect(self, name: str) -> list[Tensor]:
        """Return the tensor `name` of the micro batches' rows, by sequence, on global rank 0.

        Collective over all learner ranks.

        Returns:
            [tokens] float32 of each sequence, in the minibatch's order, on the CPU; 0 where a token
            has no score. Nothing on other ranks.
        """
        context = parallel_state.get_context_parallel_group()
        own: list[Tensor] = []
        for micro in self.micro_batches:
            # One value more, for the padding, whose index is -1.
            flat = torch.zeros(len(micro.batch.tokens) + 1, device=device.device())
            row = getattr(micro.rows, name)
            if row is not None:
                flat[micro.index] = row[0]
            own.append(flat[:-1])
        together = torch.cat(own)
        if context.size() > 1:  # one rank filled each position, so the sum is exact
            dist.all_reduce(together, group=context)
        scores = [torch.zeros(length) for length in self.lengths]
        by_replica = _to_rank_zero(together.cpu())
        for numbers, flat in zip(self.dealt, by_replica, strict=True):
            sequences = flat.split([self.lengths[number] for number in numbers])
            for number, sequence in zip(numbers, sequences, strict=True):
                scores[number] = sequence
        return scores


def deal(batch: TrainBatch, layout: LearnerConfig, architecture: Architecture) -> Share:
    """Send every data-parallel replica its sequences of a minibatch; collective."""
    by_replica = _plan(batch, layout, architecture) if dist.get_rank() == 0 else []
    own = _to_replicas([batch.select(numbers) for numbers in replica] for replica in by_replica)
    dealt = [list(itertools.chain.from_iterable(replica)) for replica in by_replica]
    return Share(_lay_out(own, layout, architecture), dealt, batch.lengths.tolist())


def _plan(
    batch: TrainBatch, layout: LearnerConfig, architecture: Architecture
) -> list[list[packing.Sequences]]:
    """Return which sequences are in each micro batch of each data-parallel replica.

    A sequence without a token to train on is in no micro batch.
    """
    inputs = _inputs(batch, layout)
    # With its prompt, even if it is shared: attention makes a copy of it for each sequence.
    padded = [packing.round_up(each.length, _pieces(layout)) for each in inputs]
    by_tokens = layout.tokens_per_micro_batch
    return packing.plan(
        sizes=padded if by_tokens else [min(each.length, 1) for each in inputs],
        costs=[architecture.forward_flops(each.length) for each in inputs],
        prompts=[
            (each.first, 2.0 * architecture.num_linear_weights * each.prompt) for each in inputs
        ],
        budget=by_tokens or layout.micro_batch_size,
        ranks=layout.data_parallel_size,
        # Megatron's interleaved schedule needs whole groups of micro batches.
        unit=layout.pipeline_parallel_size if virtual_stages(layout) else 1,
    )


def _lay_out(
    batches: Sequence[TrainBatch], layout: LearnerConfig, architecture: Architecture
) -> list[MicroBatch]:
    """Pack each micro batch of a replica, with its sequences in their order."""
    pieces = _pieces(layout)
    # Sequence and context parallelism divide the tokens of a micro batch. A rank without sequences
    # computes padding, to enter the collectives.
    multiple = pieces * layout.tensor_parallel_size
    inputs = [_inputs(batch, layout) for batch in batches]
    totals = []
    for of_batch in inputs:
        tokens = sum(packing.round_up(each.length - each.shared, pieces) for each in of_batch)
        totals.append(packing.round_up(max(tokens, 1), multiple))
    if layout.pipeline_parallel_size > 1:  # stages exchange tensors of one shape
        totals = [max(totals)] * len(totals)
    # Layers without Transformer Engine read the bounds on the host, without waiting for a GPU.
    on_host = not uses_transformer_engine(architecture)
    return [_pack(*each, pieces, on_host) for each in zip(batches, inputs, totals, strict=True)]


def _take(tensor: Tensor, index: Tensor, *, back: int = 0, padding: int = 0) -> Tensor:
    """Return `tensor` [tokens of a batch, ...] at `index - back` as a row [1, tokens, ...]."""
    row = tensor.new_full((len(index), *tensor.shape[1:]), padding)
    is_real = index >= 0
    row[is_real] = tensor[index[is_real] - back]
    return row[None]


class _Inputs(NamedTuple):
    """The inputs of a sequence: its tokens before the last one to score, which is only a target."""

    start: int  # among the tokens of the batch
    length: int
    prompt: int  # of them, how many a sequence with the same prompt may share
    first: int  # number of the first sequence of the batch with this prompt
    shared: int = 0  # inputs that the first sequence has; 0 for itself


def _inputs(batch: TrainBatch, layout: LearnerConfig) -> list[_Inputs]:
    """Return the inputs of each sequence, and which it shares with another one of the batch."""
    inputs = []
    firsts: dict[bytes, int] = {}
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    masks = batch.loss_mask.split(batch.lengths.tolist())
    for number, (start, mask) in enumerate(zip(starts, masks, strict=True)):
        first_scored, length = mask.nonzero()[[0, -1], 0].tolist() if mask.any() else (0, 0)
        prompt = max(first_scored - 1, 0)
        if not prompt or layout.context_parallel_size > 1:  # such ranks may lack the first one's
            inputs.append(_Inputs(start, length, 0, number))
            continue
        place = slice(start, start + prompt)
        key = batch.tokens[place].numpy().tobytes()
        if batch.routed_experts is not None:  # they are replayed, and may differ
            key += batch.routed_experts[place].numpy().tobytes()
        first = firsts.setdefault(key, number)
        inputs.append(_Inputs(start, length, prompt, first, prompt if first < number else 0))
    return inputs


def _pieces(layout: LearnerConfig) -> int:
    """Return into how many pieces context parallelism cuts every sequence."""
    return 2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1


def _pack(
    batch: TrainBatch, inputs: list[_Inputs], total: int, pieces: int, on_host: bool
) -> MicroBatch:
    """Lay inputs of sequences one behind another, each padded, and all of them to `total` tokens.

    A sequence is padded to a multiple of `pieces`. Padding at the end is one more sequence. With
    `on_host` the padded bounds are on the host.
    """
    filled = sum(packing.round_up(each.length - each.shared, pieces) for each in inputs)
    if filled < total:
        inputs = [*inputs, _Inputs(-1, total - filled, 0, len(inputs))]
    index = torch.full((total,), -1, dtype=torch.int64)
    bounds, begins, end = [0], [], 0
    whole, places, positions = [], [], []  # see `PackedSequences`
    for start, length, _, first, shared in inputs:
        begins.append(end)
        own = packing.round_up(length - shared, pieces)
        index[end : end + length - shared] = torch.arange(start + shared, start + length) + 1
        whole += [torch.arange(shared) + begins[first], torch.arange(own) + end]
        positions.append(torch.arange(own) + shared)
        places.append(positions[-1] + bounds[-1])
        bounds.append(bounds[-1] + shared + own)
        end += own
    index[filled:] = -1
    context = parallel_state.get_context_parallel_group()
    if context.size() > 1:
        index = index[context_index(bounds, context.rank(), context.size())]
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    # Megatron caches its rotary tables by this number. If it were that of all tokens, Megatron
    # would rotate a token by its position in the micro batch.
    max_length = 1 << (longest - 1).bit_length()
    max_length *= 2 if max_length == total else 1

    def sequences(bounds: list[int], **fields: Any) -> PackedSequences:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        padded = cu_seqlens if on_host else None
        of_both = [*[_to_device(cu_seqlens)] * 2, *[padded] * 2, *[max_length] * 2]
        return PackedSequences("thd", *of_both, **fields)

    packed = sequences(bounds)
    if bounds[-1] > total:
        fields = {"rows": whole, "places": places, "positions": positions}
        on_device = {name: _to_device(torch.cat(parts)) for name, parts in fields.items()}
        packed = sequences([0, total], whole=packed, **on_device)
    rows = replace(batch, routed_experts=None, mask_sizes=None, mask_ids=None)
    rows = rows.map(lambda tensor: _take(tensor, index))
    rows = replace(rows, tokens=rows.tokens.long())
    routed = batch.routed_experts
    if routed is not None:
        routed = _to_device(_take(routed, index, back=1, padding=-1)[0].long())
    masks = _padded_masks(batch)
    if masks is not None:
        masks = _to_device(_take(masks, index, padding=-1)[0])
    return MicroBatch(
        batch=batch,
        inputs=_to_device(_take(batch.tokens, index, back=1).long()),
        rows=replace(rows.map(_to_device), mask_ids=masks),
        scored=rows.loss_mask[0].nonzero().view(-1),
        index=_to_device(index),
        sequences=packed,
        routed_experts=routed,
    )


def _padded_masks(batch: TrainBatch) -> Tensor | None:
    """Return the sampling masks of a batch, [tokens, largest mask] int32, padded with -1."""
    if batch.mask_sizes is None or batch.mask_ids is None or not len(batch):
        return None
    is_id = torch.arange(int(batch.mask_sizes.max())) < batch.mask_sizes[:, None]
    padded = torch.full(is_id.shape, -1, dtype=torch.int32)
    padded[is_id] = batch.mask_ids
    return padded


def _to_device(tensor: Tensor) -> Tensor:
    """Return a tensor of the host on this rank's device, without waiting for a GPU."""
    return tensor.to(device.device(), non_blocking=True)


def _to_replicas(parts: Iterable[Any]) -> Any:
    """Send each data-parallel replica its part; return this replica's.

    `parts` are used on global rank 0 only, which takes and sends them one at a time.
    """
    replicas = parallel_state.get_data_parallel_group()
    stages = parallel_state.get_model_parallel_group()
    context = parallel_state.get_context_parallel_group()
    own: list[Any] = [None]
    if dist.get_rank() == 0:
        remaining = iter(parts)
        own = [next(remaining)]
        for replica, part in enumerate(remaining, start=1):
            dist.send_object_list([part], group=replicas, group_dst=replica)
    elif stages.rank() == context.rank() == 0:  # the replica's first rank
        dist.recv_object_list(own, group=replicas, group_src=0)
    if stages.rank() == 0 and context.size() > 1:
        dist.broadcast_object_list(own, group=context, group_src=0)
    if stages.size() > 1:
        dist.broadcast_object_list(own, group=stages, group_src=0)
    return own[0]


def _to_rank_zero(own: Any) -> list[Any]:
    """Return what each replica has, on global rank 0; nothing on other ranks.

    `own` is used on the last pipeline stage. All tensor-parallel and context-parallel ranks of a
    stage have the same, so the first one sends it.
    """
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    if not is_first or parallel_state.get_context_parallel_rank() != 0:
        return []
    stages = parallel_state.get_pipeline_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group()
    by_replica = [own] * replicas.size()
    last = stages.size() - 1
    if stages.rank() == last and len(by_replica) > 1:
        is_receiver = replicas.rank() == 0
        dist.gather_object(own, by_replica if is_receiver else None, group=replicas, group_dst=0)
    if last and replicas.rank() == 0:
        if stages.rank() == last:
            dist.send_object_list(by_replica, group=stages, group_dst=0)
        elif stages.rank() == 0:
            dist.recv_object_list(by_replica, group=stages, group_src=last)
    return by_replica if dist.get_rank() == 0 else []
