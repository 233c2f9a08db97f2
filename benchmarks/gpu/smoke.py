"""Say what works on this GPU: `python -m benchmarks.gpu.smoke`.

Each check is a process of its own. All but `compile` have a time limit, so a check that fails or
hangs hides no other. Quick checks come first, so most have run if the machine is taken away:

    quantize   the kernels' codes, scales and checksums are those of the CPU, in three formats; how
               near the kernels come to the bandwidth of a copy of as many bytes
    round      BF16 values rounded without bias are those of the CPU; how much longer that takes
               than rounding to nearest, over the time of the optimizer's step
    products   the quantized layers' products are near those of float64
    rank       a started process joins a process group on its device and reduces a tensor
    learner    log-probs, gradients and three optimizer steps are those of transformers and PyTorch
    compile    no limit: what a server compiles until its first answers, and how long that takes
    server     a tiny INT8 server starts, gets weights over gloo, verifies them and samples
    direct     the same, written into the server's parameters
    delta      the same, but the second publish sends only what changed
    peer       over NCCL to a second GPU, a server gets weights, then one dies and one hangs in a
               publish: the learner goes on
    demo       the quickstart trains for two steps

A check that passed is kept, with what it measured. One that failed, had to be left out or was
killed is tried again by the same command. The exit code is 1 if a check failed.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu import exact_interpreter, record, timing
from benchmarks.runs import QURL
from qurl_megatron import device
from qurl_megatron.config.schema import QuantizationConfig, ServerConfig, WeightFormat
from qurl_megatron.machine.processes import die_with_parent
from qurl_megatron.quantization.checksum import hash_codes
from qurl_megatron.quantization.quantize import (
    SMALLEST_SCALE,
    code_dtype,
    code_flips,
    quantize,
)
from qurl_megatron.quantization.rounding import round_rows, row_keys

REPETITIONS = 3
LARGEST: dict[WeightFormat, float] = {"int8": 127.0, "fp8": 448.0, "fp8-block": 448.0}
PEER_TIMEOUT_S = 20.0  # for a server in a publish of the check `peer`
ANSWER = "smoke: "  # begins the line on which a check prints what it measured


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--check", choices=CHECKS, help="run one check in this process")
    arguments = parser.parse_args()
    if arguments.check:
        check, _ = CHECKS[arguments.check]
        print(ANSWER + json.dumps(check(arguments)), flush=True)
        return
    results = record.Record("smoke", arguments)
    options = ["--rehearsal"] if arguments.rehearsal else []
    missed = {}
    for name, (_, limit_s) in CHECKS.items():
        if name in results.rows:
            continue
        row = run_check([name, *options], limit_s)
        if row["outcome"] == "passed":
            results.add(name, row)
        else:
            missed[name] = row
            print(f"smoke {name}: {row['outcome']}", *row["output"], sep="\n    ", flush=True)
    failed = [name for name, row in missed.items() if row["outcome"] == "failed"]
    if failed:
        sys.exit(f"smoke: failed: {', '.join(failed)}")
    if not missed:
        results.finish()


def run_check(words: list[str], limit_s: float | None) -> dict[str, Any]:
    """Run a check in a process; return its outcome."""
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
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace").splitlines()[-8:]
        return {"outcome": "failed", "output": [*output, f"not done after {limit_s:g} s"]}
    lines = ran.stdout.splitlines()
    measured = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    time_s = round(time.perf_counter() - start, 1)
    if ran.returncode or not measured:
        return {"outcome": "failed", "output": lines[-8:]}
    row = json.loads(measured[0])
    if "needs" in row:
        return {"outcome": "left out", "output": [f"it needs {row['needs']}"]}
    return {"outcome": "passed", "time_s": time_s, **row}


def check_compile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a server and sample, which compiles its kernels."""
    start = time.perf_counter()
    with tiny_server(start_timeout_s=24 * 3600.0) as (running, architecture):
        start_s = time.perf_counter() - start
        sample(running, architecture)
        return {"start_s": start_s, "with_answers_s": time.perf_counter() - start}


def random_weight(arguments: argparse.Namespace) -> torch.Tensor:
    """Return a weight of the shape of 32B's key projections; a tiny one in a rehearsal."""
    shape = (33, 208) if arguments.rehearsal else (1024, 5120)
    generator = torch.Generator(device=device.device()).manual_seed(0)
    weight = torch.empty(shape, device=device.device()).normal_(std=0.02, generator=generator)
    return weight.bfloat16()


def check_quantize(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the kernels with the CPU, and their time with that of a copy of as many bytes."""
    exact_interpreter.install()
    weight = random_weight(arguments)
    return {
        f"{weight_format}_of_a_copy": compare_kernel(weight, weight_format, largest)
        for weight_format, largest in LARGEST.items()
    }


def compare_kernel(weight: torch.Tensor, weight_format: WeightFormat, largest: float) -> float:
    """Return the kernel's bandwidth over that of a copy, if it computes what the CPU computes."""
    from qurl_megatron.quantization.kernels import quantize_on_gpu

    moved_bytes = weight.nbytes + weight.numel()  # each weight read, each code written
    count = timing.copies_to_rotate(moved_bytes)
    inputs = [weight.clone() for _ in range(count)]
    outputs = [torch.ones_like(weight).to(code_dtype(weight_format)) for _ in inputs]
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8, device=weight.device)
    sources = [source.clone() for _ in inputs]
    targets = [source.clone() for _ in inputs]
    hashes, by_block = hash_codes(outputs[0], 0, 0), weight_format == "fp8-block"

    def run_kernel(turn: int) -> Any:
        place = turn % count
        return quantize_on_gpu(
            inputs[place],
            None,
            outputs[place],
            largest,
            SMALLEST_SCALE,
            by_block=by_block,
            hashes=hashes,
        )

    _, scale, checksum = run_kernel(0)
    on_cpu = quantize(weight.cpu(), weight_format, with_checksum=True)
    if code_flips(outputs[0].cpu(), on_cpu.codes):
        raise AssertionError(f"{weight_format}: codes differ from the CPU's")
    if not torch.equal(scale.cpu(), on_cpu.scale) or int(checksum) != on_cpu.checksum:
        raise AssertionError(f"{weight_format}: scales or checksum differ from the CPU's")
    passes = {
        "kernel": run_kernel,
        "copy": lambda turn: targets[turn % count].copy_(sources[turn % count]),
    }
    times = timing.take_turns(passes, REPETITIONS)
    return times["copy"]["median_s"] / times["kernel"]["median_s"]


def check_round(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare rounding without bias with the CPU, and its time with Adam's step and a copy."""
    weight = random_weight(arguments)
    keys = row_keys("weight", 0, len(weight), weight.device)
    values = 1.001 * weight.float()
    on_cpu = torch.empty(weight.shape, dtype=weight.dtype)
    round_rows(on_cpu, values.cpu(), keys.cpu())
    round_rows(weight, values, keys)
    if not torch.equal(weight.cpu(), on_cpu):
        raise AssertionError("values rounded without bias differ from the CPU's")
    count = timing.copies_to_rotate(values.nbytes + weight.nbytes)
    masters = [torch.nn.Parameter(values.clone()) for _ in range(count)]
    weights = [weight.clone() for _ in masters]
    for master in masters:
        master.grad = torch.ones_like(master)
    adam = [torch.optim.AdamW([master], fused=True) for master in masters]
    sources = [master.detach() for master in masters]
    passes: dict[str, Callable[[int], Any]] = {
        "unbiased": lambda turn: round_rows(weights[turn % count], sources[turn % count], keys),
        "nearest": lambda turn: weights[turn % count].copy_(sources[turn % count]),
        "adam": lambda turn: adam[turn % count].step(),
    }
    times = timing.take_turns(passes, REPETITIONS)
    unbiased_s, nearest_s, adam_s = (times[name]["median_s"] for name in passes)
    return {
        "unbiased_of_nearest": unbiased_s / nearest_s,
        "added_of_optimizer": (unbiased_s - nearest_s) / (adam_s + nearest_s),
    }


def check_products(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the quantized layers with an exact product, over 16 tokens."""
    from qurl_megatron.sglang_plugin.formats import Fp8Config, Int8Config

    weight = random_weight(arguments)
    tokens = torch.randn(16, weight.shape[1], device=weight.device).bfloat16()
    exact = tokens.double() @ weight.double().t()
    errors = {}
    for weight_format, config in (("int8", Int8Config()), ("fp8", Fp8Config())):
        quantized = quantize(weight, weight_format)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(quantized.codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(quantized.scale, requires_grad=False)
        product = config.linear_method(config).apply(layer, tokens)
        errors[weight_format] = float((product - exact).norm() / exact.norm())
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


def check_learner(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of a learner of one rank."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/test_learner.py", "-k", "TP1"]
    ran = subprocess.run(command, capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    if ran.returncode:
        raise AssertionError("\n".join(line for line in lines if line.startswith(("E ", "FAILED"))))
    return {"tests": next(line for line in reversed(lines) if " passed" in line)}


def check_publishes(
    quantization: QuantizationConfig, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Publish twice to a tiny server, with one changed weight in between, and sample."""
    from benchmarks.gpu import policy
    from benchmarks.shards import random_learner
    from qurl_megatron.rollout.fleet import Fleet
    from qurl_megatron.weight_sync.publish import Publisher

    policy.initialize_single_rank()
    with tiny_server() as (running, architecture):
        learner = random_learner(architecture)
        publisher = Publisher(learner, Fleet("rollout", {0: running}), quantization)
        sent = [publisher.publish()]
        sample(running, architecture)
        next(shard for rule, _, shard in learner.shards() if rule.quantized)[0].neg_()
        sent.append(publisher.publish())
        publisher.close()
        sample(running, architecture)
    sizes = [each.sent_bytes for each in sent]
    if [each.num_servers for each in sent] != [1, 1]:
        raise AssertionError("the server does not hold what was sent")
    if quantization.publish == "delta" and sizes[1] > sizes[0] / 2:
        raise AssertionError(f"a delta of one changed weight has {sizes[1]} of {sizes[0]} bytes")
    return {"sent_bytes": sizes[0], "sent_again_bytes": sizes[1]}


def check_peer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lose a server on a second GPU in the middle of a publish, to death and to a hang."""
    from benchmarks.gpu import policy
    from benchmarks.shards import random_learner
    from qurl_megatron.rollout.fleet import Fleet
    from qurl_megatron.weight_sync.publish import Publisher

    if device.num_gpus() == 1:
        return {"needs": "two GPUs"}
    policy.initialize_single_rank()
    times: dict[str, Any] = {"backend": device.backend_to([1])}
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        with tiny_server(gpus=[1] if device.num_gpus() else None) as (running, architecture):
            learner = random_learner(architecture)
            fleet = Fleet("rollout", {0: replace(running, timeout_s=PEER_TIMEOUT_S)})
            publisher = Publisher(learner, fleet, QuantizationConfig("int8"))
            if publisher.publish().num_servers != 1:
                raise AssertionError("the server does not hold what was sent")
            fail_in_the_next_publish(publisher, running.pid, number)
            start = time.perf_counter()
            reached = publisher.publish().num_servers
            times[f"{name}_s"] = time.perf_counter() - start
            publisher.close()
            if reached or fleet.members("serving", "joining"):
                raise AssertionError(f"a server that was {name} is not lost")
        ones = torch.ones(1024, device=device.device())
        torch.distributed.all_reduce(ones)
        if float(ones.sum()) != 1024:
            raise AssertionError(f"the learner cannot compute after a server was {name}")
    return times


def fail_in_the_next_publish(publisher: Any, pid: int, number: int) -> None:
    """Send a signal to a server's processes once it waits for weights, before any is sent."""
    convert = publisher.converter.convert
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def fail_and_convert(*arguments: Any, **named: Any) -> Any:
        time.sleep(1.0)  # until the server waits
        for process in processes:
            process.send_signal(number)
        return convert(*arguments, **named)

    publisher.converter.convert = fail_and_convert


def check_demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the quickstart for two steps."""
    with tempfile.TemporaryDirectory() as directory:
        words = [f"output_dir={directory}", "name=smoke", "steps=2"]
        ran = subprocess.run(
            [*QURL, "train", "quickstart", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )
        if ran.returncode:
            raise AssertionError(ran.stdout[-2000:])
        metrics = Path(directory) / "smoke" / "metrics.jsonl"
        return {"steps": len(metrics.read_text().splitlines())}


@contextmanager
def tiny_server(gpus: list[int] | None = None, **fields: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a tiny INT8 server and its architecture."""
    # Here, because importing Megatron takes most of the time that the other checks have.
    from benchmarks.gpu import policy

    server = ServerConfig(
        mem_fraction_static=0.2, max_total_tokens=8192, max_running_requests=8, **fields
    )
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with policy.run_server("tiny", "int8", server, 64, log, gpus) as running_and_architecture:
            yield running_and_architecture


def sample(running: Any, architecture: Any) -> None:
    from benchmarks.gpu import policy

    policy.sample(running, 4, 16, 16, architecture.vocab_size)


CHECKS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], float | None]] = {
    "quantize": (check_quantize, 60.0),
    "round": (check_round, 60.0),
    "products": (check_products, 90.0),
    "rank": (check_rank, 60.0),
    "learner": (check_learner, 300.0),
    "compile": (check_compile, None),
    "server": (partial(check_publishes, QuantizationConfig("int8")), 300.0),
    "direct": (partial(check_publishes, QuantizationConfig("int8", transport="direct")), 300.0),
    "delta": (partial(check_publishes, QuantizationConfig("int8", publish="delta")), 300.0),
    "peer": (check_peer, 600.0),
    "demo": (check_demo, 1200.0),
}
"""Each check, and the seconds that it may take."""


if __name__ == "__main__":
    main()
