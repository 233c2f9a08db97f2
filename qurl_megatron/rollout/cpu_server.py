"""Run an SGLang server without a GPU: its three processes are forks, which share their imports.

`python -m qurl_megatron.rollout.cpu_server THREADS OPTION...` does what `sglang.launch_server` does
with these options.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys

PLATFORM = "qurl_cpu"  # an entry point in pyproject.toml


def import_sglang() -> None:
    """Load this package's plugin, then import the modules that a server's three processes use."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # first: it replaces functions that other modules import by name
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def main(threads: str, *options: str) -> None:
    """Run a server with options of `sglang.launch_server` until it is killed.

    `threads` is the number of CPU threads of each of its ranks. OMP_NUM_THREADS cannot set it,
    because OpenMP has read that variable before the fork.
    """
    import_sglang()
    gc.freeze()  # a collection would write to, and so copy, every page that its processes share
    import torch
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    torch.set_num_threads(int(threads))
    original = engine._set_envs_and_config

    def fork_after(server_args: object) -> None:
        original(server_args)  # asks multiprocessing to spawn
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = fork_after
    try:
        run_server(prepare_server_args(list(options)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
