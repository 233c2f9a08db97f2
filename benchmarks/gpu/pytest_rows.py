"""Run tests of the repository and record each test's outcome and time as result rows."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.record import Record, run_python


def run_tests(results: Record, paths: list[str], selection: str = "") -> None:
    """Run one pytest process per path, and add one row per path.

    A row lists the tests that passed, failed or were skipped, with reasons, and the lines that the
    tests printed. Paths that already have a row are skipped. A failure does not stop the others.
    """
    for path in paths:
        if path in results.rows:
            continue
        xml = results.log_dir / f"{path.replace('/', '_')}.xml"
        xml.unlink(missing_ok=True)
        command = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", f"--junitxml={xml}", path]
        command += ["-o", "junit_logging=system-out"]  # keeps the lines that tests print
        run_python([*command, *(["-k", selection] if selection else [])], xml.with_suffix(".log"))
        if not xml.exists():
            results.add(
                path, {"failed": [f"pytest did not finish; see {xml.with_suffix('.log').name}"]}
            )
            continue
        results.add(path, outcomes(xml))


def outcomes(xml: Path) -> dict[str, object]:
    """Return counts, seconds, and the tests by outcome from a JUnit XML file."""
    tests: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    printed: list[str] = []
    time_s = 0.0
    for case in ElementTree.parse(xml).iter("testcase"):
        name, outcome = case.get("name", ""), "passed"
        time_s += float(case.get("time", 0))
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, name = "failed", f"{name}: {_first_line(child)}"
            elif child.tag == "skipped":
                outcome, name = "skipped", f"{name}: {_first_line(child)}"
            elif child.tag == "system-out" and child.text:
                lines = [line for line in child.text.splitlines() if line[:1].isalnum()]
                printed += [f"{name}: {line}" for line in lines]
        tests[outcome].append(name)
    counts = {f"num_{outcome}": len(names) for outcome, names in tests.items()}
    return {**counts, "time_s": round(time_s, 1), **tests, "printed": printed}


def finish(results: Record) -> None:
    """Finish the record. Exit with code 1 if a test failed or no test passed."""
    results.finish()
    failed = [name for row in results.rows.values() for name in row["failed"]]
    num_passed = sum(row.get("num_passed", 0) for row in results.rows.values())
    if failed or not num_passed:
        sys.exit(f"{results.path.stem}: {len(failed)} failed, {num_passed} passed")


def _first_line(element: ElementTree.Element) -> str:
    return (element.get("message") or element.text or "").strip().partition("\n")[0][:300]
