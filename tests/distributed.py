"""Run a function on several ranks, each in its own process.

The ranks communicate over gloo, or over NCCL with one GPU each on a machine with GPUs.
"""

import gc
import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

import forks
from qurl_megatron.machine.network import free_port

# What tests import in ranks. It takes seconds, SGLang's receiver of weights most of them; the fork
# server does it once for all ranks. It does not find the modules beside this one.
PRELOADED = [
    "pytest",
    "qurl_megatron.cli",
    "qurl_megatron.learner.checkpoint",
    "qurl_megatron.weight_sync.export",
    "qurl_megatron.weight_sync.publish",
    "qurl_megatron.sglang_plugin.weights",
]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `function(*args)` in `world_size` new processes; return their results in rank order.

    The ranks find each other through torchrun's variables. `function`, its arguments and its
    results are pickled; tensors come back on the CPU. No process outlives the call. If the machine
    has GPUs, but fewer than `world_size`, the test is skipped.

    Raises:
        RuntimeError: a rank failed; with the traceback of the first one.
        TimeoutError: a rank took longer than `timeout_s`.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        pytest.skip(f"{world_size} ranks need {world_size} GPUs: NCCL refuses two ranks on one")
    context = rank_context()
    port = free_port()
    receivers, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        process = context.Process(target=_run, args=(sender, environment, function, args))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, time.monotonic() + timeout_s, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_context() -> Any:
    """Return how ranks are started: forked from a server with the imports, unless there are GPUs.

    The imports ask whether there is a GPU. CUDA refuses to work in forks of a process that asked.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    forks.CONTEXT.set_forkserver_preload(PRELOADED)
    return forks.CONTEXT


def _collect(receivers: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = [rank for rank in range(len(receivers)) if rank not in results]
        ready = wait([receivers[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {pending} did not finish within {timeout_s} s")
        for rank in pending:
            if receivers[rank] not in ready:
                continue
            try:
                message = io.BytesIO(receivers[rank].recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a result") from None
            failed, results[rank] = torch.load(message, map_location="cpu", weights_only=False)
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{results[rank]}")
    return [results[rank] for rank in range(len(receivers))]


def _run(
    sender: Connection, environment: dict[str, str], function: Callable[..., Any], args: Any
) -> None:
    gc.freeze()  # a collection would write to, and so copy, every page of the fork server
    os.environ.update(environment)
    message = io.BytesIO()
    try:
        torch.set_num_threads(1)
        torch.save((False, function(*args)), message)
    except BaseException:
        message = io.BytesIO()
        torch.save((True, traceback.format_exc()), message)
    sender.send_bytes(message.getbuffer())
