"""Ports, ends of logs and the identity of processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from qurl_megatron.process import LOG_LINE_LENGTH, PORTS, free_port, start_ticks, tail


def test_start_ticks_tell_a_process_from_a_later_one_and_from_a_dead_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    own = start_ticks(os.getpid())
    assert ticks is not None and own is not None and ticks > own
    seconds = ticks / os.sysconf("SC_CLK_TCK") + psutil.boot_time()
    assert abs(seconds - psutil.Process(process.pid).create_time()) < 1
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert start_ticks(process.pid) is None
    process.communicate()
    assert start_ticks(process.pid) is None


def test_a_free_port_is_below_the_ephemeral_ports_and_can_be_bound() -> None:
    port = free_port()
    assert port in PORTS
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()


def test_the_end_of_a_log_is_short_and_keeps_undecodable_bytes_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 9999 + b"\n\xff last\n")
    assert tail(log, 2).splitlines() == ["x" * LOG_LINE_LENGTH, "\N{REPLACEMENT CHARACTER} last"]
