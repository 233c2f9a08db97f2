"""Play ranks, each in a process of its own: `python -m qurl_megatron.extensions.rehearsal.worker`.

stdin is a pickled list of `Rehearsal`s. Each line of stdout is JSON, what `play` returns for a
rank. The fake GPU is installed once, and every rank is a fork of that process.
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

from qurl_megatron.config.gpus import GIB
from qurl_megatron.device import machine_memory_bytes
from qurl_megatron.extensions.rehearsal import fake_gpu, linear_attention, transformer_engine
from qurl_megatron.extensions.rehearsal.rehearsal import Rehearsal

RANK_BYTES = 4 * GIB  # of the host's memory, for a rank of a 32B model


def main() -> None:
    """Play the ranks of the rehearsals on stdin."""
    rehearsals: list[Rehearsal] = pickle.load(sys.stdin.buffer)
    warnings.simplefilter("ignore")
    fake_gpu.install(rehearsals[0].node)
    linear_attention.install()
    if rehearsals[0].transformer_engine:
        transformer_engine.install(rehearsals[0].transformer_engine)
    from qurl_megatron.extensions.rehearsal import play  # Megatron, and all that imports it

    processes = multiprocessing.get_context("fork")

    def play_and_send(sender: Connection, rehearsal: Rehearsal, rank: int) -> None:
        sys.stdout = sys.stderr  # Megatron prints, and the worker's stdout is for results
        played = play.play(rehearsal, rank)
        host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sender.send(played | {"cpu_s": time.process_time(), "host_bytes": host_bytes})

    def in_own_process(rehearsal: Rehearsal, rank: int) -> dict[str, Any]:
        receiver, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=play_and_send, args=(sender, rehearsal, rank))
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
    jobs = [(each, rank) for each in rehearsals for rank in each.ranks]
    with ThreadPoolExecutor(workers) as pool:
        for played in pool.map(in_own_process, *zip(*jobs, strict=True)):
            print(json.dumps(played), flush=True)


if __name__ == "__main__":
    main()
