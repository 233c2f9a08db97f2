"""benchmarks/gpu: resumed and separate results, the kit for a bare machine, and test records."""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import kit, record, run_all, tested

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="rehearsals are for no GPU")


def opened(directory: Path, rehearsal: bool = True) -> record.Record:
    return record.Record("part", argparse.Namespace(rehearsal=rehearsal, results=directory))


def test_a_killed_part_resumes_and_a_complete_one_does_not_run_again(tmp_path: Path) -> None:
    opened(tmp_path).add("first", {"value": 1.5})
    going_on = opened(tmp_path)
    assert going_on.rows == {"first": {"value": 1.5}}
    going_on.add("second", {"value": 2})
    going_on.finish()
    written = json.loads((tmp_path / "part.json").read_text())
    assert written["rehearsal"] and written["complete"]
    assert list(written["rows"]) == ["first", "second"]
    assert written["versions"]["torch"] == version("torch")
    with pytest.raises(SystemExit) as end:
        opened(tmp_path)
    assert end.value.code == 0


def test_measuring_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GPU; rehearse with --rehearsal"):
        opened(tmp_path, rehearsal=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["rehearsal", "machine", "versions"])
def test_rows_of_another_kind_or_machine_are_not_added_to(key: str, tmp_path: Path) -> None:
    opened(tmp_path).add("first", {"value": 1})
    path = tmp_path / "part.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: "other"}))
    with pytest.raises(SystemExit, match=f"of another {key}"):
        opened(tmp_path)


@pytest.mark.parametrize("part", run_all.PARTS)
def test_every_part_is_a_program_and_in_the_readme(part: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.gpu.{part}").main)
    assert f"| `{part}` |" in (Path(run_all.__file__).with_name("README.md")).read_text()


def test_rows_record_which_tests_passed_failed_or_were_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_right(): print('measured 3')\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_left_out(): pytest.skip('for a reason')\n"
    )
    xml = tmp_path / "some.xml"
    record.run(
        ["-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--junitxml={xml}", str(tmp_path)],
        tmp_path / "log",
    )
    row = tested.outcomes(xml)
    assert row["passed"] == ["test_right"]
    assert row["failed"] == ["test_wrong: assert 1 == 2"]
    assert row["skipped"] == ["test_left_out: for a reason"]


def test_the_kit_holds_what_a_bare_machine_lacks() -> None:
    everything = kit.needed({})
    assert everything["sglang"] == version("sglang")
    assert {"megatron-core", "dill", "sglang-kernel", "reasoning-gym"} <= everything.keys()
    assert not any(name == "torch" or name.startswith("nvidia-") for name in everything)
    there = {"httpx": version("httpx"), "transformers": "4.0.0", "xgrammar": "0.0.1"}
    assert everything.keys() - kit.needed(there).keys() == {"httpx"}  # the others are too old


def test_parts_of_the_kit_hold_every_wheel_and_no_more_than_they_may(tmp_path: Path) -> None:
    for number, size in enumerate((50, 40, 30, 20, 10, 5)):
        (tmp_path / f"w{number}.whl").write_bytes(bytes(size))
    parts = kit.parts(tmp_path, 60)
    assert [sum(wheel.stat().st_size for wheel in part) for part in parts] == [60, 60, 35]
    assert {wheel for part in parts for wheel in part} == set(tmp_path.iterdir())


def test_a_repacked_wheel_keeps_one_library(tmp_path: Path) -> None:
    import zipfile
    from importlib.metadata import distribution

    kit.repack(distribution("sglang-kernel"), tmp_path, "cp310-abi3-manylinux2014_x86_64")
    (wheel,) = tmp_path.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if ".so" in name] == [kit.STRIPPED["sglang-kernel"]]
    assert "sgl_kernel/gemm.py" in names
    assert wheel.stat().st_size < 20 * kit.MIB
