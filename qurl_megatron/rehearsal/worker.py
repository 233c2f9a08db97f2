"""Play ranks, each in a process of its own: `python -m qurl_megatron.rehearsal.worker`.

stdin is a pickled `Rehearsal`. Each line of stdout is JSON, what `play` returns for a rank. The
fake GPU is installed once, and every rank is a fork of that process.
"""

import json
import multiprocessing
import os
import pickle
import resource
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from qurl_megatron.device import machine_memory_bytes
from qurl_megatron.planning.gpus import GIB
from qurl_megatron.rehearsal import fake_gpu, transformer_engine
from qurl_megatron.rehearsal.rehearsal import Rehearsal

RANK_BYTES = 4 * GIB  # of the host's memory, for a rank of a 32B model


def main() -> None:
    """Play the ranks of the rehearsal on stdin."""
    rehearsal: Rehearsal = pickle.load(sys.stdin.buffer)
    warnings.simplefilter("ignore")
    fake_gpu.install(rehearsal.node)
    if rehearsal.transformer_engine:
        transformer_engine.install(rehearsal.transformer_engine)
    from qurl_megatron.rehearsal import play  # Megatron, and all that imports it

    processes = multiprocessing.get_context("fork")

    def play_and_send(sender: Connection, rank: int) -> None:
        sys.stdout = sys.stderr  # of Megatron's messages
        start = time.monotonic()
        played = play.play(rehearsal, rank)
        host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sender.send(played | {"seconds": time.monotonic() - start, "host_bytes": host_bytes})

    def in_own_process(rank: int) -> dict[str, Any]:
        receiver, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=play_and_send, args=(sender, rank))
        process.start()
        sender.close()
        try:
            played: dict[str, Any] = receiver.recv()
        except EOFError:
            process.join()
            error = f"its process ended with {process.exitcode}"
            played = {"rank": rank, "phases": {}, "error": error}
        process.join()
        return played

    workers = max(1, min(os.cpu_count() or 1, machine_memory_bytes() // RANK_BYTES))
    with ThreadPoolExecutor(workers) as pool:
        for played in pool.map(in_own_process, rehearsal.ranks):
            print(json.dumps(played), flush=True)


if __name__ == "__main__":
    main()
