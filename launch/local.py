"""Start a run on this machine, and leave no process behind: a plan of one node.

The launcher owns every process of the run, as that node's supervisor (`launch/supervisor.py`). It
ends them all when the learner is done, when a rank dies, on Ctrl-C, on SIGTERM, and when its
terminal closes. If the launcher itself is killed, the kernel ends them.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from qurl_megatron import device
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import load
from qurl_megatron.launch.bad_input import exit_on_bad_input
from qurl_megatron.launch.owner import claim, how_to_resume
from qurl_megatron.launch.placement import plan_here
from qurl_megatron.launch.servers import Attempt, claimed_servers
from qurl_megatron.launch.supervisor import Signals, supervise
from qurl_megatron.machine.environment import NO_THREADS
from qurl_megatron.machine.output import outlive_output
from qurl_megatron.machine.processes import ending_signals
from qurl_megatron.rollout.preload import PreloadFailed
from qurl_megatron.rollout.server import ServerFailed


def run(config: Config) -> NoReturn:
    """Turn this process into the launcher of `config`, whose directory holds its config.yaml.

    The launcher is a fresh program, without the threads that the run's preparation started: forks
    would lose them. Signals wait until it handles them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals() | {signal.SIGUSR1})
    os.execve(sys.executable, command(config.run_dir), environment())


def command(run_dir: Path) -> list[str]:
    """Return the command of a run's launcher."""
    return [sys.executable, "-m", __name__, str(run_dir)]


def environment() -> dict[str, str]:
    """Return the launcher's environment variables."""
    return {**os.environ, **({} if device.num_gpus() else NO_THREADS)}


def main(run_dir: str) -> None:
    """Launch a run: `python -m qurl_megatron.launch.local RUN_DIR`."""
    outlive_output(Path(run_dir))
    sys.exit(launch(load(Path(run_dir) / "config.yaml")))


def launch(config: Config) -> int:
    """Launch `config` and return an exit code once its run has ended.

    The code is 0 when the run is complete, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP,
    and 75 when SIGUSR1 asked it to stop early, or too few servers are left: it has then saved a
    checkpoint, or not started yet. It is 1 when a learner rank died or a server did not start; the
    last lines of its log are then printed. It is 2, and nothing is started, when another launcher
    owns the run. Whatever ended a run that is not complete, the last line says how to resume it.
    """
    with exit_on_bad_input():
        owner = claim(config.run_dir)
    code = 1
    with owner:
        try:
            with exit_on_bad_input():  # such as a disk that is full
                code = _launch(config)
        finally:
            if code:
                print(how_to_resume(config.run_dir), file=sys.stderr, flush=True)
    return code


def _launch(config: Config) -> int:
    signals = Signals(ending_signals(), {signal.SIGUSR1})
    print(f"run directory {config.run_dir}", flush=True)
    with claimed_servers(config):
        attempt = Attempt.create(config)
        plan = plan_here(config, device.num_gpus(), attempt.number)
        try:
            return supervise(attempt, plan, plan.nodes[0], signals)
        except (PreloadFailed, ServerFailed) as failure:
            print(f"\nqurl: {failure}", file=sys.stderr, flush=True)
            return 1


if __name__ == "__main__":
    main(sys.argv[1])
