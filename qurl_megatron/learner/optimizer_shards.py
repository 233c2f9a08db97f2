"""This rank's part of the optimizer: where it lies, how it is saved, loaded and gathered.

Megatron's distributed optimizer puts the parameters of a chunk into buffers, flattened, one behind
another. It cuts each buffer into one run for each data-parallel rank. A rank keeps the master
weights and moments of its own run only.

A run can begin and end in the middle of a parameter. So a rank has a range of a parameter's
flattened values, which may be empty.

torch's distributed checkpoints store boxes: parts of a tensor that have an offset and a shape. A
flat range of a row-major tensor consists of a few boxes. Of a [4, 5] tensor the range [3, 17) is
the end of row 0, rows 1 and 2, and the beginning of row 3. So each rank saves what it has, under
the names and shapes of the whole tensors, without a gather. Any layout can load what any other has
saved.

The same boxes are rounded to BF16 after each step, by dithers that belong to positions in the whole
Hugging Face tensors (`quantization/rounding.py`). Megatron itself rounds to the nearest number.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import DistributedOptimizer, clip_grads
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.quantization.rounding import round_rows

SAMPLED = 2**12  # values of a parameter's range at most that `OptimizerShards.shown` looks at


class Dither(NamedTuple):
    """Where a parameter lies in the Hugging Face tensors that it is made of."""

    row_keys: Tensor  # [rows] int32, from `quantization.rounding`
    first_column: int  # of the full tensors


@dataclass(frozen=True)
class Box:
    """A box of a row-major tensor that is also one flat range of it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int  # first flat position
    stop: int  # the flat position after the last


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes, in order, that a flat range of a row-major tensor consists of.

    The range is [start, stop). With n dimensions there are at most 2n - 1 boxes: part of a row,
    whole rows, part of a row, where the parts consist of boxes of n - 1 dimensions.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        offset = [start // stride % size for stride, size in zip(strides, shape, strict=True)]
        # The largest rows that begin here and end within the range; in the end, single values.
        dim = 0
        while start % strides[dim] or start + strides[dim] > stop:
            dim += 1
        rows = min((stop - start) // strides[dim], shape[dim] - offset[dim])
        end = start + rows * strides[dim]
        yield Box(tuple(offset), (*[1] * dim, rows, *shape[dim + 1 :]), start, end)
        start = end


def fuse_adam(optimizer: Any) -> None:
    """Let torch's Adam, where it replaces Transformer Engine's, update parameters in one kernel.

    Its default on a GPU computes in steps, which takes 4 more bytes of memory for each value.

    Args:
        optimizer: from `get_megatron_optimizer`.
    """
    for group in optimizer.param_groups:
        if "foreach" in group:  # torch's
            group["fused"] = True


def fuse_norm() -> None:
    """Let torch, where it replaces Transformer Engine, take the norm of all gradients at once.

    Megatron's own function waits for the GPU at each gradient.
    """
    if getattr(clip_grads, "local_multi_tensor_l2_norm", None) is clip_grads.l2_norm_impl:
        clip_grads.l2_norm_impl = _l2_norm


def _l2_norm(_: int, __: Tensor, tensors: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
    """Return the L2 norm of the first list's tensors together, [1] float32, on their device."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm().view(1), None


class OptimizerShards:
    """Master weights and moments on this rank, by parameter."""

    def __init__(self, optimizer: Any, dithers: Mapping[Tensor, Dither]) -> None:
        """Find the parts of `optimizer`, from `get_megatron_optimizer`.

        Args:
            dithers: of all parameters, if BF16 values are rounded without bias; empty: they are
                rounded to the nearest number.
        """
        self._dithers = dithers
        self._start: tuple[Tensor, ...] | None = None  # `_sample` before training
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parts: list[DistributedOptimizer] = [
            part for part in parts if not part.is_stub_optimizer
        ]
        self._part_of = {
            parameter: part for part in self._parts for parameter in part.model_param_gbuf_map
        }
        # Megatron's own index is wrong where a part has parameters of two types: those in float32
        # come first in the optimizer.
        self._updated = {
            parameter: updated
            for part in self._parts
            for parameters, shards in (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            )
            for group, own in zip(parameters, shards, strict=True)
            for parameter, updated in zip(group, own, strict=True)
        }
        if dithers:
            for part in self._parts:
                # Megatron calls it between Adam's step and the gather of the parameters. If it has
                # no such method, this is an AttributeError.
                name = DistributedOptimizer._copy_main_params_to_model_params.__name__
                setattr(part, name, partial(self._round_masters, part))

    def _round_masters(self, part: DistributedOptimizer) -> None:
        """Write this rank's masters of a part of the optimizer into the parameters."""
        for parameter in part.model_param_gbuf_map:
            start, stop = self._range(parameter)
            own = parameter.detach().view(-1)[start:stop]
            self._round(own, self.master(parameter), parameter, start)

    def _round(self, out: Tensor, values: Tensor, parameter: Tensor, start: int) -> None:
        """Write flat float32 values of a parameter, from position `start` on, into flat `out`."""
        if out.dtype != torch.bfloat16 or not self._dithers:
            out.copy_(values)
            return
        keys, first_column = self._dithers[parameter]
        for box in boxes(parameter.shape, start, start + len(values)):
            row, column = (*box.offset, 0)[:2]
            own = slice(box.start - start, box.stop - start)
            round_rows(
                out[own].view(box.shape),
                values[own].view(box.shape),
                keys[row : row + box.shape[0]],
                first_column + column,
            )

    def master(self, parameter: Tensor) -> Tensor:
        """Return the flat float32 values that the optimizer updates; empty if this rank has none.

        For a float32 parameter they are a view of it.
        """
        if parameter not in self._part_of:
            return parameter.new_empty(0, dtype=torch.float32)
        return self._updated[parameter].detach()

    def write(self, parameter: Tensor, values: Tensor) -> None:
        """Set a parameter, and this rank's range of its master, to float32 values of its shape."""
        flat, (start, stop) = values.to(parameter.device).reshape(-1), self._range(parameter)
        self._round(parameter.detach().view(-1), flat, parameter, 0)
        self.master(parameter).copy_(flat[start:stop])

    def start_from_here(self) -> None:
        """Let `shown` measure from the current masters."""
        self._start = self._sample()

    def shown(self) -> tuple[Tensor, Tensor]:
        """Return how far masters have moved, squared, and how far along that their BF16 values.

        Both are float64 sums, [], over all values of this rank, estimated from a sample.
        """
        assert self._start is not None
        (*now, stands_for), (*start, _) = self._sample(), self._start
        moved, shown = ((after - before).double() for after, before in zip(now, start, strict=True))
        weighted = moved * stands_for
        return (weighted * moved).sum(), (weighted * shown).sum()

    def _sample(self) -> tuple[Tensor, ...]:
        """Return some of the masters, the BF16 values that are made of them, and their weights.

        All are [values] float32. A weight is the number of values that a sampled one stands for.
        Sampled are `SAMPLED` values from the middle of each parameter's range, or all of a small
        one. A float32 learner computes with its masters, so these BF16 values are what servers get.
        """
        nothing = torch.empty(0, device=device.device())  # a rank may own no values
        masters, rounded, weights = [nothing], [nothing], [nothing]
        for parameter in self._part_of:
            master, (start, _) = self.master(parameter), self._range(parameter)
            first = max(0, len(master) - SAMPLED) // 2
            values = master[first : first + SAMPLED]
            at = start + first
            shown = parameter.detach().view(-1)[at : at + len(values)]
            if parameter.dtype == torch.float32:
                shown = torch.empty_like(values, dtype=torch.bfloat16)
                self._round(shown, values, parameter, at)
            masters.append(values)
            rounded.append(shown.float())
            weights.append(torch.full_like(values, len(master) / max(1, len(values))))
        return torch.cat(masters), torch.cat(rounded), torch.cat(weights)

    def gather_master(self, parameter: Tensor) -> Tensor:
        """Return the whole master, in the parameter's shape, on the first rank that shares it.

        Collective over the data-parallel ranks; for an expert, over the ranks that have it. All
        ranks but the first get an empty tensor.
        """
        if parameter.dtype == torch.float32 or not parameter.requires_grad:
            return parameter.detach()  # every rank has all of it
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if not getattr(parameter, "allreduce", True):  # of an expert
            group = parallel_state.get_expert_data_parallel_group()
        own = torch.tensor(self._range(parameter), device=parameter.device)
        ranges = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(ranges, own, group=group)
        master = self.master(parameter)
        transfers = []  # batched: over NCCL each single one would form a communicator of two ranks
        if group.rank() != 0:
            whole = torch.empty(0, device=parameter.device)
            if master.numel():
                transfers.append(dist.P2POp(dist.isend, master, group=group, group_peer=0))
        else:
            whole = torch.empty(parameter.numel(), device=parameter.device)
            for rank, (start, stop) in enumerate(torch.stack(ranges).tolist()):
                part = whole[start:stop]
                if rank == 0:
                    part.copy_(master)
                elif start < stop:
                    transfers.append(dist.P2POp(dist.irecv, part, group=group, group_peer=rank))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        return whole.view(parameter.shape) if group.rank() == 0 else whole

    def storages(self) -> Iterator[Tensor]:
        """Yield the moments that exist, and the masters that are not views of the weights.

        The masters of a float32 model are the weights of the forward pass.
        """
        for part in self._parts:
            for state in part.optimizer.state.values():
                yield from (values for name, values in state.items() if name != "step")
        for parameter in self._part_of:
            if parameter.dtype != torch.float32:
                yield self.master(parameter)

    def prepare_state(self, num_steps: int) -> None:
        """Allocate the moments that do not exist yet, and set Adam's number of steps."""
        for part in self._parts:
            is_torch = isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
            part.init_state_fn(part.optimizer, part.config)
            for group in part.optimizer.param_groups:
                if is_torch:  # one tensor each, because Adam increments it in place
                    for parameter in group["params"]:
                        step = torch.tensor(float(num_steps), device=parameter.device)
                        part.optimizer.state[parameter]["step"] = step
                else:  # Transformer Engine's FusedAdam
                    group["step"] = num_steps

    def sharded_state(self, model: dict[str, Any]) -> dict[str, ShardedTensor]:
        """Return moments, and masters that are not weights, as Megatron's checkpoints take them.

        Loading writes into them. `model` is the model's sharded state, from which names, offsets
        and replicas are taken. Call `prepare_state` before.
        """
        state: dict[str, ShardedTensor] = {}
        for sharded in nested_values(model):
            parameter = sharded.data
            if not isinstance(parameter, Tensor) or parameter not in self._part_of:
                continue
            updated = self._updated[parameter]
            moments = self._part_of[parameter].optimizer.state[updated].items()
            tensors = {name: values for name, values in moments if name != "step"}
            if parameter.dtype != torch.float32:
                tensors["fp32_param"] = updated
            pieces = [sharded]
            if isinstance(sharded, ShardedTensorFactory):  # of SwiGLU's gate and up
                pieces = nested_values(sharded.build())
            for piece in pieces:
                for name, values in tensors.items():
                    for tensor in self._boxes_of(piece, parameter, name, values):
                        state[f"{tensor.key}.{tensor.global_offset}"] = tensor
        return state

    def _range(self, parameter: Tensor) -> tuple[int, int]:
        """Return the flat range of `parameter` that this rank updates."""
        if parameter not in self._part_of:
            return 0, 0
        span = self._part_of[parameter]._get_model_param_range_map(parameter)["param"]
        return span.start, span.end

    def _boxes_of(
        self, piece: ShardedTensor, parameter: Tensor, name: str, values: Tensor
    ) -> Iterator[ShardedTensor]:
        """Yield this rank's `values` of one piece of a parameter, as boxes."""
        start, stop = self._range(parameter)
        begin = (piece.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        end = begin + piece.data.numel()
        prepended = piece.prepend_axis_num
        place = piece.global_offset
        for box in boxes(piece.data.shape, max(start, begin) - begin, min(stop, end) - begin):
            flat = slice(begin + box.start - start, begin + box.stop - start)
            shape = (1,) * prepended + box.shape
            inner = (at + offset for at, offset in zip(place[prepended:], box.offset, strict=True))
            yield ShardedTensor(
                f"optimizer.state.{name}.{piece.key}",
                values.detach()[flat].view(shape),
                values.dtype,
                shape,
                piece.global_shape,
                place[:prepended] + tuple(inner),
                None,  # the boxes form no regular grid
                # Each data-parallel rank has boxes of its own: none is a replica.
                replica_id=(*piece.replica_id[:2], 0),
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
