"""Servers give their memory back while they sleep, and answer as before once they are awake."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from e2e.running import PER_STEP, QUICK, Command, Start, metrics_of, prompts_trained
from e2e.serving import Deployment, held_checksums, joined, launched
from qurl_megatron.machine.processes import GpuLock
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.rollout.server import RELEASED, Server

MIB = 2**20
CYCLES = 100
# 37 MiB of weights in INT8. Some 3 MiB of a scheduler come and go with what it does.
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 12288, "num_key_value_heads": 2}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU's memory is torch_memory_saver's: benchmarks/gpu"
)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("sleep")
    with launched(directory, "int8", **LARGE) as server, joined(*server, "int8") as deployment:
        yield deployment


def scheduler_of(server: Server) -> psutil.Process:
    """Return the process of a server that has its model."""
    (scheduler,) = (
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    )
    return scheduler


def resident_bytes(server: Server) -> int:
    return int(scheduler_of(server).memory_info().rss)


def test_a_sleeping_server_gives_its_memory_back_by_tag_and_its_core(
    deployment: Deployment,
) -> None:
    server = deployment.server
    weights = deployment.weights[0]
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert weight_bytes > 30 * MIB
    deployment.sender.send(weights)
    before = deployment.greedy()
    asyncio.run(server.sleep(RELEASED["cache"]))
    asleep = resident_bytes(server)
    assert held_checksums(deployment) == {name: checksum(held) for name, held in weights.items()}
    asyncio.run(server.sleep(["weights"]))
    without_weights = resident_bytes(server)
    print(f"asleep {asleep / MIB:.1f} MiB, without weights {without_weights / MIB:.1f}")
    assert asleep - without_weights > 0.8 * weight_bytes
    before_rest = scheduler_of(server).cpu_times()
    time.sleep(1.0)
    assert sum(scheduler_of(server).cpu_times()[:2]) - sum(before_rest[:2]) < 0.1
    asyncio.run(server.wake(RELEASED["all"]))
    assert held_checksums(deployment) != {name: checksum(held) for name, held in weights.items()}
    deployment.sender.send(weights)  # resumes
    assert deployment.greedy()[:2] == before[:2]
    assert resident_bytes(server) - without_weights > 0.8 * weight_bytes


def test_a_hundred_cycles_leave_memory_flat(deployment: Deployment) -> None:
    server, sender = deployment.server, deployment.sender
    resident = []
    for cycle in range(CYCLES):
        asyncio.run(sender.server.sleep(RELEASED["all"]))
        asyncio.run(sender.server.wake(RELEASED["all"]))
        sender.send(deployment.weights[cycle % 2])
        resident.append(resident_bytes(server))
    first, last = resident[CYCLES // 10 : CYCLES // 2], resident[CYCLES // 2 :]
    growth = sorted(last)[len(last) // 2] - sorted(first)[len(first) // 2]
    print(f"{growth / MIB:.2f} MiB more in the second half of {CYCLES} cycles")
    assert growth < MIB


def test_a_request_that_waits_through_a_sleep_is_answered(deployment: Deployment) -> None:
    """A turn of an agent that was given up goes on in the server, and must not keep it awake."""
    from concurrent.futures import ThreadPoolExecutor

    sender = deployment.sender
    sender.send(deployment.weights[0])
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(
            deployment.ask, [5, 6, 7], temperature=0, max_new_tokens=60, ignore_eos=True
        )
        time.sleep(0.5)  # it has some of its tokens
        asyncio.run(sender.server.sleep(RELEASED["cache"]))
        asyncio.run(sender.server.wake(RELEASED["cache"]))
        asyncio.run(sender.server.resume())
        assert len(asking.result()[0]) == 60


def await_learners_turn(run: Command) -> None:
    """Return at the beginning of a turn of the learner, in which all servers sleep."""
    lock = GpuLock(run.run_dir / "logs")
    was_servers = False
    while not was_servers or is_free(lock):
        was_servers |= is_free(lock)
        assert run.poll() is None, run.text()
        time.sleep(0.02)


def is_free(lock: GpuLock) -> bool:
    taken = lock.try_to_take()
    lock.release()
    return taken


def test_a_run_whose_servers_share_its_gpus_goes_on_without_them_and_resumes(
    start: Start,
) -> None:
    num_steps = 6
    words = [f"steps={num_steps}", "rollout.placement=colocated", "rollout.server.releases=all"]
    words += ["evaluation.problems=16", "evaluation.every_steps=3", "checkpoint.every_steps=1"]
    run = start("train", *QUICK, *words)
    run.wait_for("step 1/")
    await_learners_turn(run)
    for name in ("rollout", "evaluation"):
        os.kill(run.server_pid(name, 0), signal.SIGKILL)
    run.wait_for("(?s)server rollout_0 serves.*server rollout_0 serves")  # and samples
    os.kill(run.server_pid("rollout", 0), signal.SIGKILL)
    run.wait_for("(?s)(server rollout_0 serves.*){3}")
    await_learners_turn(run)
    run.first_rank().kill()  # the servers sleep
    assert run.exit_code() == 1 and run.survivors() == [], run.text()

    run = start("resume", "runs/run")
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    assert [step["weight_version"] for step in steps] == list(range(2, num_steps + 2))
    assert max(step["token_staleness_max"] for step in steps) == 0
    assert prompts_trained(run) == num_steps * PER_STEP
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert 0 <= summary["held_out_accuracy_after"] <= 1
