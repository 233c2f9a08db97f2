"""Rosters: what starters of servers and the learner read of each other's files."""

import dataclasses
import stat
from pathlib import Path

from qurl_megatron.rollout.roster import (
    incarnation,
    read_roster,
    report_lost,
    reported_lost,
    save_roster,
)
from qurl_megatron.rollout.server import Server


def server(pid: int = 7, start_ticks: int | None = 100) -> Server:
    return Server(
        url="http://127.0.0.1:1",
        machine="here",
        pid=pid,
        start_ticks=start_ticks,
        tensor_parallel_size=1,
        gpus=[2],
        log_file="server.log",
        scratch_dir="/nowhere",
        api_key="secret",
    )


def test_a_roster_is_private_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    servers = {"rollout": {0: server(1), 2: server(2)}, "evaluation": {0: server(3)}}
    save_roster(path, servers)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it has keys
    assert read_roster(path) == servers
    save_roster(path, {"rollout": {2: server(4)}})
    assert read_roster(path) == {"rollout": {2: server(4)}}
    assert [file.name for file in tmp_path.iterdir()] == ["servers.json"]


def test_a_report_names_one_process_of_one_server(tmp_path: Path) -> None:
    assert reported_lost(tmp_path) == set()
    report_lost(tmp_path, "rollout", 1, server(7))
    report_lost(tmp_path, "rollout", 1, server(7))
    dead = server(8, start_ticks=None)  # it ended before its start was read
    report_lost(tmp_path, "evaluation", 0, dead)
    assert reported_lost(tmp_path) == {
        incarnation("rollout", 1, server(7)),
        incarnation("evaluation", 0, dead),
    }
    reused_pid = dataclasses.replace(server(7), start_ticks=101)
    assert incarnation("rollout", 1, reused_pid) not in reported_lost(tmp_path)
