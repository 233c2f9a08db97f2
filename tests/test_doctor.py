"""`qurl doctor`: each check on a machine that passes and one that fails, and the printed page."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from qurl_megatron.commands import doctor
from qurl_megatron.config.schema import WeightFormat

QURL = Path(sys.executable).with_name("qurl")
GIB = 2**30

Replace = Callable[..., None]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Return a function that has `owner.name` return a value."""

    def replace(owner: Any, name: str, value: object) -> None:
        monkeypatch.setattr(owner, name, lambda *_, **__: value)

    return replace


def only(check: Callable[[], doctor.Findings]) -> tuple[str, str]:
    """Return the one finding of a check."""
    (finding,) = check()
    return finding


def gpu(major: int, minor: int, name: str = "NVIDIA H100") -> Any:
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * GIB)


def test_packages_are_those_that_the_distribution_requires_as_it_pins_them(
    replace: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": "2.11.0+cu130", "a-b": "1.0", "httpx": "0.1", "numpy": "2.3"}

    def version(name: str) -> str:
        if name == "broken":
            raise KeyError("Version")
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    required = ["torch==2.11.0", "a-b[c,d]==1.0", "httpx", "numpy>=2", 'wandb; extra == "wandb"']
    replace(importlib.metadata, "requires", required)
    assert only(doctor.check_packages) == ("ok", "4 installed, 2 of them pinned")
    replace(importlib.metadata, "requires", ["torch==2.12.0", "sglang", "c==1", "broken", "httpx"])
    assert list(doctor.check_packages()) == [
        ("!!", "torch is 2.11.0+cu130, not 2.12.0: pip install 'torch==2.12.0'"),
        ("!!", "sglang is not installed: pip install sglang"),
        ("!!", "c is not installed: pip install 'c==1'"),
        ("!!", "broken has unreadable metadata; install it again"),
    ]
    replace(importlib.metadata, "requires", None)
    assert only(doctor.check_packages)[0] == "!!"


@pytest.mark.parametrize(
    ("capability", "formats", "refused"),
    [
        ((9, 0), "bf16, int8, int4, fp8, fp8-tensor, fp8-block", ""),
        ((8, 9), "bf16, int8, int4, fp8, fp8-tensor", "fp8-block needs compute capability 9.0"),
        ((8, 0), "bf16, int8, int4", "fp8 needs compute capability 8.9"),
        ((7, 5), "none", "bf16 needs compute capability 8.0"),
    ],
)
def test_the_smallest_compute_capability_decides_the_weight_formats(
    capability: tuple[int, int], formats: str, refused: str, replace: Replace
) -> None:
    replace(doctor, "visible_gpus", [gpu(9, 0), gpu(*capability)])
    status, text = only(doctor.check_weight_formats)
    assert text.partition(";")[0] == formats and refused in text
    assert status == ("!!" if formats == "none" else "ok")


def test_every_weight_format_has_a_compute_capability() -> None:
    assert set(doctor.MIN_CAPABILITY) == set(get_args(WeightFormat))


def test_equal_gpus_are_counted(replace: Replace) -> None:
    replace(doctor, "visible_gpus", [gpu(9, 0), gpu(9, 0), gpu(8, 0, "A100")])
    replace(doctor, "driver_version", "")
    assert only(doctor.check_gpus) == (
        "ok",
        "2 x NVIDIA H100, 80 GiB, compute capability 9.0; "
        "1 x A100, 80 GiB, compute capability 8.0; driver unknown",
    )


def test_a_machine_without_gpus_serves_on_the_cpu_and_a_driver_without_them_is_wrong(
    replace: Replace,
) -> None:
    replace(doctor, "visible_gpus", [])
    replace(doctor, "driver_version", "")
    assert only(doctor.check_gpus)[0] == "--"
    status, text = only(doctor.check_weight_formats)
    assert status == "ok" and "fp8-tensor, fp8-block (SGLang on the CPU)" in text
    replace(doctor, "driver_version", "470.1")
    status, text = only(doctor.check_gpus)
    assert status == "!!" and "driver 470.1 is installed, but torch sees no GPU" in text


@pytest.mark.parametrize(
    ("gpus", "is_installed", "status"),
    [([gpu(9, 0)], True, "ok"), ([gpu(9, 0)], False, "--"), ([], False, "--"), ([], True, "!!")],
)
def test_transformer_engine_without_a_gpu_is_wrong(
    gpus: list[Any], is_installed: bool, status: str, replace: Replace
) -> None:
    replace(doctor, "visible_gpus", gpus)
    replace(importlib.util, "find_spec", object() if is_installed else None)
    found, text = only(doctor.check_transformer_engine)
    assert found == status
    assert ("pip uninstall transformer-engine" in text) == (status == "!!")


def test_dockers_64_mib_of_shared_memory_are_too_little(replace: Replace) -> None:
    replace(shutil, "disk_usage", SimpleNamespace(free=GIB))
    assert only(doctor.check_shared_memory)[0] == "ok"
    replace(shutil, "disk_usage", SimpleNamespace(free=64 * 2**20))
    status, text = only(doctor.check_shared_memory)
    assert status == "!!" and "0.1 GiB free" in text and "--shm-size" in text


def test_loopback_is_bound_and_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection_refused(*_: object, **__: object) -> None:
        raise OSError("network is unreachable")

    assert only(doctor.check_ports)[0] == "ok"
    monkeypatch.setattr(socket, "create_connection", connection_refused)
    status, text = only(doctor.check_ports)
    assert status == "!!" and "network is unreachable" in text


@pytest.mark.parametrize(
    ("commands", "status", "text"),
    [
        (doctor.SLURM_COMMANDS, "ok", "slurm 23.11: sinfo, squeue"),
        ((), "--", "only needed for `qurl launch --executor slurm`"),
        (("sinfo", "srun", "scontrol"), "!!", "squeue, sbatch not found"),
    ],
)
def test_slurm_must_be_complete_or_absent(
    commands: tuple[str, ...],
    status: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in commands:
        write_program(tmp_path / command, "echo slurm 23.11")
    found, said = only(doctor.check_slurm)
    assert found == status and text in said


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_a_check_that_raises_becomes_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Findings:
        raise ImportError("libcuda.so.1:\n cannot open")

    monkeypatch.setattr(doctor, "CHECKS", {"GPUs": broken})
    reason = "ImportError: libcuda.so.1: cannot open"
    assert doctor.check_machine() == [("!!", "GPUs", f"the check failed: {reason}")]


def test_versions_of_missing_and_failing_commands_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_version() == ""
    write_program(tmp_path / "nvidia-smi", "echo no driver\nexit 9")
    assert doctor.driver_version() == ""
    write_program(tmp_path / "nvidia-smi", "echo 580.65.06\necho 580.65.06")
    assert doctor.driver_version() == "580.65.06"


def test_page_is_aligned_and_at_most_100_columns() -> None:
    lines = doctor.page(
        [("ok", "disk", "there is room " * 12), ("--", "InfiniBand", "none")]
    ).splitlines()
    assert lines[0].startswith("ok  disk        there") and lines[-1] == "--  InfiniBand  none"
    assert {line[:16] for line in lines[1:-1]} == {" " * 16}
    assert max(map(len, lines)) <= 100


def test_the_command_checks_everything_and_exits_with_0_or_1(tmp_path: Path) -> None:
    ended = subprocess.run(
        [QURL, "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.stderr == ""
    checked = re.findall(r"^(?:ok|!!|--)  (\S+(?: \S+)*)  ", ended.stdout, re.MULTILINE)
    assert list(dict.fromkeys(checked)) == list(doctor.CHECKS)
    assert ended.returncode == (1 if "\n!!" in f"\n{ended.stdout}" else 0)
    assert list(tmp_path.iterdir()) == []
