"""Rosters: the files in which the starters of servers and the learner tell each other about them.

The process that starts servers writes them to its roster, and writes the roster again whenever it
has replaced a server that died. The learner reads the rosters of all starters. So:
- A server in a roster runs, or its successor will take its place in the roster.
- A server that will not be started again is no longer in the roster.

A learner that finds a server hung reports it lost. Its starter then kills that process and starts
another. All files are written atomically, and readers poll them.

Servers that somebody started elsewhere are in a roster too. The launcher writes it once.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from qurl_megatron.files import write_whole
from qurl_megatron.rollout.server import Server

Roster = dict[str, dict[int, Server]]
"""Servers by set name ("rollout" or "evaluation") and index within the set."""

Incarnation = tuple[str, int, int, int | None]
"""One process of a server: set name, index, process id, start of the process in ticks."""

SERVERS_AT = "servers_at.json"  # in a run's directory: the servers of `rollout.servers_at`
LOST = "lost"  # directory of reports, beside the logs


def incarnation(set_name: str, index: int, server: Server) -> Incarnation:
    """Return what distinguishes a server's process from an earlier one in its place."""
    return set_name, index, server.pid, server.start_ticks


def save_roster(path: Path, servers: Roster) -> None:
    """Write the servers of one starter to a file with keys, which only this user may read."""
    tree = {
        name: {index: dataclasses.asdict(server) for index, server in members.items()}
        for name, members in servers.items()
    }
    write_whole(path, json.dumps(tree, indent=2) + "\n", private=True)


def read_roster(path: Path) -> Roster:
    """Read what `save_roster` wrote.

    Raises:
        FileNotFoundError: the starter has not written its servers yet.
    """
    tree = json.loads(path.read_text())
    return {
        name: {int(index): Server(**fields) for index, fields in members.items()}
        for name, members in tree.items()
    }


def read_set(paths: Iterable[Path], set_name: str) -> dict[int, Server]:
    """Return the servers of one set, by index, from the rosters that have been written."""
    servers: dict[int, Server] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            servers |= read_roster(path).get(set_name, {})
    return servers


def report_lost(logs: Path, set_name: str, index: int, server: Server) -> None:
    """Ask the starter that logs to the directory `logs` to replace this process of a server."""
    reports = logs / LOST
    reports.mkdir(exist_ok=True)
    name = "_".join(str(part) for part in incarnation(set_name, index, server))
    (reports / name).touch()


def reported_lost(logs: Path) -> set[Incarnation]:
    """Return every server process that was reported lost to starters that log to `logs`."""
    reports = logs / LOST
    if not reports.exists():
        return set()
    lost: set[Incarnation] = set()
    for report in reports.iterdir():
        set_name, index, pid, ticks = report.name.split("_")
        lost.add((set_name, int(index), int(pid), None if ticks == "None" else int(ticks)))
    return lost
