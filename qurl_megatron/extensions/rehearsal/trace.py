"""What a GPU would do: a mode in which torch computes shapes, memory, traffic and FLOPs.

A tensor on `cuda` is a FakeTensor, without storage. Tensors on the CPU stay real. A small tensor on
`cuda` whose values follow from those of the host (masks, indices, lengths) carries them as its
*shadow*, a tensor on the CPU. So shapes that depend on data are exact. A value that only a GPU
would have reads as True, 1.0 or 0 (`unknown`); a router is assumed to choose every expert equally
often. All ranks are assumed to hold the values of this one.
"""

from __future__ import annotations

import linecache
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_map
from torch.utils.flop_counter import flop_registry

from qurl_megatron.config.gpus import Node

aten = torch.ops.aten
SHADOW_ELEMENTS = 2**21  # larger tensors have no values
BLOCK_BYTES = 512  # torch's allocator rounds up to a multiple of it
FLOAT32_PART = 67 / 989  # of an H100's BF16 FLOP/s, reached in float32

_CONSTANT = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_INDEXING = (
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index,
)

# The purpose of a tensor, by part of the file and the function that allocated it. The innermost
# listed frame decides.
_PURPOSES = {
    ("megatron/core/distributed/param_and_grad_buffer.py", ""): "weights",
    ("megatron/core/optimizer/", ""): "optimizer",
    ("qurl_megatron/learner/optimizer_shards.py", ""): "optimizer",
    ("qurl_megatron/learner/learner.py", "keep_reference"): "reference",
    ("qurl_megatron/learner/logprobs.py", ""): "logits",
    ("qurl_megatron/learner/shares.py", ""): "batch",
    ("qurl_megatron/algorithm/", ""): "loss",
    ("qurl_megatron/weight_sync/conversion.py", ""): "converter",
    ("qurl_megatron/weight_sync/", ""): "buckets",
}


@dataclass
class Phase:
    """What was measured between two calls of `Trace.start`; sizes in bytes, times in seconds."""

    peak_bytes: int = 0
    end_bytes: int = 0
    holders: Counter[str] = field(default_factory=Counter)  # bytes at the peak, by purpose
    waits: Counter[str] = field(default_factory=Counter)  # for the GPU, by file and line
    copies: Counter[str] = field(default_factory=Counter)  # blocking, to the GPU, by file and line
    kernels: Counter[str] = field(default_factory=Counter)  # by name
    # Number, and bytes that leave a rank in a ring, by group and operation.
    collectives: dict[str, list[int]] = field(default_factory=dict)
    flops: int = 0  # of matrix products and attention
    roofline_s: float = 0.0  # of the kernels one by one: at full FLOP/s, or full memory rate
    wire_s: float = 0.0  # of the collectives one by one, at the full rate of the link


class NeedsValues(RuntimeError):
    """A shape depends on values that only a GPU would have."""


def is_on_gpu(x: Any) -> bool:
    """Return whether a tensor is on the fake GPU."""
    return isinstance(x, FakeTensor) and x.device.type == "cuda"


def unknown(dtype: torch.dtype) -> Any:
    """Return a stand-in for a value that only a GPU would have: True, 1.0, or 0 for a count."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0


def _frames() -> Iterator[types.FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        if "qurl_megatron/extensions/rehearsal/" not in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back  # type: ignore[assignment]


def place() -> str:
    """Return this project's running file and line, after Megatron's if Megatron runs inside it.

    The backward pass may have no such line; then return the operation's name.
    """
    found: list[str] = []
    for frame in _frames():
        file = frame.f_code.co_filename
        for root, shown in (("qurl_megatron/", ""), ("megatron/core/", "megatron/core/")):
            if f"/{root}" in file and (not shown or not found):
                found.append(f"{shown}{file.rpartition(f'/{root}')[2]}:{frame.f_lineno}")
                if not shown:
                    return " < ".join(found)
                break
    node = torch._C._current_autograd_node()
    return found[0] if found else f"backward of {node.name()}" if node is not None else "?"


def purpose() -> str:
    """Return the purpose of the tensor that is being allocated."""
    for frame in _frames():
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "_call_impl":
            module = frame.f_locals.get("self")
            return f"activations: {type(module).__name__}"
        for (part, name), title in _PURPOSES.items():
            if part in file and function == (name or function):
                is_gradient = "grad_data" in linecache.getline(file, frame.f_lineno)
                return "gradients" if title == "weights" and is_gradient else title
    return "backward" if torch._C._current_autograd_node() is not None else "other"


def _num_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_iter(tensors) if isinstance(t, Tensor))


class Trace(TorchDispatchMode):
    """Runs operations on `cuda` over fake tensors, and measures them phase by phase."""

    active: Trace | None = None  # within its context

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.labels: dict[str, str] = {}  # of process groups, by `group_name`
        self.phases: dict[str, Phase] = {}
        self._node = node
        self._phase = Phase()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._bytes = 0  # allocated on cuda now
        self._holders: Counter[str] = Counter()
        self._storages: dict[int, tuple[int, str, Any]] = {}  # bytes, purpose, weak reference
        # Storages with outdated shadows; a weak reference removes one that is freed.
        self._stale: dict[int, Any] = {}
        self._fusing: list[int] | None = None  # storages allocated within a fused function
        self.start("build")

    def start(self, name: str) -> None:
        """Measure from here on as a phase of this name."""
        if self.phases:
            self._phase.end_bytes = self._bytes
        self._phase = self.phases[name] = Phase(self._bytes, 0, self._holders.copy())

    @property
    def peak_bytes(self) -> int:
        """Most bytes of the phase that runs."""
        return self._phase.peak_bytes

    def __enter__(self) -> Trace:
        Trace.active = self
        # This flag of the thread lets the mode see torch.tensor(x, device="cuda").
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Trace.active = None

    # Values

    def shadow_of(self, tensor: Any) -> Tensor | None:
        """Return the values of a fake tensor on the CPU, if they follow from the host's."""
        values: Tensor | None = getattr(tensor, "_shadow", None)
        if values is None or values.shape != tensor.shape:
            return None
        return None if tensor.untyped_storage()._cdata in self._stale else values

    def read(self, tensor: FakeTensor, kind: str) -> Tensor:
        """Return the values of a tensor that the host waits for."""
        self.note_wait(kind, tensor)
        values = self.shadow_of(tensor)
        return torch.full(tensor.shape, unknown(tensor.dtype)) if values is None else values

    def _values(self, x: Any) -> Any:
        if isinstance(x, FakeTensor):
            values = self.shadow_of(x)
            if values is None:
                raise NeedsValues
            return values
        if isinstance(x, torch.device) and x.type == "cuda":
            return torch.device("cpu")
        return x

    def _fake_of(self, x: Any) -> Any:
        """Return a fake tensor on the CPU with the values of a real one."""
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        with self._fake:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        fake._shadow = x.detach()  # type: ignore[attr-defined]
        return fake

    def _forget_values(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._stale[key] = weakref.ref(storage, lambda _: self._stale.pop(key, None))

    def fake_like(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor of another process, whose memory does not count here."""
        with _disable_current_modes(), self._fake:
            fake = torch.empty_like(tensor)
        self._add(fake.untyped_storage(), counts=False)
        return fake

    def fake_on_host(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the CPU without values, such as a weight that is not read."""
        with self._fake:
            return torch.empty(shape, dtype=dtype, device="cpu")

    # Memory

    def _track(self, out: Any) -> None:
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(storage)

    def _add(self, storage: Any, *, counts: bool = True) -> None:
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._remove(key))
        self._storages[key] = (0, purpose(), gone)
        if not counts:
            return
        if self._fusing is None:
            self._resize(key, storage.nbytes())
        else:
            self._fusing.append(key)

    def _resize(self, key: int, num_bytes: int) -> None:
        before, title, gone = self._storages[key]
        num_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._storages[key] = (num_bytes, title, gone)
        self._bytes += num_bytes - before
        self._holders[title] += num_bytes - before
        if self._bytes > self._phase.peak_bytes:
            self._phase.peak_bytes, self._phase.holders = self._bytes, self._holders.copy()

    def _remove(self, key: int) -> None:
        if key in self._storages:
            self._resize(key, 0)
            del self._storages[key]

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Measure a storage again."""
        if storage._cdata in self._storages:
            self._resize(storage._cdata, storage.nbytes())

    # Costs

    def note_wait(self, kind: str, tensor: Tensor | None = None) -> None:
        """Count a wait for the GPU, unless `tensor` is elsewhere."""
        if tensor is None or is_on_gpu(tensor):
            self._phase.waits[f"{place()} {kind}"] += 1

    def note_kernel(self, name: str, tensors: Any, flops: float = 0, part: float = 1.0) -> None:
        """Count a kernel over these tensors, which reaches at most `part` of the peak FLOP/s."""
        phase, gpu = self._phase, self._node.gpu
        phase.kernels[name] += 1
        phase.flops += int(flops)
        if self._fusing is None:
            each = {id(t): t for t in tree_iter(tensors) if isinstance(t, FakeTensor)}
            moved_s = _num_bytes(list(each.values())) / gpu.hbm_bytes_per_s
            phase.roofline_s += max(flops / (part * gpu.bf16_flops), moved_s)

    def note_triton(self, name: str, arguments: list[Any]) -> None:
        """Count a launch of a Triton kernel, which may write to any of its tensors."""
        for tensor in arguments:
            if isinstance(tensor, Tensor):
                if not is_on_gpu(tensor):
                    raise RuntimeError(f"Triton kernel {name} gets a tensor on the CPU")
                self._forget_values(tensor)
        self.note_kernel(f"triton {name}", arguments)

    def fused(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function as one kernel, whose intermediate tensors never reach memory."""
        if self._fusing is not None:
            return function(*args, **kwargs)
        self._fusing, kernels, self._phase.kernels = [], self._phase.kernels, Counter()
        try:
            out = function(*args, **kwargs)
        finally:
            inside, self._fusing, self._phase.kernels = self._fusing, None, kernels
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in inside:
                self.note_resize(tensor.untyped_storage())
        self.note_kernel(f"fused {function.__name__}", (args, kwargs, out))
        return out

    def _count_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        returns, name = func._schema.returns, func._opname
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "lift", "detach")):
            return
        tensors = [t for t in tree_iter((args, kwargs, out)) if isinstance(t, FakeTensor)]
        first = next((t for t in tree_iter(out) if isinstance(t, FakeTensor)), None)
        if first is not None and first.fake_device.type != "cuda":
            return
        flops = 0.0
        if "_varlen_attn" in name:  # torch itself counts padded sequences
            flops = self._varlen_flops(func, args)
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        is_float32 = bool(flops) and all(t.dtype != torch.bfloat16 for t in tensors)
        self.note_kernel(name, tensors, flops, FLOAT32_PART if is_float32 else 1.0)

    def _varlen_flops(self, func: Any, args: Any) -> float:
        """Return the FLOPs of causal attention over packed sequences."""
        is_backward = "backward" in func._opname
        query = args[1] if is_backward else args[0]
        bounds = [self.shadow_of(t) for t in args if is_on_gpu(t) and t.dtype == torch.int32]
        lengths = [len(query)] if not bounds or bounds[0] is None else bounds[0].diff().tolist()
        heads, dim = query.shape[1:]
        # Causality halves the two products of the forward pass; the backward pass has five.
        forward = sum(2 * heads * dim * length**2 for length in lengths)
        return float(forward * (2.5 if is_backward else 1))

    # Collectives

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._opname
        group = next(
            (ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)), None
        )
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor) and not is_on_gpu(tensor):
                raise RuntimeError(f"{name.strip('_')} over NCCL of a tensor on the CPU")
        # The larger side of a gather or a scatter holds the data of all ranks.
        size = max(_num_bytes(arg) for arg in args)
        share = (len(ranks) - 1) / len(ranks)
        whole = dict.fromkeys(["send", "recv_", "broadcast_"], 1.0)
        num_bytes = int(size * (whole | {"allreduce_": 2 * share}).get(name, share))
        label = self.labels.get(group.group_name, f"{len(ranks)} ranks")
        counts = self._phase.collectives.setdefault(f"{label} {name.strip('_')}", [0, 0])
        counts[0] += 1
        counts[1] += num_bytes
        nodes = {rank // self._node.gpus for rank in ranks}
        rate = self._node.link_bytes_per_s(1 if len(nodes) == 1 else self._node.gpus + 1)
        self._phase.wire_s += num_bytes / rate
        self._write_collective(name, args, len(ranks))
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _write_collective(self, name: str, args: Any, size: int) -> None:
        """Write the values that follow if all ranks have those of this one."""
        written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        given = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
        values = self.shadow_of(given) if given is not None else None
        if name == "_allgather_base_" and values is not None:
            args[0]._shadow = torch.cat([values.view(-1)] * size).view(args[0].shape)
        elif name == "alltoall_base_" and values is not None and values.shape == args[0].shape:
            args[0]._shadow = values.clone()
        elif name == "allreduce_" and all(self.shadow_of(t) is not None for t in written):
            pass  # flags and counts keep this rank's values
        elif name != "send":
            for tensor in tree_iter(written):
                if isinstance(tensor, FakeTensor):
                    self._forget_values(tensor)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        flat, _ = tree_flatten((args, kwargs))
        to = kwargs.get("device")
        to_gpu = to is not None and torch.device(to).type == "cuda"
        if not to_gpu and not any(isinstance(x, FakeTensor) for x in flat):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.read(args[0], "item").item()
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return self._copy_to_host(*args, **kwargs)
        if func._overloadpacket in _INDEXING:
            filled = self._masked_fill(func, *args, **kwargs)
            if filled is not None:
                return filled
            args = self._with_positions(args)
        if func is aten.nonzero.default:
            return self._of_values(func, args, "nonzero")
        if func is aten.masked_select.default:
            return self(aten.index.Tensor, (), (args[0].expand_as(args[1]), [args[1]]))
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            return self._of_values(func, args, "repeat_interleave")
        args, kwargs = tree_map(self._fake_of, (args, kwargs))
        self._count_transfer(func, args, kwargs)
        with self._fake:
            out = func(*args, **kwargs)
        self._track(out)
        self._carry_values(func, args, kwargs, out)
        self._count_operation(func, args, kwargs, out)
        if func is aten._to_copy.default and out.fake_device.type == "cpu":
            values = self.shadow_of(out)
            return out if values is None else values.clone()
        return out

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return self.__torch_dispatch__(func, types, args, kwargs)

    def _copy_to_host(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            self.note_wait("copy to the CPU", source)
        values = self.shadow_of(source)
        return target if values is None else target.copy_(values)

    def _of_values(self, func: Any, args: Any, kind: str) -> Any:
        """Run an operation on shadows only, because its shape depends on values."""
        self.note_wait(kind, args[0])
        try:
            values = func(*tree_map(self._values, args))
        except NeedsValues:
            raise NeedsValues(f"{kind} of values that only a GPU has") from None
        with self._fake:
            out = torch.empty(values.shape, dtype=values.dtype, device=args[0].fake_device)
        self._track(out)
        out._shadow = values  # type: ignore[attr-defined]
        self.note_kernel(kind, [out])
        return out

    def _masked_fill(
        self, func: Any, target: Any, indices: Any, value: Any = None, accumulate: bool = False
    ) -> Any:
        """Run `tensor[mask] = number` as the masked fill that it is, which waits for no GPU."""
        mask = indices[0]
        is_fill = len(indices) == 1 and mask is not None and mask.dtype == torch.bool
        if value is None or not is_fill or accumulate:
            return None
        if value.numel() != 1 or value.device.type != "cpu":
            return None
        for _ in range(target.dim() - mask.dim()):
            mask = mask.unsqueeze(-1)
        in_place = func._overloadpacket is not aten.index_put
        packet = aten.masked_fill_ if in_place else aten.masked_fill
        known = self.shadow_of(value) if isinstance(value, FakeTensor) else value
        return self(packet.Scalar, (), (target, mask, 0 if known is None else known.item()))

    def _with_positions(self, args: Any) -> Any:
        """Replace boolean masks of an index by positions, as a GPU does."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            elif isinstance(index, FakeTensor):
                positions = self._of_values(aten.nonzero.default, (index,), "mask as an index")
                indices += [
                    self(aten.select.int, (), (positions, 1, d)) for d in range(index.dim())
                ]
            else:
                indices += index.nonzero().unbind(1)
        return (args[0], indices, *args[2:])

    def _count_transfer(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[0] if func is aten._to_copy.default else args[1]
            target = kwargs.get("device", source.device) if source is args[0] else args[0].device
            waits = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            kinds = source.device.type, torch.device(target).type
            if waits and kinds == ("cuda", "cpu"):
                self.note_wait("copy to the CPU", source)
            if waits and kinds == ("cpu", "cuda") and source.numel():
                self._phase.copies[place()] += 1
        elif func._overloadpacket in _INDEXING and is_on_gpu(args[0]):
            if any(index is not None and index.device.type == "cpu" for index in args[1]):
                self._phase.copies[f"{place()} index on the CPU"] += 1

    def _carry_values(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Give the outputs values, if all inputs have some; note which tensors lose theirs."""
        outs = [t for t in tree_iter(out) if isinstance(t, FakeTensor)]
        small = bool(outs) and all(t.numel() <= SHADOW_ELEMENTS for t in outs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_empty = func._opname.startswith(("empty", "new_empty", "set_", "resize"))
        if small and not is_random and not is_empty:
            # Only the shape of such an argument matters, so it may lack values.
            if func._opname in _CONSTANT and self.shadow_of(args[0]) is None:
                args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            try:
                values = func(*tree_map(self._values, args), **tree_map(self._values, kwargs))
            except (NotImplementedError, RuntimeError):  # a value is unknown, or has no CPU kernel
                pass
            else:
                found = (t for t in tree_iter(values) if isinstance(t, Tensor))
                for tensor, value in zip(outs, found, strict=False):
                    tensor._shadow = value  # type: ignore[attr-defined]
                return
        elif func is aten.empty_like.default:
            return
        for arg, of in zip(args, func._schema.arguments, strict=False):
            if of.alias_info is not None and of.alias_info.is_write:
                for tensor in tree_iter(arg):
                    if isinstance(tensor, FakeTensor):
                        self._forget_values(tensor)
        if func is aten.topk.default and outs[1].dim() == 2:  # a router's choice
            tokens, chosen = outs[1].shape
            experts = torch.arange(tokens * chosen) % args[0].shape[-1]
            outs[1]._shadow = experts.view(tokens, chosen)  # type: ignore[attr-defined]
