"""Learner to server on one GPU, by format: `python -m benchmarks.gpu.publish`.

A whole `Publisher.publish`: pause, quantise, send, load, compare every tensor's checksum, resume.
The learner's weights are `policy.RandomPolicy`'s. The floor is what the memory's bandwidth allows:
every BF16 weight read and its codes written on the learner's side, the codes read and written on
the server's, at the bandwidth that a copy reaches on this device in the same sitting.
"""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import policy, record, timing
from qurl_megatron import device
from qurl_megatron.config import ServerConfig, WeightFormat
from qurl_megatron.publish import Publisher
from qurl_megatron.reshard import Converter

FORMATS: tuple[WeightFormat, ...] = ("bf16", "int8", "fp8")
GOAL = 3.0  # times the floor
BUCKET_BYTES = 512 * 2**20
COPIED_BYTES = 2**30


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=policy.SHAPES)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    results = record.Record("publish", arguments)
    shapes = arguments.shapes or (["tiny"] if arguments.rehearsal else ["7B", "32B"])
    join_alone()
    for shape in shapes:
        for weight_format in FORMATS:
            key = f"{shape} {weight_format}"
            if key not in results.rows:
                results.add(key, publishing(shape, weight_format, arguments.repetitions, results))
        rows = [results.rows[f"{shape} {weight_format}"] for weight_format in FORMATS]
        bf16_s, *quantised_s = (row["publish_s"]["median"] for row in rows)
        results.add(
            f"{shape} goals",
            {
                "int8_and_fp8_faster_than_bf16": max(quantised_s) < bf16_s,
                "within_3x_of_the_floor": max(row["over_floor"] for row in rows[1:]) <= GOAL,
            },
        )
    results.finish()


def join_alone() -> None:
    """Make this process a learner of one rank, as far as converting weights asks for it."""
    from megatron.core import parallel_state

    device.limit_threads(1)
    device.initialise_distributed()
    with device.megatron_runtime():
        parallel_state.initialize_model_parallel(1, create_gloo_process_groups=False)


def publishing(
    shape: str, weight_format: WeightFormat, repetitions: int, results: record.Record
) -> dict[str, Any]:
    # No more cache and graphs than a server needs to be there.
    server = ServerConfig(max_total_tokens=4096, max_running_requests=2, mem_fraction_static=0.6)
    log = results.log_dir / f"publish_{shape}_{weight_format}.log"
    with policy.served(shape, weight_format, server, 1024, log) as (running, architecture):
        learner = policy.RandomPolicy(architecture)
        publisher = Publisher(learner, [running], weight_format, BUCKET_BYTES, "benchmark")  # type: ignore[arg-type]
        publisher.publish()  # warms up: kernels are compiled, memory is taken
        timing.wait_for_device()
        if not results.rehearsal:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        publish_s, convert_s = [], []
        for _ in range(repetitions):
            start = time.perf_counter()
            published = publisher.publish()
            publish_s.append(time.perf_counter() - start)
            convert_s.append(converting(learner, weight_format))
        weights = sum(
            math.prod(shard.shape) * (architecture.num_layers if rule.layered else 1)
            for rule, shard in learner._shards
        )
        floor_bytes = 2 * weights + 3 * published.sent_bytes
        floor_s = floor_bytes / timing.copy_bandwidth(2**20 if results.rehearsal else COPIED_BYTES)
        row = {
            "weights": weights,
            "sent_bytes": published.sent_bytes,
            "publish_s": spread(publish_s),
            "convert_s": spread(convert_s),
            "floor_s": floor_s,
            "over_floor": median(publish_s) / floor_s,
            "carried_by": device.backend_towards(running.gpus),
        }
        if not results.rehearsal:
            row["extra_memory_bytes"] = torch.cuda.max_memory_allocated() - before
        publisher.close()
    return row


def converting(learner: policy.RandomPolicy, weight_format: WeightFormat) -> float:
    """Seconds of making the buckets, checksums included, with nothing sent."""
    converter = Converter(learner, weight_format, BUCKET_BYTES)  # type: ignore[arg-type]
    start = time.perf_counter()
    for _ in converter.buckets():
        pass
    timing.wait_for_device()
    return time.perf_counter() - start


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": median(seconds), "least": min(seconds), "most": max(seconds)}


if __name__ == "__main__":
    main()
