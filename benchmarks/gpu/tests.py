"""Run the repository's tests of what a GPU computes: `python -m benchmarks.gpu.tests`.

- Products of the quantized layers, and of experts, on the GPU against those on the CPU.
- Codes of the quantization kernels, and of Transformer Engine's quantizers if it is installed.
- A server with CUDA graphs: log-probs in each format against plain PyTorch on the CPU from the same
  codes; 20 reloads that end with bit-equal results; a prefix cache that serves no old weights; the
  checksum of each layer.
- A learner over NCCL: logits, log-probs and three optimizer steps against transformers and PyTorch,
  the converter's codes, and checkpoints. It uses Transformer Engine's layers if they are installed.

Tests that need more GPUs or packages than there are, are skipped with a reason. A row has the tests
of one file by outcome, with reasons, and the lines that they printed.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.record import Record, parser, run_python

# What pytest's -k selects of each file in a rehearsal. The formats of a server differ only in their
# linear layers, so one is enough. Files with "" are not rehearsed.
REHEARSED = {
    "tests/gpu/test_linear.py": "int8",
    "tests/gpu/test_moe.py": "int8",
    "tests/test_quantize_kernels.py": "int8",
    "tests/e2e/test_server.py": "int8",
    "tests/e2e/test_moe_server.py": "int8",
    "tests/gpu/test_transformer_engine.py": "transformer_engine",
    "tests/test_quantize.py": "",
    "tests/test_learner.py": "TP1",
    "tests/test_reshard.py": "",
    "tests/test_checkpoint.py": "",
}


def main() -> None:
    results = Record("tests", parser(__doc__).parse_args())
    for path, selection in REHEARSED.items():
        if not results.rehearsal:
            run_tests(results, path)
        elif selection:
            run_tests(results, path, selection)
    results.finish()
    failed = [name for row in results.rows.values() for name in row["failed"]]
    num_passed = sum(row.get("num_passed", 0) for row in results.rows.values())
    if failed or not num_passed:
        sys.exit(f"tests: {len(failed)} failed, {num_passed} passed")


def run_tests(results: Record, path: str, selection: str = "") -> None:
    """Run the tests of `path` in a process, and add a row for it, unless it has one."""
    if path in results.rows:
        return
    xml = results.log_dir / f"{path.replace('/', '_')}.xml"
    xml.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", f"--junitxml={xml}", path]
    command += ["-o", "junit_logging=system-out"]  # keeps the lines that tests print
    run_python([*command, *(["-k", selection] if selection else [])], xml.with_suffix(".log"))
    if xml.exists():
        results.add(path, outcomes(xml))
    else:
        log = xml.with_suffix(".log").name
        results.add(path, {"failed": [f"pytest did not finish; see {log}"]})


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


def _first_line(element: ElementTree.Element) -> str:
    return (element.get("message") or element.text or "").strip().partition("\n")[0][:300]


if __name__ == "__main__":
    main()
