"""Publish to servers of real sizes and sample from them: `python -m benchmarks.gpu.servers`.

Real SGLang servers start, one for each format of a shape. Servers of 7B run at the same time and
take turns, so that a ratio compares rounds that are seconds apart; larger ones run one at a time.
First, complete publishes are timed: pause, quantize, send, load, compare the checksum of every
tensor, resume. The weights are those of `benchmarks/shards.py`, on the server's GPU, and travel as
`quantization.transport` says: "direct" writes them into the server's parameters; "broadcast" sends
them by gloo through host memory, because NCCL does not connect two processes on one GPU. The floor
is the time that memory bandwidth allows: the learner reads every BF16 weight and writes its codes;
these are read once more, and written into the server's parameters. The bandwidth is that of a copy
on the same device in the same process.

Then tokens per second: a batch of prompts of 512 random tokens is sent at once, and each samples
`--output-length` tokens at temperature 1. End-of-sequence is ignored. The rate is the sampled
tokens over the duration of the whole request, prefill included, as the median of `--repetitions`. A
short request before, which compiles kernels, is not counted. If a batch does not fit the cache
beside the weights, SGLang queues part of it, as in training; `cache_tokens` records the capacity. A
batch that needs more than twice the cache is left out, and its row says so.

`adapters` is a server with adapters of rank 16 over an INT8 base, and shows what adapters cost. It
gets no weights.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Literal

import httpx

from benchmarks.gpu import policy, record, timing
from benchmarks.shards import random_learner
from qurl_megatron import device
from qurl_megatron.config.schema import (
    AdaptersConfig,
    FormatName,
    QuantizationConfig,
    ServerConfig,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, wait_ready
from qurl_megatron.rollout.start import start as start_server
from qurl_megatron.weight_sync.publish import Publisher

# Format and rank of adapters of each server.
VARIANTS: dict[str, tuple[FormatName, int]] = {
    "bf16": ("bf16", 0),
    "int8": ("int8", 0),
    "fp8": ("fp8", 0),
    "int4": ("int4", 0),
    "adapters": ("int8", 16),
}
SIDE_BY_SIDE = ("tiny", "7B")  # one GPU holds a server of every variant of these shapes
Transport = Literal["broadcast", "direct"]
# "broadcast" is left out for the larger shapes: one publish of 32B takes half a minute.
TRANSPORTS: dict[str, tuple[Transport, ...]] = {
    "tiny": ("direct", "broadcast"),
    "7B": ("direct", "broadcast"),
    "14B": ("direct",),
    "32B": ("direct",),
}
PROMPT_LENGTH = 512
BUCKET_BYTES = 512 * 2**20
COPY_BYTES = 2**28
# What weights and cache leave free on the GPU, for CUDA graphs and workspaces of the server, the
# learner's weights, buckets on both sides and two CUDA contexts.
RESERVED_BYTES = 13 * 2**30


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=TRANSPORTS, default=["32B", "7B", "14B"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--transports", nargs="*", choices=("direct", "broadcast"), help="none: no publishes"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--output-length", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    arguments.prompt_length = PROMPT_LENGTH
    if arguments.rehearsal:
        arguments.shapes, arguments.batches = ["tiny"], [1, 4]
        arguments.prompt_length = arguments.output_length = 16
    results = record.Record("servers", arguments)
    policy.initialize_single_rank()
    for shape in arguments.shapes:
        names = [
            name for name in arguments.variants if f"{shape} {name} over bf16" not in results.rows
        ]
        for group in [names] if shape in SIDE_BY_SIDE else [[name] for name in names]:
            measure(shape, group, arguments, results)
        for name in names:
            results.add(f"{shape} {name} over bf16", compare_with_bf16(shape, name, results))
    results.finish()


def measure(
    shape: str, names: list[str], arguments: argparse.Namespace, results: record.Record
) -> None:
    """Start these servers together, and add rows for each: start, transports, batch sizes."""
    length = arguments.prompt_length + arguments.output_length
    start = time.perf_counter()
    with ExitStack() as stack:
        config = server_config(len(names), arguments)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy.write_config(shape, directory)
        servers: dict[str, Server] = {}
        for name in names:
            weight_format, rank = VARIANTS[name]
            log = results.log_dir / f"servers_{shape}_{name.replace(' ', '_')}.log"
            adapters = AdaptersConfig(rank)
            spec = ServerSpec(directory, config, weight_format, length, adapters=adapters)
            servers[name] = start_server(spec, log, seed=0)
            stack.callback(servers[name].stop)
        wait_ready(list(servers.values()), config.start_timeout_s)
        start_s = time.perf_counter() - start
        for name, server in servers.items():
            row = {"start_s": start_s, "cache_tokens": cache_tokens(server)}
            results.add(f"{shape} {name} server", row)
        architecture = Architecture.from_directory(directory)
        learner = random_learner(architecture)
        for name, server in servers.items():
            weight_format, rank = VARIANTS[name]
            for transport in () if rank else transports(shape, arguments):
                settings = QuantizationConfig(
                    weight_format, bucket_bytes=BUCKET_BYTES, transport=transport
                )
                publisher = Publisher(learner, Fleet("rollout", {0: server}), settings)
                try:
                    row = measure_publish(publisher, learner, arguments.repetitions)
                finally:
                    publisher.close()
                results.add(f"{shape} {name} {transport}", row)
        for batch in arguments.batches:
            rows = measure_rates(servers, batch, arguments, architecture.vocab_size)
            for name, row in rows.items():
                results.add(f"{shape} {name} batch {batch}", row)


def transports(shape: str, arguments: argparse.Namespace) -> list[Transport]:
    """Return the transports to measure for a shape."""
    chosen = arguments.transports
    return [each for each in TRANSPORTS[shape] if chosen is None or each in chosen]


def server_config(number: int, arguments: argparse.Namespace) -> ServerConfig:
    """Return the settings of each of `number` servers on this GPU."""
    most = max(arguments.batches)
    if device.accelerator() == "cpu":
        return ServerConfig(max_running_requests=most, max_total_tokens=8192)
    if number > 1:  # each with room for what is sampled, and no more
        tokens = most * (arguments.prompt_length + arguments.output_length)
        return ServerConfig(
            mem_fraction_static=0.95, max_running_requests=most, max_total_tokens=tokens
        )
    memory = device.gpu_properties()[0].total_memory
    fraction = round(1 - RESERVED_BYTES / memory, 3)
    return ServerConfig(mem_fraction_static=fraction, max_running_requests=most)


def measure_publish(publisher: Publisher, learner: Learner, repetitions: int) -> dict[str, Any]:
    """Return times in seconds, sizes in bytes and the floor of `repetitions` publishes."""
    publisher.publish()  # warm-up: compiles kernels and allocates memory
    publish_s = []
    for _ in range(repetitions):
        start = time.perf_counter()
        published = publisher.publish()
        publish_s.append(time.perf_counter() - start)
        assert published.num_servers == 1
    weights = sum(shard.numel() for *_, shard in learner.shards())
    floor_bytes = 2 * weights + 3 * published.conversion.num_bytes
    copied_bytes = COPY_BYTES if device.accelerator() == "cuda" else 2**20
    floor_s = floor_bytes / timing.copy_bandwidth(copied_bytes)
    return {
        "weights": weights,
        "num_bytes": published.conversion.num_bytes,
        "publish_s": timing.summary(publish_s),
        "floor_s": floor_s,
        "over_floor": median(publish_s) / floor_s,
    }


def measure_rates(
    servers: dict[str, Server], batch: int, arguments: argparse.Namespace, vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Return the tokens per second of a batch on each server, which are asked in turn."""
    prompt_length, output_length = arguments.prompt_length, arguments.output_length
    rates: dict[str, list[float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        tokens = batch * (prompt_length + output_length)
        if tokens > 2 * cache_tokens(server):
            rows[name] = {"left_out": f"{tokens} tokens"}
        else:
            policy.sample(server, batch, prompt_length, 8, vocabulary)
            rates[name] = []
    for _ in range(arguments.repetitions):
        for name in rates:
            start = time.perf_counter()
            policy.sample(servers[name], batch, prompt_length, output_length, vocabulary)
            rates[name].append(batch * output_length / (time.perf_counter() - start))
    for name, measured in rates.items():
        rows[name] = {
            "tokens_per_s": median(measured),
            "least": min(measured),
            "most": max(measured),
            "prompt_length": prompt_length,
            "output_length": output_length,
        }
    return rows


def cache_tokens(server: Server) -> int:
    """Return the capacity of the server's key-value cache, in tokens."""
    response = httpx.get(f"{server.url}/server_info", headers=server.headers, timeout=60)
    information = response.raise_for_status().json()
    return int(information["max_total_num_tokens"])


def compare_with_bf16(shape: str, name: str, results: record.Record) -> dict[str, Any]:
    """Return publish times and rates relative to BF16's."""
    compared: dict[str, Any] = {}
    rows = results.rows
    for key in [key for key in rows if key.startswith(f"{shape} {name} ")]:
        what = key.removeprefix(f"{shape} {name} ")
        row, bf16 = rows[key], rows.get(f"{shape} bf16 {what}", {})
        if "publish_s" in row.keys() & bf16.keys():
            compared[f"{what} time"] = row["publish_s"]["median_s"] / bf16["publish_s"]["median_s"]
        elif "tokens_per_s" in row.keys() & bf16.keys():
            compared[what] = row["tokens_per_s"] / bf16["tokens_per_s"]
    return compared


if __name__ == "__main__":
    main()
