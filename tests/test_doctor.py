"""`qurl doctor`: each check on a machine that passes and one that fails, and the printed page."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from qurl_megatron.commands import doctor
from qurl_megatron.commands.doctor import Result
from qurl_megatron.config.schema import WeightFormat

QURL = Path(sys.executable).with_name("qurl")
GIB = 2**30


def gpu(major: int, minor: int, name: str = "NVIDIA H100") -> Any:
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * GIB)


def connection_refused() -> None:
    raise OSError("network is unreachable")


def test_python_is_3_11_or_3_12() -> None:
    assert doctor.check_python((3, 11)).status == "ok"
    assert doctor.check_python((3, 12)).status == "ok"
    assert doctor.check_python((3, 10)) == Result(
        "!!", "Python", "3.10 is not supported; install Python 3.11 or 3.12"
    )


def test_right_packages_are_counted() -> None:
    versions = {"torch": "2.11.0+cu130", "httpx": "0.1"}
    results = list(doctor.check_packages({"torch": "2.11.0", "httpx": None}, versions.get))
    assert results == [Result("ok", "packages", "2 installed, 1 of them pinned")]


def test_every_wrong_package_is_named_with_the_command_that_installs_it() -> None:
    def installed(name: str) -> str | None:
        if name == "broken":
            raise KeyError("Version")
        return {"torch": "2.10.0"}.get(name)

    required = {"torch": "2.11.0", "httpx": None, "broken": None}
    assert list(doctor.check_packages(required, installed)) == [
        Result("!!", "packages", "torch is 2.10.0, not 2.11.0: pip install 'torch==2.11.0'"),
        Result("!!", "packages", "httpx is not installed: pip install httpx"),
        Result("!!", "packages", "broken has unreadable metadata; install it again"),
    ]


def test_a_distribution_without_requirements_is_wrong() -> None:
    (result,) = doctor.check_packages({}, lambda name: None)
    assert result.status == "!!"


def test_requirement_lines_are_read_with_their_pins() -> None:
    lines = ["torch==2.11.0  # why", "", "# comment", "a-b[c,d]==1.0", "numpy>=2", "httpx"]
    assert doctor.parse_requirements(lines) == {
        "torch": "2.11.0",
        "a-b": "1.0",
        "numpy": None,
        "httpx": None,
    }


def test_requirements_come_from_the_distribution_without_its_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = ["torch==2.11.0", 'wandb; extra == "wandb"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert doctor.requirements() == {"torch": "2.11.0"}


def test_requirements_of_a_checkout_come_from_its_file_without_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    required = doctor.requirements()
    assert required["sglang"] == "0.5.17"
    assert "pytest" not in required


@pytest.mark.parametrize(
    ("capability", "formats", "refused"),
    [
        ((9, 0), "bf16, int8, int4, fp8, fp8-tensor, fp8-block", ""),
        ((8, 9), "bf16, int8, int4, fp8, fp8-tensor", "fp8-block needs compute capability 9.0"),
        ((8, 0), "bf16, int8, int4", "fp8 needs compute capability 8.9"),
        ((7, 5), "none", "bf16 needs compute capability 8.0"),
    ],
)
def test_compute_capability_decides_the_weight_formats(
    capability: tuple[int, int], formats: str, refused: str
) -> None:
    gpus, served = doctor.check_gpus([gpu(9, 0), gpu(*capability)], "580.1")
    assert gpus.status == "ok" and "driver 580.1" in gpus.text
    assert served.text.partition(";")[0] == formats
    assert refused in served.text
    assert served.status == ("!!" if formats == "none" else "ok")


def test_every_weight_format_has_a_compute_capability() -> None:
    assert set(doctor.MIN_CAPABILITY) == set(get_args(WeightFormat))


def test_equal_gpus_are_counted() -> None:
    result, _ = doctor.check_gpus([gpu(9, 0), gpu(9, 0), gpu(8, 0, "A100")], None)
    assert result.text == (
        "2 x NVIDIA H100, 80 GiB, compute capability 9.0; "
        "1 x A100, 80 GiB, compute capability 8.0; driver unknown"
    )


def test_a_machine_without_gpus_serves_on_the_cpu() -> None:
    gpus, formats = doctor.check_gpus([], None)
    assert (gpus.status, formats.status) == ("--", "ok")
    assert "fp8-tensor, fp8-block (SGLang on the CPU)" in formats.text


def test_a_driver_without_visible_gpus_is_wrong() -> None:
    gpus, _ = doctor.check_gpus([], "470.1")
    assert gpus.status == "!!" and "driver 470.1 is installed, but torch sees no GPU" in gpus.text


def test_transformer_engine_without_a_gpu_is_wrong() -> None:
    assert doctor.check_transformer_engine(has_gpu=True, is_installed=True).status == "ok"
    assert doctor.check_transformer_engine(has_gpu=True, is_installed=False).status == "--"
    assert doctor.check_transformer_engine(has_gpu=False, is_installed=False).status == "--"
    wrong = doctor.check_transformer_engine(has_gpu=False, is_installed=True)
    assert wrong.status == "!!" and "pip uninstall transformer-engine" in wrong.text


def test_dockers_64_mib_of_shared_memory_are_too_little() -> None:
    assert doctor.check_shared_memory(GIB).status == "ok"
    little = doctor.check_shared_memory(64 * 2**20)
    assert little.status == "!!" and "0.1 GiB free" in little.text and "--shm-size" in little.text


def test_disk_must_be_writable_and_have_room() -> None:
    here = Path("/data")
    assert doctor.check_disk(here, 50 * GIB, is_writable=True).status == "ok"
    assert doctor.check_disk(here, 5 * GIB, is_writable=True).status == "!!"
    unwritable = doctor.check_disk(here, 50 * GIB, is_writable=False)
    assert unwritable == Result("!!", "disk", "/data is not writable; set output_dir")


def test_loopback_is_bound_and_reached() -> None:
    assert doctor.check_ports(doctor.connect_on_loopback).status == "ok"
    refused = doctor.check_ports(connection_refused)
    assert refused.status == "!!" and "network is unreachable" in refused.text


@pytest.mark.parametrize(
    ("commands", "status", "text"),
    [
        (doctor.SLURM_COMMANDS, "ok", "slurm 23.11: sinfo, squeue"),
        ((), "--", "only needed for `qurl launch --executor slurm`"),
        (("sinfo", "srun", "scontrol"), "!!", "squeue, sbatch not found"),
    ],
)
def test_slurm_must_be_complete_or_absent(
    commands: tuple[str, ...], status: str, text: str
) -> None:
    paths = {command: f"/usr/bin/{command}" for command in commands}
    result = doctor.check_slurm(paths.get, lambda: "slurm 23.11")
    assert result.status == status and text in result.text


def test_infiniband_devices_are_listed(tmp_path: Path) -> None:
    assert doctor.check_infiniband(tmp_path / "none").status == "--"
    assert doctor.check_infiniband(tmp_path).status == "--"
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    result = doctor.check_infiniband(tmp_path)
    assert result == Result("ok", "InfiniBand", "2 devices: mlx5_0, mlx5_1")


def test_a_check_that_raises_becomes_a_result() -> None:
    def broken() -> Iterable[Result]:
        raise ImportError("libcuda.so.1:\n cannot open")

    assert doctor.run_check("GPUs", broken) == [
        Result("!!", "GPUs", "the check failed: ImportError: libcuda.so.1: cannot open")
    ]


def test_versions_of_missing_and_failing_commands_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_version() is None
    for name in ("nvidia-smi", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\necho no driver\nexit 9\n")
        (tmp_path / name).chmod(0o755)
    assert doctor.driver_version() is None
    assert doctor.slurm_version() == "unknown version"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    assert doctor.driver_version() == "580.65.06"


def test_page_is_aligned_and_at_most_100_columns() -> None:
    results = [Result("ok", "disk", "there is room " * 12), Result("--", "InfiniBand", "none")]
    lines = doctor.page(results).splitlines()
    assert lines[0].startswith("ok  disk        there") and lines[-1] == "--  InfiniBand  none"
    assert {line[:16] for line in lines[1:-1]} == {" " * 16}
    assert max(map(len, lines)) <= 100


def test_the_command_checks_everything_and_exits_with_0_or_1(tmp_path: Path) -> None:
    ended = subprocess.run(
        [QURL, "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.stderr == ""
    checked = re.findall(r"^(?:ok|!!|--)  (\S+(?: \S+)*)  ", ended.stdout, re.MULTILINE)
    assert {"Python", "packages", "GPUs", "weight formats", "shared memory", "disk"} < set(checked)
    assert {"loopback ports", "Slurm", "InfiniBand", "Transformer Engine"} < set(checked)
    assert ended.returncode == (1 if "\n!!" in f"\n{ended.stdout}" else 0)
    assert list(tmp_path.iterdir()) == []
