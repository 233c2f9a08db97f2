"""Compare "quantize, then gather" with "gather, then quantize": `python benchmarks/reshard.py`.

The weights are one layer of Qwen2.5-32B at full width, on tensor-parallel ranks of this machine,
over gloo (NCCL if there are GPUs). Five paths take turns in the same processes:

- "quantize first" is the converter (`weight_sync/reshard.py`).
- "not measuring" is the converter without measuring drift (QuRL Eq. 13, Eq. 14, code flips). It
  shows what measuring costs.
- "delta" sends what changed since the pass before: two codes in ten thousand.
- "direct" writes into the parameters of a server of one rank on this machine.
- "gather first" is the baseline: it gathers a bucket's tensors in BF16 and quantizes them on rank
  0, as systems do that quantize where the weights arrive.

All but "delta" give rank 0, or the server, the same tensors, byte for byte. At the end, the speed
of quantizing alone is compared with a copy of as many bytes, which is the limit that memory
bandwidth sets.

"sent" counts the bytes that ranks send each other. "CPU" adds up the processor time of all ranks,
the kernel's included; on a busy machine it says more than the time that passed. "memory" is the
largest growth of a rank's resident set (on a GPU, of its allocator's peak) beside the layer itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import Rule, TensorPart
from qurl_megatron.process import free_port
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import part_key
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.direct import Places
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.shared_memory import describe_tensor

MIB = 1024 * 1024
FORMATS = ("int8", "fp8")
PATHS = ("quantize first", "  not measuring", "delta", "direct", "gather first")
CHANGED = 2e-4  # of the weights, between two deltas
QWEN_32B_LAYER = dataclasses.replace(
    ARCHITECTURES["Qwen2.5-32B"],
    num_layers=1,
    vocab_size=256,  # small: only the layer is measured
    tie_word_embeddings=True,
)


class Layer:
    """The shards that a learner would have, without its optimizer."""

    def __init__(self, architecture: Architecture, tp_rank: int, tp_size: int) -> None:
        self.architecture = architecture
        generator = torch.Generator().manual_seed(tp_rank)
        self._shards: list[tuple[Rule, int | None, Tensor]] = []
        for rule in weight_map.rules(architecture):
            parts = []
            for part in rule.tensors:
                index = weight_map.part_index(rule, part, architecture, tp_rank, tp_size)
                shape = [run.stop - run.start for run in index]
                # Replicated tensors must be equal on all ranks, so they are all ones.
                random = torch.empty(shape).normal_(std=0.02, generator=generator)
                parts.append(random if part.partition_dim is not None else torch.ones(shape))
            shard = weight_map.merge(rule, parts, architecture, tp_size).bfloat16()
            layer = 0 if rule.layered else None
            self._shards.append((rule, layer, shard.to(device.device())))

    def shards(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield what `Learner.shards` yields."""
        for rule, layer, shard in self._shards:
            if of_experts in (None, rule.of_experts):
                yield rule, layer, shard

    def change(self, fraction: float) -> None:
        """Change the sign of about this fraction of the weights."""
        with torch.no_grad():
            for *_, shard in self._shards:
                number = max(1, int(fraction * shard.numel()))
                chosen = torch.randint(shard.numel(), (number,), device=shard.device)
                shard.view(-1)[chosen] *= -1


def place_server(converter: Converter) -> tuple[Any, Places]:
    """Make the parameters of a server of one rank, on rank 0; return them, and their places."""
    held: Bucket | None = None
    described: list[Any] = [None]
    rank_zero = dist.get_rank() == 0
    if rank_zero:
        tensors = {
            name: (dtype, shape)
            for bucket in converter.descriptions()
            for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
        }
        held = Bucket.empty(((name, *rest) for name, rest in tensors.items()), device.device())
        described = [{part_key(name, 0, 0): describe_tensor(view) for name, view in held.tensors()}]
    dist.broadcast_object_list(described)
    places = Places()
    places.attach({"server": described})
    places.keep(["server"], ["server"])
    return held, places


def gather_then_quantize(
    layer: Layer, weight_format: str, bucket_bytes: int, send: Callable[[dict[str, Tensor]], None]
) -> None:
    """Call `send` on rank 0 with one bucket's tensors after another: the baseline."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bucket: dict[str, Tensor] = {}
    filled = 0
    for rule, number, shard in layer.shards():
        for part in weight_map.split(rule, shard, layer.architecture, number, rank, size):
            full = _gather(part, size)
            if full is None:
                continue
            if rule.quantized:
                quantized = quantize.quantize(full, weight_format)
                tensors = {part.name: quantized.codes}
                scale_name = quantize.scale_name(part.name, weight_format)
                tensors[scale_name] = quantize.engine_scale(quantized)
            else:
                tensors = {part.name: full}
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            if bucket and filled + nbytes > bucket_bytes:
                send(bucket)
                bucket, filled = {}, 0
            bucket |= tensors
            filled += nbytes
    if bucket:
        send(bucket)


def _gather(part: TensorPart, size: int) -> Tensor | None:
    """Return the full tensor in BF16 on rank 0, None elsewhere."""
    own = part.tensor.contiguous()
    if part.dim is None or part.rank_slices is None:
        return own if dist.get_rank() == 0 else None
    if dist.get_rank() != 0:
        dist.gather(own, dst=0)
        return None
    received = [torch.empty_like(own) for _ in range(size)]
    dist.gather(own, received, dst=0)
    return torch.cat(received, dim=part.dim)


@dataclass
class Measured:
    """One pass of one path on one rank."""

    time_s: float
    cpu_s: float
    sent_bytes: int
    memory_bytes: int


class SentBytes:
    """Counts the bytes that this rank passes to the collectives the paths use."""

    def __init__(self) -> None:
        self.total = 0
        for name in ("gather", "all_reduce"):
            setattr(dist, name, self._counting(getattr(dist, name)))
        point_to_point = dist.batch_isend_irecv

        def counted(operations: list[dist.P2POp]) -> Any:
            self.total += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
            return point_to_point(operations)

        setattr(dist, "batch_isend_irecv", counted)  # noqa: B010

    def _counting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.total += tensor.nbytes * (options.get("dst", 1) != dist.get_rank())
            return collective(tensor, *arguments, **options)

        return counted


def measure(run_pass: Callable[[], Any], sent: SentBytes) -> Measured:
    """Run one pass on all ranks together; return this rank's figures."""
    dist.barrier()
    _reset_peak()
    before, sent.total = _resident_bytes(), 0
    start, cpu_start = time.perf_counter(), time.process_time()
    run_pass()
    cpu_s = time.process_time() - cpu_start
    dist.barrier()
    return Measured(time.perf_counter() - start, cpu_s, sent.total, _peak_bytes() - before)


def _reset_peak() -> None:
    if device.accelerator() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def _resident_bytes() -> int:
    if device.accelerator() == "cuda":
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    if device.accelerator() == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run_rank(rank: int, size: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    """Run all paths on one rank of `size`, in a process of its own; put rows into `results`."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    from megatron.core import parallel_state

    device.limit_threads(1)
    device.initialize_distributed()
    with megatron_runtime():
        parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)
    layer = Layer(QWEN_32B_LAYER, rank, size)
    sent = SentBytes()
    bucket_bytes = arguments.bucket_mib * MIB
    for weight_format in arguments.formats:
        converter = Converter(layer, weight_format, bucket_bytes)  # type: ignore[arg-type]
        unmeasured = Converter(layer, weight_format, bucket_bytes)  # type: ignore[arg-type]
        unmeasured._meters[False].measure = lambda *_: None  # type: ignore[method-assign]
        changing = Converter(layer, weight_format, bucket_bytes, keeps_codes=True)  # type: ignore[arg-type]
        direct = Converter(layer, weight_format, bucket_bytes)  # type: ignore[arg-type]
        held, places = place_server(converter)
        paths: dict[str, Callable[[], Any]] = {
            "quantize first": functools.partial(converter.convert, drop),
            "  not measuring": functools.partial(unmeasured.convert, drop),
            "delta": functools.partial(changing.convert, drop, base=1),
            "direct": functools.partial(direct.write, places),
            "gather first": functools.partial(
                gather_then_quantize, layer, weight_format, bucket_bytes, drop
            ),
        }
        for repetition in range(arguments.repetitions + 1):  # the first warms up
            for name, run_pass in paths.items():
                if name == "delta":
                    if repetition == 0:
                        changing.convert(drop)
                    layer.change(CHANGED)
                measured = measure(run_pass, sent)
                if repetition:
                    results.put((size, weight_format, name, rank, measured))
        del converter, unmeasured, changing, direct, paths, places, held
    dist.barrier()
    dist.destroy_process_group()


def drop(bucket: Bucket | dict[str, Tensor]) -> None:
    """Keep nothing of a bucket."""


def compare_with_a_copy(weight_format: str, repetitions: int) -> None:
    """Compare quantizing one weight (absmax, scale and cast) with copying as many bytes."""
    rows, columns = QWEN_32B_LAYER.intermediate_size, QWEN_32B_LAYER.hidden_size
    weight = torch.randn(rows, columns, device=device.device()).to(torch.bfloat16)
    codes = torch.empty_like(weight, dtype=quantize.code_dtype(weight_format))
    moved_bytes = weight.nbytes + codes.nbytes  # read once, written once
    source = torch.empty(moved_bytes // 2, dtype=torch.uint8, device=device.device())
    target = torch.empty_like(source)
    passes: dict[str, Callable[[], Any]] = {
        "quantize": lambda: quantize.quantize(weight, weight_format, out=codes),
        "copy": lambda: target.copy_(source),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repetition in range(repetitions + 1):  # the first warms up
        for name, run in passes.items():
            _wait_for_device()
            start = time.perf_counter()
            run()
            _wait_for_device()
            if repetition:
                times[name].append(time.perf_counter() - start)
    speeds = {name: moved_bytes / median(times_s) / 1e9 for name, times_s in times.items()}
    print(
        f"{weight_format}, {rows} x {columns} from BF16 on one {device.accelerator()}: "
        f"{speeds['quantize']:.1f} GB/s, {speeds['quantize'] / speeds['copy']:.2f} of a copy's "
        f"{speeds['copy']:.1f} GB/s"
    )


def _wait_for_device() -> None:
    if device.accelerator() == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor-parallel-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=256)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, {device.accelerator()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")))
    largest = QWEN_32B_LAYER.hidden_size * QWEN_32B_LAYER.intermediate_size * 2
    limit = 2 * arguments.bucket_mib * MIB + largest
    print(
        f"one layer, buckets of {arguments.bucket_mib} MiB; two buckets and the largest tensor in "
        f"BF16 take {limit / MIB:.0f} MiB; medians of {arguments.repetitions}, [least, most]\n"
    )
    print(
        "TP  format  path              sent MiB   time s                 CPU s   "
        "most extra MiB on a rank"
    )
    for size in arguments.tensor_parallel_sizes:
        if device.accelerator() == "cuda" and size > torch.cuda.device_count():
            print(f"{size:2}  needs {size} GPUs")
            continue
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        port = free_port()
        ranks = [
            context.Process(target=run_rank, args=(rank, size, port, arguments, results))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        count = size * len(arguments.formats) * len(PATHS) * arguments.repetitions
        rows = [results.get(timeout=600) for _ in range(count)]
        for process in ranks:
            process.join()
        report(size, arguments.formats, rows)
    for weight_format in arguments.formats:
        compare_with_a_copy(weight_format, arguments.repetitions)


def report(
    size: int, formats: Sequence[str], rows: list[tuple[int, str, str, int, Measured]]
) -> None:
    """Print the rows of one tensor-parallel size."""
    for weight_format in formats:
        figures: dict[str, tuple[float, float, float, float]] = {}
        for path in PATHS:
            by_rank = [
                [m for _, f, p, r, m in rows if (f, p, r) == (weight_format, path, rank)]
                for rank in range(size)
            ]
            sent = sum(measured[0].sent_bytes for measured in by_rank) / MIB
            times = [measured.time_s for measured in by_rank[0]]
            cpu_s = sum(median(m.cpu_s for m in measured) for measured in by_rank)
            memory = max(m.memory_bytes for measured in by_rank for m in measured) / MIB
            figures[path] = sent, median(times), cpu_s, memory
            spread = f"[{min(times):.2f}, {max(times):.2f}]"
            print(
                f"{size:2}  {weight_format:6}  {path:16}  {sent:8.0f}   {median(times):6.2f} "
                f"{spread:15}   {cpu_s:5.2f}   {memory:8.0f}",
                flush=True,
            )
        baseline = figures["gather first"]
        for path in PATHS[:-1]:
            ratios = [
                a / b if b else math.nan for a, b in zip(figures[path], baseline, strict=True)
            ]
            print(
                f"    {path:16}  bytes {ratios[0]:.3f}, time {ratios[1]:.2f}, CPU {ratios[2]:.2f}, "
                f"memory {ratios[3]:.2f} of gathering first",
                flush=True,
            )
        print()


if __name__ == "__main__":
    main()
