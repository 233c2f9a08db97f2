"""Compare "quantize, then gather" with "gather, then quantize": `python -m benchmarks.reshard`.

The weights are one layer of Qwen2.5-32B at full width, on tensor-parallel ranks of this machine,
over gloo (NCCL if there are GPUs). Four paths take turns in the same processes:

- "quantize first" is the converter (`weight_sync/reshard.py`).
- "delta" sends what changed since the pass before: two codes in ten thousand.
- "direct" writes into the parameters of a server of one rank on this machine.
- "gather first" is the baseline: it gathers a bucket's tensors in BF16 and quantizes them on rank
  0, as systems do that quantize where the weights arrive.

All but "delta" give rank 0, or the server, the same tensors, byte for byte.

"sent" counts the bytes that ranks send each other. "CPU" adds up the processor time of all ranks,
the kernel's included; on a busy machine it says more than the time that passed. "memory" is the
largest growth of a rank's resident set (on a GPU, of its allocator's peak) beside the layer itself.
"""

import argparse
import dataclasses
import functools
import math
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from benchmarks.machine import MIB
from benchmarks.shards import random_learner
from qurl_megatron import device
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import part_key
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.direct import ServerParameters, describe
from qurl_megatron.weight_sync.in_place import Writer
from qurl_megatron.weight_sync.reshard import Converter

FORMATS: tuple[WeightFormat, ...] = ("int8", "fp8")
PATHS = ("quantize first", "delta", "direct", "gather first")
CHANGED = 2e-4  # of the weights, between two deltas
QWEN_32B_LAYER = dataclasses.replace(
    KNOWN_MODELS["Qwen2.5-32B"],
    num_layers=1,
    vocab_size=256,  # small: only the layer is measured
    tie_word_embeddings=True,
)


class Measured(NamedTuple):
    """One pass of one path on one rank."""

    weight_format: WeightFormat
    path: str
    rank: int
    time_s: float
    cpu_s: float
    sent_bytes: int
    memory_bytes: int


def change_weights(learner: Learner) -> None:
    """Change the sign of a few weights."""
    with torch.no_grad():
        for *_, shard in learner.shards():
            number = max(1, int(CHANGED * shard.numel()))
            chosen = torch.randint(shard.numel(), (number,), device=shard.device)
            shard.view(-1)[chosen] *= -1


def place_server(converter: Converter) -> tuple[list[Bucket], ServerParameters]:
    """Allocate the parameters of a server of one rank, on rank 0; attach all ranks to them."""
    held = [
        Bucket.empty(manifest, device.device())
        for team in converter.manifests()
        for manifest in team
    ]
    views = [view for bucket in held for view in bucket.tensors()]
    described: list[Any] = [{part_key(name, 0, 0): describe(view) for name, view in views}]
    dist.broadcast_object_list(described)
    parameters = ServerParameters()
    parameters.attach({"server": described})
    parameters.keep({"server": socket.gethostname()}, ["server"])
    return held, parameters


def gather_then_quantize(learner: Learner, weight_format: WeightFormat, bucket_bytes: int) -> None:
    """Fill one bucket after another with tensors on rank 0, and drop it: the baseline."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bucket: dict[str, Tensor] = {}
    filled = 0
    for rule, number, shard in learner.shards():
        for part in weight_map.split(rule, shard, learner.architecture, number, rank, size):
            full = gather_on_first(part, size)
            if full is None:
                continue
            tensors = {part.name: full}
            if rule.quantized:
                quantized = quantize.quantize(full, weight_format)
                scale_name = quantize.scale_name(part.name, weight_format)
                tensors = {part.name: quantized.codes}
                tensors[scale_name] = quantize.engine_scale(quantized)
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            if filled + nbytes > bucket_bytes:
                bucket, filled = {}, 0
            bucket |= tensors
            filled += nbytes


def gather_on_first(part: TensorPart, size: int) -> Tensor | None:
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


def run_paths(arguments: argparse.Namespace) -> None:
    """Run all paths on this rank, together with the others; rank 0 prints the figures of all."""
    from megatron.core import parallel_state

    device.initialize_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    with megatron_runtime():
        parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)
    learner = random_learner(QWEN_32B_LAYER, rank, size)
    sent = SentBytes()
    bucket_bytes = arguments.bucket_mib * MIB
    rows = []
    for weight_format in arguments.formats:
        converter = Converter(learner, weight_format, bucket_bytes)
        changing = Converter(learner, weight_format, bucket_bytes, sends_deltas=True)
        held, parameters = place_server(converter)
        direct = Writer(converter, parameters)
        paths: dict[str, Callable[[], Any]] = {
            "quantize first": functools.partial(converter.convert, drop),
            "delta": functools.partial(changing.convert, drop, since=1),
            "direct": direct.write,
            "gather first": functools.partial(
                gather_then_quantize, learner, weight_format, bucket_bytes
            ),
        }
        changing.convert(drop)  # the version that the first delta changes
        for repetition in range(arguments.repetitions + 1):  # the first warms up
            for path, run_pass in paths.items():
                if path == "delta":
                    change_weights(learner)
                dist.barrier()
                machine.reset_peak()
                before, sent.total = machine.held_bytes(), 0
                start, cpu_start = time.perf_counter(), time.process_time()
                run_pass()
                cpu_s = time.process_time() - cpu_start
                dist.barrier()
                time_s, grown = time.perf_counter() - start, machine.peak_bytes() - before
                if repetition:
                    figures = (time_s, cpu_s, sent.total, grown)
                    rows.append(Measured(weight_format, path, rank, *figures))
        del converter, changing, direct, paths, parameters, held
    of_ranks: list[Any] = [None] * size
    dist.gather_object(rows, of_ranks if rank == 0 else None)
    if rank == 0:
        for weight_format in arguments.formats:
            report(weight_format, [row for rows in of_ranks for row in rows])
    dist.destroy_process_group()


def drop(bucket: Bucket) -> None:
    """Keep nothing of a bucket."""


def report(weight_format: WeightFormat, rows: list[Measured]) -> None:
    """Print what all ranks measured of one format."""
    size = 1 + max(row.rank for row in rows)
    figures: dict[str, list[float]] = {}
    for path in PATHS:
        of_path = [row for row in rows if (row.weight_format, row.path) == (weight_format, path)]
        by_rank = [[row for row in of_path if row.rank == rank] for rank in range(size)]
        sent = sum(of_rank[0].sent_bytes for of_rank in by_rank) / MIB
        times = [row.time_s for row in by_rank[0]]
        cpu_s = sum(median(row.cpu_s for row in of_rank) for of_rank in by_rank)
        memory = max(row.memory_bytes for row in of_path) / MIB
        figures[path] = [sent, median(times), cpu_s, memory]
        print(
            f"{size:2}  {weight_format:6}  {path:16}  {sent:8.0f}   "
            f"{machine.spread(times, '.3f'):24} {cpu_s:6.3f}   {memory:8.0f}",
            flush=True,
        )
    for path in PATHS[:-1]:
        pairs = zip(figures[path], figures[PATHS[-1]], strict=True)
        ratios = [own / other if other else math.nan for own, other in pairs]
        print(
            f"    {path:16}  bytes {ratios[0]:.3f}, time {ratios[1]:.2f}, CPU {ratios[2]:.2f}, "
            f"memory {ratios[3]:.2f} of {PATHS[-1]}",
            flush=True,
        )
    print(flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--tensor-parallel-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=256)
    arguments = parser.parse_args()
    machine.print_machine("torch", "megatron-core")
    largest = 2 * QWEN_32B_LAYER.hidden_size * QWEN_32B_LAYER.intermediate_size / MIB
    print(
        f"buckets of {arguments.bucket_mib} MiB; two of them and the largest tensor in BF16 take "
        f"{2 * arguments.bucket_mib + largest:.0f} MiB; medians of {arguments.repetitions}, "
        "[least, most]\n"
    )
    print("TP  format  path              sent MiB   time s                    CPU s   extra MiB")
    for size in arguments.tensor_parallel_sizes:
        if device.accelerator() == "cuda" and size > torch.cuda.device_count():
            print(f"{size:2}  needs {size} GPUs")
        else:
            machine.run_ranks(run_paths, size, arguments)


if __name__ == "__main__":
    main()
