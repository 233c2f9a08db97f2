"""Programs as forks of a process that has imported what commands, servers and ranks need.

A fork is otherwise what the program is: a process of its own, with the same processes below it.
"""

import os
import signal
import sys
from multiprocessing.connection import Pipe

import forks
from qurl_megatron.machine.processes import die_with_parent, ending_signals
from qurl_megatron.rollout import preload
from qurl_megatron.rollout.preload import Program, Started


def begin() -> None:
    """Start the process that programs are forks of."""
    forks.begin("e2e.preloaded", SGLANG_PLATFORM=preload.PLATFORM, **preload.ENVIRONMENT)


def start(program: Program) -> Started:
    """Start a program as a fork of that process, in place of `preload.start`."""
    program.log_file.write_bytes(b"")
    process = forks.CONTEXT.Process(target=run, args=(program, dict(os.environ)))
    process.start()
    assert process.pid is not None
    started = Started(process.pid, lambda: process.exitcode)
    preload._started[started.pid] = started
    return started


def run(program: Program, environment: dict[str, str]) -> None:
    """Be a program in a fresh fork, with its starter's environment."""
    os.environ.update(environment)
    preload.run_in_fork(program, os.getppid())


def main(directory: str, *words: str) -> None:
    """Run `qurl` with these words in a directory; the process ends with the command's code.

    A fork of this process runs the command. If the command turns its process into a launcher, this
    one does so instead: it has no threads, and has done the launcher's imports.
    """
    from qurl_megatron import cli
    from qurl_megatron.launch import local

    os.chdir(directory)
    preload._has_preloaded = True
    ours, theirs = Pipe()
    command = os.fork()
    if command == 0:
        die_with_parent()

        def become_launcher(_: str, words: list[str], environment: dict[str, str]) -> None:
            theirs.send((words, environment))
            os._exit(0)

        os.execve = become_launcher  # type: ignore
        sys.argv = ["qurl", *words]
        cli.main()
        sys.exit()
    theirs.close()
    for number in ending_signals() | {signal.SIGUSR1}:
        signal.signal(number, lambda number, _: os.kill(command, number))
    try:
        launcher, environment = ours.recv()
    except EOFError:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]))
    os.waitpid(command, 0)
    os.environ.update(environment)
    local.main(launcher[-1])
