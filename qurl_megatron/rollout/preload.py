"""Start programs in processes of their own: fresh ones, or forks of this one.

Importing SGLang takes more than 10 CPU-seconds, and a server without a GPU is three processes. So a
launcher imports it once, and starts forks of itself, which begin at once. In all else a fork is
like a fresh process: it has its own session, environment, log file and exit code, and the kernel
kills it with its parent. The three processes of a server without a GPU (`main`) are forks too.

A fork copies the calling thread only, so a process with several threads starts fresh ones. On a
machine with a GPU nothing is forked: a CUDA context does not survive a fork.
"""

import asyncio
import atexit
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

from setproctitle import setproctitle

from qurl_megatron import device
from qurl_megatron.machine.imports import without
from qurl_megatron.machine.memory import oom_kills
from qurl_megatron.machine.output import gigabytes, tail
from qurl_megatron.machine.processes import die_with_parent

# Prefixes of variables that change what a server computes, or what it says about that.
ENGINE_VARIABLES = ("SGLANG_", "SGL_", "TORCH", "ONEDNN", "DNNL_")
SET_BY_LIBRARIES = "TORCHINDUCTOR_CACHE_DIR"  # by themselves; it changes no result
PLATFORM = "qurl_cpu"  # SGLang's without a GPU; an entry point in pyproject.toml
# SGLang reads it when it is imported. Who asks /health says how long to wait for the answer; by
# default a server that computes for 20 s would answer then that it is not healthy.
ENVIRONMENT = {"SGLANG_HEALTH_CHECK_TIMEOUT": "86400"}


class PreloadFailed(RuntimeError):
    """A module that programs share could not be imported; the text ends with the end of the log."""


@dataclass(frozen=True)
class Program:
    """A module that runs in a process of its own, as `python -m MODULE ARGUMENTS`.

    A fork calls the module's function `main` with the arguments instead.
    """

    module: str
    arguments: Sequence[str]
    title: str  # of a fork, shown by ps
    log_file: Path  # receives standard error, and standard output unless it is inherited
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the starter's
    without: Collection[str] = ()  # variables of the starter that it does not get
    is_fresh: bool = False  # no fork: an import may have read the starter's variables
    inherits_stdout: bool = False
    cpus: Collection[int] = ()  # that it may use; empty: those of the starter
    ignored_signals: Collection[int] = ()
    blocked_signals: Collection[int] = ()

    def begin(self) -> None:
        """Set up the process before the program runs in it."""
        die_with_parent()
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        for number in self.ignored_signals:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)


@dataclass(frozen=True)
class Started:
    """A process that `start` has started."""

    pid: int
    poll: Callable[[], int | None]
    """Return the exit code, negative for a signal, or None while the process runs."""
    oom_kills: int | None = field(default_factory=oom_kills)  # when it started

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


_has_preloaded = False  # programs are forks of this process
_started: dict[int, Started] = {}  # by process id


def start(program: Program) -> Started:
    """Start a program, which dies with this process."""
    with program.log_file.open("wb") as log:
        can_fork = _has_preloaded and not program.is_fresh
        if can_fork and len(os.listdir("/proc/self/task")) == 1:
            fork = multiprocessing.get_context("fork").Process(
                target=run_in_fork, args=(program, os.getpid())
            )
            fork.start()
            assert fork.pid is not None
            started = Started(fork.pid, lambda: fork.exitcode)
        else:
            fresh = subprocess.Popen(
                [sys.executable, "-m", program.module, *program.arguments],
                env=device.child_environment(program.environment, program.without),
                stdin=subprocess.DEVNULL,
                stdout=None if program.inherits_stdout else log,
                stderr=log,
                start_new_session=True,  # only the starter handles Ctrl-C
                preexec_fn=program.begin,
            )
            started = Started(fresh.pid, fresh.poll)
    _started[started.pid] = started
    return started


def exit_code(pid: int) -> int | None:
    """Return the exit code of an ended program that this process has started.

    Its last thread may end a moment after its main thread, so this waits. Return None if the
    program has not ended after a second.
    """
    deadline = time.monotonic() + 1.0
    while (code := _started[pid].poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return code


def how_it_ended(pid: int) -> str:
    """Describe how a program of this process ended, and whether memory ran out.

    When the kernel kills one of a server's processes, the others end too.
    """
    if pid not in _started or (code := exit_code(pid)) is None:
        return "exit code unknown"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    before, now = _started[pid].oom_kills, oom_kills()
    ran_out = code == -signal.SIGKILL if before is None or now is None else now > before
    if not ran_out:
        return how
    limit = gigabytes(device.machine_memory_bytes())
    return f"{how}; most likely memory ran out, and the kernel killed it: the limit here is {limit}"


def import_sglang() -> None:
    """Load this package's plugin, then import the modules that a server's three processes use."""
    # SGLang imports these where they are installed, wandb by way of Megatron. Without a GPU nothing
    # uses them, and they would take a quarter of the time.
    with without("flashinfer", "wandb"):
        from sglang.srt.plugins import load_plugins

        load_plugins()  # first: it replaces functions that other modules import by name
        import sglang.srt.entrypoints.http_server
        import sglang.srt.managers.detokenizer_manager
        import sglang.srt.managers.scheduler
        import sglang.srt.models.registry  # noqa: F401


def shell_variables() -> set[str]:
    """Return the names of the user's variables that begin with one of `ENGINE_VARIABLES`."""
    return device.variables(ENGINE_VARIABLES) - {SET_BY_LIBRARIES}


def preload(log_file: Path, *modules: str) -> None:
    """Import SGLang and modules, so that later programs are forks of this process; not on a GPU.

    The standard error of the imports goes to the log.

    Raises:
        PreloadFailed: an import failed.
    """
    global _has_preloaded
    if device.accelerator() == "cuda":
        return
    device.extend_environment({"SGLANG_PLATFORM": PLATFORM, **ENVIRONMENT})
    standard_error = os.dup(2)
    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        import_sglang()
        for module in modules:
            import_module(module)
    except Exception:
        traceback.print_exc()
        raise PreloadFailed(f"an import failed; {log_file} ends:\n{tail(log_file)}") from None
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    # SGLang's import chooses uvloop, whose first event loop leaves threads, and a process with
    # threads starts no forks. So only the forks use it.
    chosen = asyncio.get_event_loop_policy()
    os.register_at_fork(after_in_child=partial(asyncio.set_event_loop_policy, chosen))
    asyncio.set_event_loop_policy(None)
    gc.freeze()  # a collection would write to, and so copy, every page that forks share
    _has_preloaded = True


def run_in_fork(program: Program, parent: int) -> None:
    """Run a program in this process, which is a fresh fork of process `parent`."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # a handler of the starter's
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a fresh Python
    program.begin()
    if os.getppid() != parent:  # the parent died before `begin`
        os._exit(1)
    with open(os.devnull) as nothing, program.log_file.open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 2)
        if not program.inherits_stdout:
            os.dup2(log.fileno(), 1)
    setproctitle(program.title)  # before the environment changes, which it needs to find its place
    device.extend_environment(program.environment, program.without)
    tempfile.tempdir = None  # TMPDIR may have changed
    # What imports made before the fork is the starter's to delete: W&B's temporary directories.
    for inherited in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        owner, *_ = inherited.detach() or (None,)
        if isinstance(owner, tempfile.TemporaryDirectory):
            atexit.unregister(owner.cleanup)
    sys.argv = [program.module, *program.arguments]
    try:
        import_module(program.module).main(*program.arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a fork without running them


def main(threads: str, *options: str) -> None:
    """Run an SGLang server without a GPU until it is killed: `sglang.launch_server` in forks.

    `python -m qurl_megatron.rollout.preload THREADS OPTION...` calls this. `threads` is the number
    of CPU threads of each of the server's ranks. OMP_NUM_THREADS cannot set it, because OpenMP has
    read that variable before the fork. The options are those of `sglang.launch_server`.
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
