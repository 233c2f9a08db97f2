"""The sandbox of the recipe `math_tools`: what a policy's program can do, and what it cannot."""

import asyncio
import time
from pathlib import Path

import pytest

from qurl_megatron.recipes import math_tools


def run(code: str) -> str:
    return asyncio.run(math_tools.python(code))


def test_a_program_prints_and_what_it_raises_is_shown() -> None:
    assert run("print(6 * 7)") == "42\n"
    assert run("print('a')\n1 / 0").endswith("ZeroDivisionError: division by zero\n")
    assert run("print('a' * 10**6)") == "a" * math_tools.SHOWN_CHARACTERS
    assert run("while True: print('a' * 1000)").startswith("aaa")  # until its file is full


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "Network is unreachable"),
        ("bytearray(2**31)", "MemoryError"),
        ("open('a', 'wb').write(bytes(2**21))", "File too large"),
        ("input()", "EOFError"),
        ("import os; print(os.environ['HOME'])", "KeyError"),
        ("import os; print(os.listdir('.'))", "[]"),
    ],
)
def test_it_has_no_network_little_memory_and_no_files(code: str, error: str) -> None:
    assert error in run(code)


def test_its_time_is_limited_and_what_it_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_tools, "TIME_S", 1)
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'w').write('a'); time.sleep(0.02)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert run(f"{code}; print(1); time.sleep(3600)") == "1\ntook longer than 1 seconds\n"
    alive.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not alive.exists()
