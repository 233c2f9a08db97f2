"""The GPU benchmarks: their result files and the kit for a bare machine."""

import argparse
import json
import os
import struct
import subprocess
import sys
from importlib.metadata import Distribution, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, kit, record, smoke
from qurl_megatron.machine.processes import die_with_parent

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
    assert kept["rows"].keys() == {*names[: names.index("direct")]} - {"rank"}
    ran.clear()
    outcomes["rank"].insert(0, AssertionError("broken"))
    with pytest.raises(SystemExit, match="^smoke: failed: rank$"):
        smoke.main()
    assert ran == ["rank", *names[names.index("direct") :]]
    ran.clear()
    smoke.main()
    assert ran == ["rank", "peer"]
    assert not json.loads((tmp_path / "smoke.json").read_text())["complete"]


def test_what_the_kit_packs_is_unpacked_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "BLOB_BYTES", kit.MIB)  # packing 48 MiB takes a minute
    source = tmp_path / "site-packages"
    large, small = source / "torch" / "lib" / "large.so", source / "package" / "module.py"
    for path, data in ((large, os.urandom(2 * kit.MIB + 5)), (small, b"value = 1\n")):
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    (source / "sgl_kernel").mkdir()
    (source / "sgl_kernel" / "flash_ops.abi3.so").touch()
    parts = kit.pack(source, tmp_path / "kit", 2 * kit.MIB, 90)
    assert len(parts) == 2
    assert all(sum(f.stat().st_size for f in part.iterdir()) < 2.1 * kit.MIB for part in parts)
    target = tmp_path / "target"
    command = [sys.executable, parts[0] / "unpack.py", target, *parts]
    subprocess.run([str(word) for word in command], check=True)
    unpacked = {path for path in target.rglob("*") if path.is_file()}
    assert {path.relative_to(target) for path in unpacked} == {
        large.relative_to(source),
        small.relative_to(source),
        Path("qurl_kit-0.dist-info", "METADATA"),
        Path("qurl_kit-0.dist-info", "entry_points.txt"),
    }
    (plugin,) = Distribution.at(target / "qurl_kit-0.dist-info").entry_points
    assert plugin.load() is attention.use_triton
    for path in (large, small):
        copy = target / path.relative_to(source)
        assert copy.read_bytes() == path.read_bytes()
        assert int(copy.stat().st_mtime) == int(path.stat().st_mtime)  # its bytecode stays valid


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """Return a container of code, with each entry's kind, compute capability and code."""
    packed = b"".join(
        struct.pack("<HHIQ12xI", kind, 0, 32, len(code), capability) + code
        for kind, capability, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed


def test_the_kit_keeps_the_machine_code_of_one_gpu() -> None:
    both = fat_binary((2, 80, b"A" * 8), (2, 90, b"B" * 8), (1, 90, b"C" * 8))
    other = fat_binary((2, 80, b"D" * 8), (1, 80, b"E" * 8))
    library = b"head" + both + b"between" + other + b"tail"
    kept = kit.trimmed(library, 90)
    assert len(kept) == len(library)
    assert [code * 8 in kept for code in (b"A", b"B", b"C")] == [False, True, False]
    # Nothing here is for this GPU, so what its driver can compile stays.
    assert [code * 8 in kept for code in (b"D", b"E")] == [False, True]
    assert kept.startswith(b"head") and b"between" in kept and kept.endswith(b"tail")


def test_what_only_looks_like_a_container_of_code_stays() -> None:
    whole = fat_binary((2, 80, b"A" * 8))
    without_size = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + bytes(64)
    for data in (whole[:-1], whole[:10], without_size):
        assert kit.trimmed(data, 90) == data
