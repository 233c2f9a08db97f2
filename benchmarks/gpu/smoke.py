"""Say in three minutes what works on this GPU: `python -m benchmarks.gpu.smoke`.

Each check is a process of its own with a time limit, so that one that fails or hangs hides none:

    quantize   the kernels' codes, scales and checksums are those of the CPU, in three formats
    products   the quantized layers' products are near those of float64
    rank       a started process joins a process group on its device and reduces a tensor
    server     a tiny INT8 server starts, gets weights over gloo, verifies them and samples

A row holds "passed" and what was measured, or the end of the check's output. The exit code is 1 if
a check failed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import exact_interpreter, kernels, record
from qurl_megatron import device
from qurl_megatron.config.schema import QuantizationConfig, ServerConfig

LIMITS_S = {"quantize": 30.0, "products": 30.0, "rank": 20.0, "server": 100.0}  # 3 minutes in all
REPETITIONS = 3
ANSWER = "smoke: "  # begins the line on which a check prints what it measured


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--check", choices=LIMITS_S, help="run one check in this process")
    arguments = parser.parse_args()
    if arguments.check:
        print(ANSWER + json.dumps(CHECKS[arguments.check](arguments)), flush=True)
        return
    results = record.Record("smoke", arguments)
    options = ["--rehearsal"] if arguments.rehearsal else []
    for name, limit_s in LIMITS_S.items():
        if name not in results.rows:
            results.add(name, run_check([name, *options], limit_s))
    results.finish()
    failed = [name for name, row in results.rows.items() if not row["passed"]]
    if failed:
        sys.exit(f"smoke: failed: {', '.join(failed)}")


def run_check(words: list[str], limit_s: float) -> dict[str, Any]:
    """Run a check in a process; return its row."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--check", *words]
    environment = device.child_environment({"TRITON_INTERPRET": "1"} if len(words) > 1 else {})
    try:
        ran = subprocess.run(
            command,
            cwd=record.REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        return {"passed": False, "limit_s": limit_s, "output": output.splitlines()[-8:]}
    lines = ran.stdout.splitlines()
    measured = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    time_s = round(time.perf_counter() - start, 1)
    if ran.returncode or not measured:
        return {"passed": False, "time_s": time_s, "output": lines[-8:]}
    return {"passed": True, "time_s": time_s, **json.loads(measured[0])}


def check_quantize(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the kernels with the CPU on a key projection of 32B."""
    exact_interpreter.install()
    shape = (33, 208) if arguments.rehearsal else kernels.WEIGHTS["32B key"]
    fractions = {}
    for weight_format in kernels.FORMATS:
        row = kernels.measure_quantize(shape, weight_format, REPETITIONS)
        if row["codes_that_differ_from_the_cpu"]:
            raise AssertionError(f"{weight_format}: codes differ from the CPU's")
        if not (row["scales_equal_the_cpu"] and row["checksum_equals_the_cpu"]):
            raise AssertionError(f"{weight_format}: scales or checksum differ from the CPU's")
        fractions[f"{weight_format}_of_a_copy"] = row["with_checksum_of_a_copy"]
    return fractions


def check_products(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the quantized layers with an exact product, over 16 tokens."""
    shape = (33, 208) if arguments.rehearsal else kernels.WEIGHTS["32B key"]
    row = kernels.measure_linear(shape, 16, REPETITIONS)
    errors = {name: row[f"{name}_relative_error"] for name in ("int8", "fp8")}
    if errors["int8"] > 0.02 or errors["fp8"] > 0.06:  # about twice what the codes' rounding gives
        raise AssertionError(f"relative errors {errors}")
    return errors


def check_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Join the process group of a learner with one rank, and reduce a tensor."""
    device.initialize_distributed()
    ones = torch.ones(1024, device=device.device())
    torch.distributed.all_reduce(ones)
    if float(ones.sum()) != 1024:
        raise AssertionError("all_reduce changed the values of a single rank")
    return {"backend": torch.distributed.get_backend(), "device": str(device.device())}


def check_server(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a tiny INT8 server, publish verified weights to it over gloo, and sample."""
    # Here, because importing Megatron takes most of the time that the other checks have.
    from benchmarks.gpu import policy, publish, throughput
    from benchmarks.shards import random_learner
    from qurl_megatron.rollout.fleet import Fleet
    from qurl_megatron.weight_sync.publish import Publisher

    publish.initialize_single_rank()
    server = ServerConfig(mem_fraction_static=0.2, max_total_tokens=8192, max_running_requests=8)
    log = record.RESULTS / "smoke_server.log"
    with policy.run_server("tiny", "int8", server, 64, log) as (running, architecture):
        fleet = Fleet("rollout", {0: running})
        learner = random_learner(architecture)
        publisher = Publisher(learner, fleet, QuantizationConfig("int8"))
        published = publisher.publish()
        publisher.close()
        throughput.sample(running, 4, 16, 16, architecture.vocab_size)
    log.unlink()
    return {"sent_bytes": published.sent_bytes, "num_servers": published.num_servers}


CHECKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "quantize": check_quantize,
    "products": check_products,
    "rank": check_rank,
    "server": check_server,
}


if __name__ == "__main__":
    main()
