"""Publish to servers of real sizes and sample from them: `python -m benchmarks.gpu.servers`.

For each shape and format a real SGLang server starts, and all is measured with that one. First
complete publishes: pause, quantize, send, load, compare the checksum of every tensor, resume. The
weights are those of `benchmarks/shards.py`, on the server's GPU, and travel as
`quantization.transport` says: "direct" writes them into the server's parameters; "broadcast" sends
them by gloo through host memory, because NCCL does not connect two processes on one GPU. The floor
is the time that memory bandwidth allows: the learner reads every BF16 weight and writes its codes;
these are read once more, and written into the server's parameters. The bandwidth is that of a copy
on the same device in the same process.

Then tokens per second: each batch is sent at once, with prompts of 512 random tokens, of which each
samples `--output-length` at temperature 1. End-of-sequence is ignored. They are the sampled tokens
over the duration of the whole request, prefill included; the first request of a batch size is not
counted, because kernels are compiled in it. If a batch does not fit the cache beside the weights,
SGLang queues part of it, as in training; `cache_tokens` records the capacity. A batch that needs
more than twice the cache is left out, and its row says so.
"""

import argparse
import time
from statistics import median
from typing import Any, Literal

import httpx

from benchmarks import machine
from benchmarks.gpu import policy, record, timing
from benchmarks.shards import random_learner
from qurl_megatron import device
from qurl_megatron.config.schema import FormatName, QuantizationConfig, ServerConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server
from qurl_megatron.weight_sync.publish import Publisher
from qurl_megatron.weight_sync.reshard import Converter

FORMATS: tuple[FormatName, ...] = ("bf16", "int8", "fp8")
Transport = Literal["broadcast", "direct"]
# "broadcast" is left out for the larger shapes: one publish of 32B takes half a minute.
TRANSPORTS: dict[str, tuple[Transport, ...]] = {
    "tiny": ("direct", "broadcast"),
    "7B": ("direct", "broadcast"),
    "14B": ("direct",),
    "32B": ("direct",),
}
PUBLISH_GOAL = 3.0  # publish time over the floor
RATE_GOALS = {("32B", "int8"): 1.7, ("32B", "fp8"): 1.6, ("7B", "int8"): 1.2, ("7B", "fp8"): 1.2}
PROMPT_LENGTH = 512
BUCKET_BYTES = 512 * 2**20
COPY_BYTES = 2**28
# What weights and cache leave on the GPU: CUDA graphs and workspaces of the server, the weights of
# the learner, buckets on both sides and two CUDA contexts.
RESERVED_BYTES = 13 * 2**30


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=TRANSPORTS, default=["32B", "7B", "14B"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--output-length", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5, help="of a publish")
    arguments = parser.parse_args()
    arguments.prompt_length = PROMPT_LENGTH
    if arguments.rehearsal:
        arguments.shapes, arguments.batches = ["tiny"], [1, 4]
        arguments.prompt_length = arguments.output_length = 16
    results = record.Record("servers", arguments)
    policy.initialize_single_rank()
    for shape in arguments.shapes:
        for weight_format in FORMATS:
            if f"{shape} {weight_format} over bf16" not in results.rows:
                measure(shape, weight_format, arguments, results)
                compared = compare_with_bf16(shape, weight_format, results)
                results.add(f"{shape} {weight_format} over bf16", compared)
    results.finish()


def measure(
    shape: str, weight_format: FormatName, arguments: argparse.Namespace, results: record.Record
) -> None:
    """Start one server, and add a row for it, for each transport and for each batch size."""
    memory = 0 if results.rehearsal else device.gpu_properties()[0].total_memory
    server = ServerConfig(
        mem_fraction_static=round(1 - RESERVED_BYTES / memory, 3) if memory else 0.2,
        max_running_requests=max(arguments.batches),
        max_total_tokens=None if memory else 8192,
    )
    length = arguments.prompt_length + arguments.output_length
    name = f"{shape} {weight_format}"
    log = results.log_dir / f"servers_{shape}_{weight_format}.log"
    start = time.perf_counter()
    with policy.run_server(shape, weight_format, server, length, log) as (running, architecture):
        start_s = time.perf_counter() - start
        cache = cache_tokens(running)
        results.add(f"{name} server", {"start_s": start_s, "cache_tokens": cache})
        learner = random_learner(architecture)
        for transport in TRANSPORTS[shape]:
            settings = QuantizationConfig(
                weight_format, bucket_bytes=BUCKET_BYTES, transport=transport
            )
            publisher = Publisher(learner, Fleet("rollout", {0: running}), settings)
            try:
                row = measure_publish(publisher, learner, weight_format, arguments.repetitions)
            finally:
                publisher.close()
            results.add(f"{name} {transport}", row)
        for batch in arguments.batches:
            if batch * length > 2 * cache:
                row = {"left_out": f"{batch * length} tokens"}
            else:
                row = measure_rate(running, batch, arguments, architecture.vocab_size)
            results.add(f"{name} batch {batch}", row)


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


def measure_rate(
    server: Server, batch: int, arguments: argparse.Namespace, vocabulary: int
) -> dict[str, Any]:
    """Return the tokens per second of a batch, after one that compiles."""
    prompt_length, output_length = arguments.prompt_length, arguments.output_length
    policy.sample(server, batch, prompt_length, 8, vocabulary)
    start = time.perf_counter()
    policy.sample(server, batch, prompt_length, output_length, vocabulary)
    time_s = time.perf_counter() - start
    return {
        "tokens_per_s": batch * output_length / time_s,
        "time_s": time_s,
        "prompt_length": prompt_length,
        "output_length": output_length,
    }


def cache_tokens(server: Server) -> int:
    """Return the capacity of the server's key-value cache, in tokens."""
    response = httpx.get(f"{server.url}/server_info", headers=server.headers, timeout=60)
    information = response.raise_for_status().json()
    return int(information["max_total_num_tokens"])


def compare_with_bf16(
    shape: str, weight_format: FormatName, results: record.Record
) -> dict[str, Any]:
    """Return publish times and rates relative to BF16's, and which goals are reached."""
    compared: dict[str, Any] = {}
    rows = results.rows
    for key in [key for key in rows if key.startswith(f"{shape} {weight_format} ")]:
        what = key.removeprefix(f"{shape} {weight_format} ")
        row, bf16 = rows[key], rows[f"{shape} bf16 {what}"]
        if "publish_s" in row:
            compared[f"{what} time"] = row["publish_s"]["median_s"] / bf16["publish_s"]["median_s"]
            compared[f"{what} reaches its goal"] = row["over_floor"] <= PUBLISH_GOAL
        elif "tokens_per_s" in row.keys() & bf16.keys():
            compared[what] = row["tokens_per_s"] / bf16["tokens_per_s"]
            if goal := RATE_GOALS.get((shape, weight_format)):
                compared[f"{what} reaches its goal"] = compared[what] >= goal
    return compared


if __name__ == "__main__":
    main()
