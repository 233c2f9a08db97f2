"""The GPU benchmarks: their result files, the kit for a bare machine, and rows made from tests."""

import argparse
import json
import sys
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import kit, record, run_all, smoke
from benchmarks.gpu.tests import run_tests
from qurl_megatron.process import die_with_parent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="rehearsals refuse to use a GPU")


def open_record(directory: Path, rehearsal: bool = True) -> record.Record:
    return record.Record("part", argparse.Namespace(rehearsal=rehearsal, results=directory))


def test_a_killed_part_resumes_and_a_complete_part_is_not_measured_again(tmp_path: Path) -> None:
    open_record(tmp_path).add("first", {"value": 1.5})
    resumed = open_record(tmp_path)
    assert resumed.rows == {"first": {"value": 1.5}}
    resumed.add("second", {"value": 2})
    resumed.finish()
    result = json.loads((tmp_path / "part.json").read_text())
    assert result["rehearsal"] and result["complete"]
    assert list(result["rows"]) == ["first", "second"]
    assert result["versions"]["torch"] == version("torch")
    with pytest.raises(SystemExit) as end:
        open_record(tmp_path)
    assert end.value.code == 0


def test_measuring_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GPU; use --rehearsal"):
        open_record(tmp_path, rehearsal=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["rehearsal", "machine", "versions"])
def test_a_file_of_another_kind_machine_or_version_is_refused(key: str, tmp_path: Path) -> None:
    open_record(tmp_path).add("first", {"value": 1})
    path = tmp_path / "part.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: "other"}))
    with pytest.raises(SystemExit, match=f"with another {key}"):
        open_record(tmp_path)


def test_a_check_of_smoke_that_fails_or_is_killed_is_tried_again_and_one_that_passed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: dict[str, list[Any]] = {
        "rank": [AssertionError("broken"), {}],
        "direct": [KeyboardInterrupt(), {}],
        "peer": [{"needs": "two GPUs"}] * 2,
    }
    ran: list[str] = []

    def run(command: list[str], timeout: float | None, **named: object) -> SimpleNamespace:
        name = command[command.index("--check") + 1]
        ran.append(name)
        assert (timeout is None) == (name == "compile")
        assert named["preexec_fn"] is die_with_parent
        outcome = outcomes[name].pop(0) if name in outcomes else {}
        if isinstance(outcome, KeyboardInterrupt):
            raise outcome
        if isinstance(outcome, Exception):
            return SimpleNamespace(returncode=1, stdout=f"{outcome}\n")
        return SimpleNamespace(returncode=0, stdout=f"{smoke.ANSWER}{json.dumps(outcome)}\n")

    monkeypatch.setattr(smoke.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["smoke", "--rehearsal", "--results", str(tmp_path)])
    names = list(smoke.CHECKS)
    with pytest.raises(KeyboardInterrupt):
        smoke.main()
    assert ran == names[: names.index("direct") + 1]
    kept = json.loads((tmp_path / "smoke.json").read_text())
    assert kept["rows"].keys() == {"compile", "quantize", "products", "server"}
    ran.clear()
    outcomes["rank"].insert(0, AssertionError("broken"))
    with pytest.raises(SystemExit, match="^smoke: failed: rank$"):
        smoke.main()
    assert ran == ["rank", *names[names.index("direct") :]]
    ran.clear()
    smoke.main()
    assert ran == ["rank", "peer"]
    assert not json.loads((tmp_path / "smoke.json").read_text())["complete"]


def test_every_part_is_in_the_readme() -> None:
    readme = Path(run_all.__file__).with_name("README.md").read_text()
    assert [part for part in run_all.PARTS if f"| `{part}` |" not in readme] == []


def test_rows_list_the_tests_that_passed_failed_and_were_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "import pytest\n"
        "def test_passing(): print('measured 3')\n"
        "def test_failing(): assert 1 == 2\n"
        "def test_skipped(): pytest.skip('for a reason')\n"
    )
    results = open_record(tmp_path / "results")
    run_tests(results, str(tmp_path))
    row = results.rows[str(tmp_path)]
    assert row["passed"] == ["test_passing"]
    assert row["failed"] == ["test_failing: assert 1 == 2"]
    assert row["skipped"] == ["test_skipped: for a reason"]
    assert row["printed"] == ["test_passing: measured 3"]


def test_the_kit_contains_what_the_bare_machine_lacks() -> None:
    everything = kit.missing_packages({})
    assert everything["sglang"] == version("sglang")
    assert {"megatron-core", "dill", "sglang-kernel", "reasoning-gym"} <= everything.keys()
    assert "torch" not in everything
    assert {name for name in everything if name.startswith("nvidia-")} == kit.NEEDED_OF_NVIDIA
    preinstalled = {"httpx": version("httpx"), "transformers": "4.0.0", "xgrammar": "0.0.1"}
    # The preinstalled transformers and xgrammar are too old.
    assert everything.keys() - kit.missing_packages(preinstalled).keys() == {"httpx"}


def test_parts_of_the_kit_hold_every_wheel_within_the_size_limit(tmp_path: Path) -> None:
    for number, size in enumerate((50, 40, 30, 20, 10, 5)):
        (tmp_path / f"w{number}.whl").write_bytes(bytes(size))
    parts = kit.split_into_parts(tmp_path, 60)
    assert [sum(wheel.stat().st_size for wheel in part) for part in parts] == [60, 60, 35]
    assert {wheel for part in parts for wheel in part} == set(tmp_path.iterdir())


def test_a_repacked_wheel_has_only_the_kept_library(tmp_path: Path) -> None:
    kit.repack(distribution("sglang-kernel"), tmp_path, "cp310-abi3-manylinux2014_x86_64")
    (wheel,) = tmp_path.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if ".so" in name] == [kit.KEPT_LIBRARIES["sglang-kernel"]]
    assert "sgl_kernel/gemm.py" in names
    assert wheel.stat().st_size < 20 * kit.MIB
