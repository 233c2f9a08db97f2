"""Every part, one after the other: `python -m benchmarks.gpu.run_all`.

Each part is a program of its own and writes its own file; what is there already is not measured
again, so a run that was killed goes on when it is called again. A part that fails does not stop the
others. Ends with a table, and exit code 1 if a part failed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.gpu import record

# What the others rest on comes first, what takes longest last.
PARTS = ("kernels", "plugin", "learner", "publish", "throughput", "end_to_end")


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    kind = "rehearsal" if arguments.rehearsal else "gpu"
    directory: Path = arguments.results or record.RESULTS / kind
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    words = ["--rehearsal"] if arguments.rehearsal else []
    words += ["--results", str(directory)] if arguments.results else []
    lines = []
    for part in arguments.parts:
        start = time.perf_counter()
        log = directory / "logs" / f"{part}.log"
        code = record.run(["-m", f"benchmarks.gpu.{part}", *words], log)
        took = time.perf_counter() - start
        lines.append((part, code, took, rows(directory / f"{part}.json")))
        print(
            f"{part:11} {'done' if code == 0 else f'FAILED, see {log}'} in {took:.0f} s", flush=True
        )
    print()
    for part, code, took, found in lines:
        print(f"{part:11} {'ok' if code == 0 else 'failed':6} {took:6.0f} s  {found} rows")
    sys.exit(any(code for _, code, *_ in lines))


def rows(path: Path) -> int:
    return len(json.loads(path.read_text())["rows"]) if path.exists() else 0


if __name__ == "__main__":
    main()
