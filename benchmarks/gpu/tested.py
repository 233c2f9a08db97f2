"""Tests of the repository as rows of a result: what each said, and how long it took."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.record import Record, run


def run_tests(results: Record, paths: list[str], selection: str = "") -> None:
    """Run the tests of each path in a pytest of its own, and add a row for each path.

    A row names the tests that passed, failed and were skipped, with the reason, and what those that
    passed printed. A path that has a row is not run again. A failure does not stop the others.
    """
    for path in paths:
        if path in results.rows:
            continue
        xml = results.log_dir / f"{path.replace('/', '_')}.xml"
        xml.unlink(missing_ok=True)
        words = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", f"--junitxml={xml}", path]
        run([*words, *(["-k", selection] if selection else [])], xml.with_suffix(".log"))
        if not xml.exists():
            results.add(path, {"failed": [f"pytest itself; see {xml.with_suffix('.log').name}"]})
            continue
        results.add(path, outcomes(xml))


def outcomes(xml: Path) -> dict[str, object]:
    """What a junit file says: counts, seconds, and a list of each kind."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    printed: list[str] = []
    time_s = 0.0
    for case in ElementTree.parse(xml).iter("testcase"):
        name, kind = case.get("name", ""), "passed"
        time_s += float(case.get("time", 0))
        for child in case:
            if child.tag in ("failure", "error"):
                kind, name = "failed", f"{name}: {_first_line(child)}"
            elif child.tag == "skipped":
                kind, name = "skipped", f"{name}: {_first_line(child)}"
            elif child.tag == "system-out" and child.text:
                said = [line for line in child.text.splitlines() if line[:1].isalnum()]
                printed += [f"{name}: {line}" for line in said]
        found[kind].append(name)
    counts = {f"num_{kind}": len(names) for kind, names in found.items()}
    return {**counts, "time_s": round(time_s, 1), **found, "printed": printed}


def end(results: Record) -> None:
    """Finish; exit code 1 where a test failed, or where none ran at all."""
    results.finish()
    failed = [name for row in results.rows.values() for name in row["failed"]]
    ran = sum(row.get("num_passed", 0) for row in results.rows.values())
    if failed or not ran:
        sys.exit(f"{results.path.stem}: {len(failed)} failed, {ran} passed")


def _first_line(element: ElementTree.Element) -> str:
    return (element.get("message") or element.text or "").strip().partition("\n")[0][:300]
