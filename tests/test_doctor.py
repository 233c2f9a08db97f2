"""`qurl doctor`: each check on a machine that passes and one that fails, and the printed page."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qurl_megatron.commands import doctor
from qurl_megatron.quantization import products

QURL = Path(sys.executable).with_name("qurl")
GIB = 2**30


def gpu(major: int, minor: int, name: str = "NVIDIA H100") -> Any:
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * GIB)


H100 = [gpu(9, 0)]
FORMATS, ENGINE = doctor.check_weight_formats, doctor.check_transformer_engine
SHARED_MEMORY = doctor.check_shared_memory
GPUS = "qurl_megatron.commands.doctor.visible_gpus"
DRIVER = "qurl_megatron.commands.doctor.driver_version"
PRODUCTS = "qurl_megatron.quantization.products"
MODULE, DISK = "importlib.util.find_spec", "shutil.disk_usage"
FREE = "qurl_megatron.device.free_memory_bytes"


@pytest.mark.parametrize(
    ("check", "machine", "status", "text"),
    [
        (
            doctor.check_gpus,
            {GPUS: [*H100, *H100, gpu(8, 0, "A100")], DRIVER: ""},
            "ok",
            "2 x NVIDIA H100, 80 GiB, compute capability 9.0; "
            "1 x A100, 80 GiB, compute capability 8.0; driver unknown",
        ),
        (doctor.check_gpus, {GPUS: [], DRIVER: ""}, "--", "none; "),
        (doctor.check_gpus, {GPUS: [], DRIVER: "470.1"}, "!!", "driver 470.1 is installed, but"),
        # Every GPU must serve a format.
        (FORMATS, {GPUS: H100}, "ok", "bf16, int8, int4, fp8, fp8-tensor, fp8-block"),
        (FORMATS, {GPUS: [*H100, gpu(8, 9)]}, "ok", "bf16, int8, int4, fp8, fp8-tensor; fp8-block"),
        (FORMATS, {GPUS: [*H100, gpu(8, 0)]}, "ok", "bf16, int8, int4; fp8 needs compute capabil"),
        (FORMATS, {GPUS: [*H100, gpu(7, 5)]}, "!!", "none; bf16 needs compute capability 8.0"),
        (
            FORMATS,
            {GPUS: [gpu(10, 0)]},
            "ok",
            "bf16, int4, fp8, fp8-tensor; int8 needs compute capability 9.0 or less; fp8-block "
            "needs compute capability 9.0 or less",
        ),
        (FORMATS, {GPUS: []}, "ok", "fp8-block (SGLang on the CPU)"),
        *(
            (FORMATS, {GPUS: [], f"{PRODUCTS}.int8_product": product}, "ok", text)
            for product, text in (
                (products.packed_int8, "Servers multiply INT8 codes in INT8"),
                (products.in_float32, "Servers multiply INT8 codes in float32"),
            )
        ),
        (ENGINE, {GPUS: H100, MODULE: object()}, "ok", "installed"),
        (ENGINE, {GPUS: H100, MODULE: None}, "--", "not installed"),
        (ENGINE, {GPUS: [], MODULE: None}, "--", "not installed"),
        (ENGINE, {GPUS: [], MODULE: object()}, "!!", "pip uninstall transformer-engine"),
        (SHARED_MEMORY, {DISK: SimpleNamespace(free=GIB)}, "ok", "1.0 GiB free"),
        # Docker's default.
        (
            SHARED_MEMORY,
            {DISK: SimpleNamespace(free=64 * 2**20)},
            "!!",
            "room for 1 GiB (docker run",
        ),
        (doctor.check_memory, {FREE: 8 * GIB}, "ok", "8.0 of"),
        (doctor.check_memory, {FREE: GIB}, "!!", "GiB free; the quickstart takes up to 4 GiB"),
    ],
)
def test_a_check_finds_what_the_machine_has(
    check: Callable[[], doctor.Findings],
    machine: dict[str, object],
    status: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in machine.items():
        monkeypatch.setattr(name, lambda *_, value=value: value)
    ((found, said),) = check()
    assert found == status and text in said


def test_packages_are_those_that_the_distribution_requires_as_it_pins_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"torch": "2.11.0+cu130", "a-b": "1.0", "httpx": "0.1", "numpy": "2.3"}

    def version(name: str) -> str:
        if name == "broken":
            raise KeyError("Version")
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def check(required: list[str] | None) -> list[tuple[str, str]]:
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
        return list(doctor.check_packages())

    monkeypatch.setattr(importlib.metadata, "version", version)
    required = ["torch==2.11.0", "a-b[c,d]==1.0", "httpx", "numpy>=2", 'wandb; extra == "wandb"']
    assert check(required) == [("ok", "4 installed, 2 of them pinned")]
    assert check(["torch==2.12.0", "sglang", "c==1", "broken", "httpx"]) == [
        ("!!", "torch is 2.11.0+cu130, not 2.12.0: pip install 'torch==2.12.0'"),
        ("!!", "sglang is not installed: pip install sglang"),
        ("!!", "c is not installed: pip install 'c==1'"),
        ("!!", "broken has unreadable metadata; install it again"),
    ]
    assert check(None)[0][0] == "!!"


def test_slurm_is_what_jobs_are_submitted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ((status, text),) = doctor.check_slurm()
    assert status == "--" and "only needed for `qurl launch --executor slurm`" in text
    write_program(tmp_path / "sbatch", "echo slurm 23.11")
    assert [*doctor.check_slurm()] == [("ok", "slurm 23.11")]


def test_a_disk_without_room_for_runs_or_scratch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "free_bytes", lambda path: GIB if path == tmp_path else 9 * GIB)
    (runs, scratch) = doctor.check_disk()
    assert runs == (
        "!!",
        f"1.0 GiB free for runs in {tmp_path}; make room, or choose another directory",
    )
    assert scratch[0] == "ok" and scratch[1].startswith("9.0 GiB free for temporary files in ")


def test_variables_that_were_mended_or_name_no_interface_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(doctor, "mended", ["HOME=/ cannot be written"])
    mended, (status, text) = doctor.check_environment()
    assert mended == ("ok", "HOME=/ cannot be written")
    assert status == "--" and "GLOO_SOCKET_IFNAME=ib0: " in text and "no interface ib0" in text


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
