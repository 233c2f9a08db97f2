"""Run every GPU benchmark, one after the other: `python -m benchmarks.gpu.run_all`.

Each part is a separate program and writes its own file. Rows that exist are not measured again, so
the same command resumes a run that was killed. A part that fails does not stop the others. The run
ends with a table, and with exit code 1 if a part failed.
"""

import sys
import time
from pathlib import Path

from benchmarks.gpu import record
from qurl_megatron.files import read_json_object

# Parts that the others depend on run first; the longest runs last.
PARTS = ("smoke", "kernels", "tests", "servers", "end_to_end")


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    kind = "rehearsal" if arguments.rehearsal else "gpu"
    directory: Path = arguments.results or record.RESULTS / kind
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    options = ["--rehearsal"] if arguments.rehearsal else []
    options += ["--results", str(directory)] if arguments.results else []
    outcomes = []
    for part in arguments.parts:
        start = time.perf_counter()
        log = directory / "logs" / f"{part}.log"
        code = record.run_python(["-m", f"benchmarks.gpu.{part}", *options], log)
        time_s = time.perf_counter() - start
        results = read_json_object(directory / f"{part}.json")
        outcomes.append((part, code, time_s, len(results.get("rows", ()))))
        print(
            f"{part:11} {'done' if code == 0 else f'FAILED, see {log}'} in {time_s:.0f} s",
            flush=True,
        )
    print()
    for part, code, time_s, rows in outcomes:
        print(f"{part:11} {'ok' if code == 0 else 'failed':6} {time_s:6.0f} s  {rows} rows")
    sys.exit(any(code for _, code, *_ in outcomes))


if __name__ == "__main__":
    main()
