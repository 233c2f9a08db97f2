"""Learner to server on one GPU, by format: `python -m benchmarks.gpu.publish`.

A whole `Publisher.publish`: pause, quantize, send, load, compare every tensor's checksum, resume.
The learner's weights are `policy.RandomPolicy`'s, all on the server's GPU, so NCCL cannot carry
them: the server reads the learner's buckets where they lie, or gloo takes them through host memory,
which is what a run does for now. The floor is what the memory's bandwidth allows:
every BF16 weight read and its codes written on the learner's side, the codes read and written on
the server's, at the bandwidth that a copy reaches on this device in the same sitting.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, get_args

import torch

from benchmarks.gpu import policy, record, timing
from qurl_megatron import device
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.weight_sync.publish import Carrier, Publisher
from qurl_megatron.weight_sync.reshard import Converter

FORMATS: tuple[WeightFormat, ...] = ("bf16", "int8", "fp8")
CARRIERS: dict[str, tuple[Carrier, ...]] = {  # gloo takes half a minute for 32B
    "tiny": ("shared_memory", "gloo"),
    "7B": ("shared_memory", "gloo"),
    "14B": ("shared_memory",),
    "32B": ("shared_memory",),
}
GOAL = 3.0  # times the floor
BUCKET_BYTES = 512 * 2**20
COPIED_BYTES = 2**28


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=policy.SHAPES)
    parser.add_argument("--carriers", nargs="+", choices=get_args(Carrier))
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    results = record.Record("publish", arguments)
    shapes = arguments.shapes or (["tiny"] if arguments.rehearsal else ["7B", "32B"])
    join_alone()
    for shape in shapes:
        carriers = arguments.carriers or CARRIERS[shape]
        for weight_format in FORMATS:
            keys = {f"{shape} {weight_format} {carrier}": carrier for carrier in carriers}
            missing = {key: carrier for key, carrier in keys.items() if key not in results.rows}
            if missing:
                measure(shape, weight_format, missing, arguments.repetitions, results)
        for carrier in carriers:
            results.add(f"{shape} {carrier} against the goals", compare(shape, carrier, results))
    results.finish()


def compare(shape: str, carrier: str, results: record.Record) -> dict[str, Any]:
    rows = {f: results.rows[f"{shape} {f} {carrier}"] for f in FORMATS}
    bf16_s = rows["bf16"]["publish_s"]["median"]
    found: dict[str, Any] = {}
    for weight_format in FORMATS[1:]:
        row = rows[weight_format]
        found[f"{weight_format}_over_bf16"] = row["publish_s"]["median"] / bf16_s
        found[f"{weight_format}_over_floor"] = row["over_floor"]
    overs = [rows[weight_format]["over_floor"] for weight_format in FORMATS[1:]]
    faster = all(found[f"{weight_format}_over_bf16"] < 1 for weight_format in FORMATS[1:])
    return {**found, "faster_than_bf16": faster, "within_3x_of_the_floor": max(overs) <= GOAL}


def join_alone() -> None:
    """Make this process a learner of one rank, as far as converting weights asks for it."""
    from megatron.core import parallel_state

    device.limit_threads(1)
    device.initialize_distributed()
    with megatron_runtime():
        parallel_state.initialize_model_parallel(1, create_gloo_process_groups=False)


def measure(
    shape: str,
    weight_format: WeightFormat,
    carriers: dict[str, Carrier],
    repetitions: int,
    results: record.Record,
) -> None:
    """A row for each carrier, of one server."""
    # A cache and graphs no larger than a server needs to be there: the weights want the memory.
    server = ServerConfig(max_total_tokens=4096, max_running_requests=2, mem_fraction_static=0.92)
    log = results.log_dir / f"publish_{shape}_{weight_format}.log"
    with policy.served(shape, weight_format, server, 1024, log) as (running, architecture):
        learner = policy.RandomPolicy(architecture)
        for key, carrier in carriers.items():
            publisher = Publisher(
                learner,
                [running],
                weight_format,
                BUCKET_BYTES,
                f"benchmark-{carrier}",
                carrier,
            )
            try:
                results.add(key, publishing(publisher, learner, weight_format, repetitions))
            finally:
                publisher.close()


def publishing(
    publisher: Publisher,
    learner: policy.RandomPolicy,
    weight_format: WeightFormat,
    repetitions: int,
) -> dict[str, Any]:
    publisher.publish()  # warms up: kernels are compiled, memory is taken
    timing.wait_for_device()
    on_gpu = device.accelerator() == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    publish_s, convert_s = [], []
    for _ in range(repetitions):
        start = time.perf_counter()
        published = publisher.publish()
        publish_s.append(time.perf_counter() - start)
        convert_s.append(converting(learner, weight_format))
    weights = sum(shard.numel() for *_, shard in learner.shards())
    floor_bytes = 2 * weights + 3 * published.sent_bytes
    floor_s = floor_bytes / timing.copy_bandwidth(COPIED_BYTES if on_gpu else 2**20)
    return {
        "weights": weights,
        "sent_bytes": published.sent_bytes,
        "publish_s": spread(publish_s),
        "convert_s": spread(convert_s),
        "floor_s": floor_s,
        "over_floor": median(publish_s) / floor_s,
        "extra_memory_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
    }


def converting(learner: policy.RandomPolicy, weight_format: WeightFormat) -> float:
    """Seconds of making the buckets, checksums included, with nothing sent."""
    converter = Converter(learner, weight_format, BUCKET_BYTES)
    start = time.perf_counter()
    converter.convert(lambda bucket: None)
    timing.wait_for_device()
    return time.perf_counter() - start


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": median(seconds), "least": min(seconds), "most": max(seconds)}


if __name__ == "__main__":
    main()
