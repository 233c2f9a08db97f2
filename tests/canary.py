"""Try the newest engines in an environment of their own, and print what broke: `make canary`.

Everything is written into `.canary/` of the checkout: the environment, the logs, and the runs. The
exit status is 1 if anything broke.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PLACE = REPOSITORY / ".canary"
PYTHON = PLACE / "environment" / "bin" / "python"
ENGINES = ("sglang", "torch", "transformers", "megatron-core")
# The newest of these are tried together, until they resolve with the others as they are pinned.
TOGETHER = (ENGINES, ENGINES[:-1], ENGINES[-1:])
# Tests that run an engine's code, those of the plugin first. `tests/e2e/test_server.py` starts
# servers.
TESTS = """
test_sglang_plugin test_sglang_loader test_sglang_moe test_weights_over_http test_server_options
test_quantize_kernels test_moe_kernels test_checksum_kernel test_layers test_learner test_critic
test_experts test_routing test_optimizer_shards test_checkpoint test_transformer_engine_layers
e2e/test_server
""".split()
LIMIT_S = 1800  # of each step
VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def main() -> None:
    """Build the environment, run everything, and print the tables."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    console = Console(width=120)
    broken = 0
    sections = {"What resolves": install, "Hooks": hooks, "Tests": tests, "Two steps": two_steps}
    for title, section in sections.items():
        table = Table("", "what broke", title=title)
        for name, why in section():
            broken += bool(why)
            table.add_row(name, why or "-")
        console.print(table)
        if title == "What resolves" and why:
            break
    console.print(f"{broken} broke; logs are in {PLACE}")
    sys.exit(broken > 0)


def install() -> Iterator[tuple[str, str]]:
    """Install the newest engines that resolve; yield what does not, and what is installed."""
    extras = PROJECT["optional-dependencies"].values()
    pinned = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    newer = shutil.which("python3.12")
    if newer and run("python3.12", [newer, "-c", ""])[0]:
        newer = None  # a name that a version manager has for a Python that it has not
    status, output = run("environment", [newer or sys.executable, "-m", "venv", PYTHON.parents[1]])
    if status:
        yield "environment", cause(output)
        return
    pip = [str(PYTHON), "-m", "pip", "install"]
    for names in TOGETHER:
        wanted = [name if (name := line.partition("==")[0]) in names else line for line in pinned]
        status, output = run(f"install-{len(names)}", [*pip, *wanted])
        if status:
            yield f"newest {', '.join(names)}", cause(output)
            continue
        status, output = run("install-project", [*pip, "--no-deps", "-e", str(REPOSITORY)])
        for line in pinned:
            name, _, version = line.partition("==")
            if name in ENGINES:
                found = run(f"version-{name}", [PYTHON, "-c", VERSION, name])[1].strip()
                yield f"{name} {version} -> {found}", ""
        break
    if status:
        yield "project", cause(output)


def hooks() -> Iterator[tuple[str, str]]:
    """Yield each hook of the plugin with why SGLang does not call it, or an empty string."""
    status, output = run(
        "hooks", [PYTHON, "-m", "sglang_hooks"], PYTHONPATH="tests", SGLANG_PLATFORM="qurl_cpu"
    )
    found = re.findall(r"^\{.*\}$", output, re.MULTILINE)
    if status or not found:
        yield "all", cause(output)
        return
    for name, state in json.loads(found[-1])["hooks"].items():
        yield name, "" if state == "fits" else state


def tests() -> Iterator[tuple[str, str]]:
    """Yield each file of tests, and the tests of it that failed, by why they did."""
    for name in TESTS:
        report = PLACE / f"{name.replace('/', '-')}.xml"
        words = ["-m", "pytest", "-q", "-n", "2", f"tests/{name}.py", f"--junitxml={report}"]
        _, output = run(report.stem, [PYTHON, *words])
        if not report.exists():
            yield name, cause(output)
            continue
        cases = list(ElementTree.parse(report).iter("testcase"))
        failed: dict[str, list[str]] = {}  # names of tests, by why they failed
        for case in cases:
            for failure in (*case.findall("failure"), *case.findall("error")):
                why = cause(failure.get("message", ""))
                failed.setdefault(why, []).append(case.get("name", ""))
        passed = len(cases) - sum(map(len, failed.values()))
        yield f"{name}: {passed} of {len(cases)}", ""
        for why, names in failed.items():
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            yield f"  {names[0]}{others}", why


def two_steps() -> Iterator[tuple[str, str]]:
    """Run two steps of the quickstart; yield why they failed, or an empty string."""
    words = ["quickstart", "steps=2", f"output_dir={PLACE / 'runs'}", "name=canary"]
    status, output = run("two-steps", [PYTHON.parent / "qurl", "train", *words])
    yield "quickstart", cause(output) if status else ""


def run(name: str, command: Sequence[str | Path], **variables: str) -> tuple[int, str]:
    """Run a step in the repository, with a log; return its exit status and what it printed.

    A step that takes too long is ended with its processes.
    """
    print(f"{name} ...", flush=True)
    log = PLACE / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            output.write(f"\nTimeoutError: more than {LIMIT_S} s\n")
    return status, log.read_text()


def cause(output: str) -> str:
    """Return the last line of an output that names an error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error\b|ERROR\b|error:", line)]
    return (errors or lines or ["printed nothing"])[-1]


if __name__ == "__main__":
    main()
