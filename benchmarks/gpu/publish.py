"""Time a publish from learner to server on one GPU: `python -m benchmarks.gpu.publish`.

It times a complete `Publisher.publish` by format: pause, quantize, send, load, compare the checksum
of every tensor, resume. The weights are those of `benchmarks/shards.py`, on the server's GPU. They
travel as `quantization.transport` says: "broadcast" sends them by gloo through host memory, because
NCCL does not connect two processes on one GPU; "direct" writes them into the server's parameters.

The floor is the time that memory bandwidth allows: the learner reads every BF16 weight and writes
its codes; these are read once more, and written into the server's parameters. The bandwidth is that
of a copy on the same device in the same process.
"""

import time
from statistics import median
from typing import Any, Literal

from benchmarks import machine
from benchmarks.gpu import policy, record, timing
from benchmarks.shards import random_learner
from qurl_megatron import device
from qurl_megatron.config.schema import FormatName, QuantizationConfig, ServerConfig
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.learner.learner import Learner
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.weight_sync.publish import Publisher
from qurl_megatron.weight_sync.reshard import Converter

FORMATS: tuple[FormatName, ...] = ("bf16", "int8", "fp8")
# "broadcast" is left out for the larger shapes: one publish of 32B takes half a minute.
Transport = Literal["broadcast", "direct"]
TRANSPORTS: dict[str, tuple[Transport, ...]] = {
    "tiny": ("direct", "broadcast"),
    "7B": ("direct", "broadcast"),
    "14B": ("direct",),
    "32B": ("direct",),
}
GOAL = 3.0  # publish time over the floor
BUCKET_BYTES = 512 * 2**20
COPY_BYTES = 2**28


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=TRANSPORTS)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS["tiny"])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    results = record.Record("publish", arguments)
    shapes = arguments.shapes or (["tiny"] if arguments.rehearsal else ["7B", "32B"])
    initialize_single_rank()
    for shape in shapes:
        transports = arguments.transports or TRANSPORTS[shape]
        for weight_format in FORMATS:
            keys = {f"{shape} {weight_format} {transport}": transport for transport in transports}
            missing = {key: transport for key, transport in keys.items() if key not in results.rows}
            if missing:
                measure(shape, weight_format, missing, arguments.repetitions, results)
        for transport in transports:
            compared = compare_with_goals(shape, transport, results)
            results.add(f"{shape} {transport} against the goals", compared)
    results.finish()


def compare_with_goals(shape: str, transport: str, results: record.Record) -> dict[str, Any]:
    """Return each quantized format's publish time relative to BF16 and to the floor."""
    rows = {f: results.rows[f"{shape} {f} {transport}"] for f in FORMATS}
    bf16_s = rows["bf16"]["publish_s"]["median_s"]
    ratios: dict[str, Any] = {}
    for weight_format in FORMATS[1:]:
        row = rows[weight_format]
        ratios[f"{weight_format}_over_bf16"] = row["publish_s"]["median_s"] / bf16_s
        ratios[f"{weight_format}_over_floor"] = row["over_floor"]
    slowest = max(rows[weight_format]["over_floor"] for weight_format in FORMATS[1:])
    faster = all(ratios[f"{weight_format}_over_bf16"] < 1 for weight_format in FORMATS[1:])
    return {**ratios, "faster_than_bf16": faster, "within_3x_of_the_floor": slowest <= GOAL}


def initialize_single_rank() -> None:
    """Initialize torch.distributed and Megatron in this process, as the only learner rank."""
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    device.initialize_distributed()
    with megatron_runtime():
        parallel_state.initialize_model_parallel(1, create_gloo_process_groups=False)


def measure(
    shape: str,
    weight_format: FormatName,
    transports: dict[str, Transport],
    repetitions: int,
    results: record.Record,
) -> None:
    """Start one server and add one row per transport."""
    # The smallest cache and CUDA graphs a server starts with leave the memory to the weights.
    server = ServerConfig(max_total_tokens=4096, max_running_requests=2, mem_fraction_static=0.92)
    log = results.log_dir / f"publish_{shape}_{weight_format}.log"
    with policy.run_server(shape, weight_format, server, 1024, log) as (running, architecture):
        learner = random_learner(architecture)
        for key, transport in transports.items():
            settings = QuantizationConfig(
                weight_format, bucket_bytes=BUCKET_BYTES, transport=transport
            )
            publisher = Publisher(learner, Fleet("rollout", {0: running}), settings)
            try:
                results.add(key, measure_publish(publisher, learner, weight_format, repetitions))
            finally:
                publisher.close()


def measure_publish(
    publisher: Publisher,
    learner: Learner,
    weight_format: FormatName,
    repetitions: int,
) -> dict[str, Any]:
    """Return times in seconds, sizes in bytes and the floor of `repetitions` publishes."""
    publisher.publish()  # warm-up: compiles kernels and allocates memory
    timing.wait_for_device()
    machine.reset_peak()
    before = machine.held_bytes()
    publish_s, convert_s = [], []
    for _ in range(repetitions):
        start = time.perf_counter()
        published = publisher.publish()
        publish_s.append(time.perf_counter() - start)
        assert published.num_servers == 1
        convert_s.append(convert_once(learner, weight_format))
    weights = sum(shard.numel() for *_, shard in learner.shards())
    floor_bytes = 2 * weights + 3 * published.conversion.num_bytes
    copied_bytes = COPY_BYTES if device.accelerator() == "cuda" else 2**20
    floor_s = floor_bytes / timing.copy_bandwidth(copied_bytes)
    return {
        "weights": weights,
        "num_bytes": published.conversion.num_bytes,
        "publish_s": timing.summary(publish_s),
        "convert_s": timing.summary(convert_s),
        "floor_s": floor_s,
        "over_floor": median(publish_s) / floor_s,
        "extra_memory_bytes": machine.peak_bytes() - before,
    }


def convert_once(learner: Learner, weight_format: FormatName) -> float:
    """Return the seconds to build the buckets, including checksums, without sending them."""
    converter = Converter(learner, weight_format, BUCKET_BYTES)
    start = time.perf_counter()
    converter.convert(lambda bucket: None)
    timing.wait_for_device()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
