"""Measure a rollout server's tokens per second by format: `python -m benchmarks.gpu.throughput`.

This runs a real SGLang server of a real shape. Its weights are random and are published to it like
a learner's, so that codes and scales are those of quantized weights. Each batch is sent at once:
prompts of 512 random tokens, and 1024 tokens sampled at temperature 1. End-of-sequence is ignored.
BF16, INT8 and FP8 run in turn on the same GPU. Tokens per second are sampled tokens over
the duration of the whole request, prefill included.

The server gets the GPU's memory less `RESERVED_BYTES`, which its CUDA graphs and the learner share.
If a batch does not fit the cache beside the weights, SGLang queues part of it, as in training;
`cache_tokens` records the capacity. A batch that needs more than twice the cache is left out, and
its row says so.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.gpu import policy, publish, record
from benchmarks.shards import random_learner
from qurl_megatron import device
from qurl_megatron.config.schema import FormatName, QuantizationConfig, ServerConfig
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server
from qurl_megatron.weight_sync.publish import Publisher

GOALS = {("32B", "int8"): 1.7, ("32B", "fp8"): 1.6, ("7B", "int8"): 1.2, ("7B", "fp8"): 1.2}
BATCHES = (1, 16, 64, 256)
PROMPT_LENGTH, OUTPUT_LENGTH = 512, 1024
BUCKET_BYTES = 2**28
# What weights and cache leave on the GPU: CUDA graphs and workspaces of the server, the weights of
# the learner, buckets on both sides and two CUDA contexts.
RESERVED_BYTES = 13 * 2**30


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=policy.SHAPES)
    parser.add_argument("--batches", type=int, nargs="+")
    arguments = parser.parse_args()
    small = arguments.rehearsal
    arguments.shapes = arguments.shapes or (["tiny"] if small else ["32B", "7B", "14B"])
    arguments.batches = arguments.batches or ((1, 4) if small else BATCHES)
    lengths = (16, 16) if small else (PROMPT_LENGTH, OUTPUT_LENGTH)
    results = record.Record("throughput", arguments)
    publish.initialize_single_rank()
    for shape in arguments.shapes:
        for weight_format in publish.FORMATS:
            keys = [f"{shape} {weight_format} batch {batch}" for batch in arguments.batches]
            if not all(key in results.rows for key in keys):
                measure(shape, weight_format, arguments.batches, lengths, results)
        for weight_format in publish.FORMATS[1:]:
            results.add(
                f"{shape} {weight_format} over bf16",
                compare_with_bf16(shape, weight_format, results),
            )
    results.finish()


def measure(
    shape: str,
    weight_format: FormatName,
    batches: Sequence[int],
    lengths: tuple[int, int],
    results: record.Record,
) -> None:
    """Start one server and add one row per batch size; `lengths` are of prompt and output."""
    prompt_length, output_length = lengths
    length = prompt_length + output_length
    memory = 0 if results.rehearsal else device.gpu_properties()[0].total_memory
    server = ServerConfig(
        mem_fraction_static=static_fraction(memory),
        max_running_requests=max(batches),
        max_total_tokens=8192 if results.rehearsal else None,
    )
    log = results.log_dir / f"throughput_{shape}_{weight_format}.log"
    with policy.run_server(shape, weight_format, server, length, log) as (running, architecture):
        learner = random_learner(architecture)
        fleet = Fleet("rollout", {0: running})
        settings = QuantizationConfig(weight_format, bucket_bytes=BUCKET_BYTES)
        publisher = Publisher(learner, fleet, settings)
        assert publisher.publish().num_servers == 1
        publisher.close()
        vocabulary = architecture.vocab_size
        cache = cache_tokens(running)
        fitting = [batch for batch in batches if batch * length <= 2 * cache]
        # Warm up every batch size: SGLang compiles a prefill shape when it first occurs.
        for batch in fitting:
            sample(running, batch, prompt_length, 8, vocabulary)
        for batch in batches:
            key = f"{shape} {weight_format} batch {batch}"
            if key in results.rows:
                continue
            if batch not in fitting:
                results.add(key, {"left_out": f"{batch * length} tokens", "cache_tokens": cache})
                continue
            start = time.perf_counter()
            sample(running, batch, prompt_length, output_length, vocabulary)
            time_s = time.perf_counter() - start
            results.add(
                key,
                {
                    "tokens_per_s": batch * output_length / time_s,
                    "time_s": time_s,
                    "prompt_length": prompt_length,
                    "output_length": output_length,
                    "cache_tokens": cache,
                },
            )


def static_fraction(gpu_bytes: int) -> float:
    """Return the fraction of a GPU for weights and cache; 0.2 for a rehearsal, which has none."""
    return round(1 - RESERVED_BYTES / gpu_bytes, 3) if gpu_bytes else 0.2


def sample(
    server: Server, batch: int, prompt_length: int, output_length: int, vocabulary: int
) -> None:
    """Send one batch in one request. Prompts are random, so that the prefix cache holds none.

    Raises:
        RuntimeError: a completion has the wrong length, so that the rate would be wrong.
    """
    generator = random.Random(time.time_ns())
    prompts = [
        [generator.randrange(1, vocabulary) for _ in range(prompt_length)] for _ in range(batch)
    ]
    body = {
        "input_ids": prompts,
        "sampling_params": {
            "temperature": 1.0,
            "max_new_tokens": output_length,
            "ignore_eos": True,
        },
    }
    response = httpx.post(
        f"{server.url}/generate", json=body, headers=server.headers, timeout=None
    ).raise_for_status()
    lengths = [len(answer["output_ids"]) for answer in response.json()]
    if lengths != [output_length] * batch:
        raise RuntimeError(
            f"{server.url}: expected {batch} x {output_length} tokens, got {lengths}"
        )


def cache_tokens(server: Server) -> int:
    """Return the capacity of the server's key-value cache, in tokens."""
    response = httpx.get(f"{server.url}/server_info", headers=server.headers, timeout=60)
    information = response.raise_for_status().json()
    return int(information["max_total_num_tokens"])


def compare_with_bf16(shape: str, weight_format: str, results: record.Record) -> dict[str, Any]:
    """Return the throughput relative to BF16 by batch size, and which sizes reach the goal."""
    prefix = f"{shape} {weight_format} batch "
    ratios: dict[str, Any] = {}
    for key, row in results.rows.items():
        if key.startswith(prefix):
            batch = key.removeprefix(prefix)
            bf16 = results.rows[f"{shape} bf16 batch {batch}"]
            if "left_out" not in row.keys() | bf16.keys():
                ratios[f"batch {batch}"] = row["tokens_per_s"] / bf16["tokens_per_s"]
    goal = GOALS.get((shape, weight_format))
    if goal is not None:
        reached = [name for name, ratio in ratios.items() if ratio >= goal]
        ratios |= {"goal": goal, "reached_at": ", ".join(reached) or "no batch"}
    return ratios


if __name__ == "__main__":
    main()
