"""Check for `qurl doctor` that this machine has what a run needs; nothing is changed.

Another Python is not checked here: pip refuses it.
Each check yields a status and a text: what it found, or the remedy. The statuses are:

- `ok`: present and right;
- `!!`: a run needs it, and it is wrong;
- `--`: absent, and rarely needed.
"""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from qurl_megatron.config.schema import QuantizationConfig
from qurl_megatron.config.validate import CAPABILITIES, why_not_served
from qurl_megatron.machine.disk import SHARED_MEMORY, free_bytes
from qurl_megatron.machine.environment import mended
from qurl_megatron.machine.interfaces import missing_interface

DISTRIBUTION = "qurl-megatron"
GIB = 2**30
ENOUGH_SHARED_BYTES = 2 * QuantizationConfig().bucket_bytes  # one is filled while one is read
ENOUGH_MEMORY_BYTES = 4 * GIB  # for the quickstart
ENOUGH_DISK_BYTES = 2 * GIB
PROBE_TIMEOUT_S = 5

Status = Literal["ok", "!!", "--"]
Findings = Iterator[tuple[Status, str]]
Result = tuple[Status, str, str]  # a finding, with the subject of its check in the middle


def doctor() -> None:
    """Check this machine: packages, GPUs, shared memory and Slurm.

    Exit with code 1 if something that a run needs is missing or wrong.
    """
    results = check_machine()
    print(page(results))
    sys.exit(1 if any(status == "!!" for status, _, _ in results) else 0)


def check_machine() -> list[Result]:
    """Return the findings of all checks; a check that raises is reported as failed."""
    results: list[Result] = []
    for name, check in CHECKS.items():
        try:
            results += [(status, name, text) for status, text in check()]
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            results.append(("!!", name, f"the check failed: {reason}"))
    return results


def page(results: list[Result]) -> str:
    """Return the results as aligned text of at most 100 columns."""
    width = max(len(name) for _, name, _ in results)
    return "\n".join(
        textwrap.fill(
            text,
            100,
            initial_indent=f"{status}  {name:{width}}  ",
            subsequent_indent=" " * (width + 6),
            break_on_hyphens=False,
        )
        for status, name, text in results
    )


def check_packages() -> Findings:
    """Check that all required packages are installed, in their pinned versions."""
    declared = importlib.metadata.requires(DISTRIBUTION) or []
    lines = "\n".join(line for line in declared if "extra ==" not in line)
    pins = dict(re.findall(r"^([\w.-]+)(?:\[.*?\])?\s*(?:==\s*([^\s;,]+))?", lines, re.MULTILINE))
    problems = [problem for name, pin in pins.items() if (problem := package_problem(name, pin))]
    for problem in problems:
        yield "!!", problem
    if not pins:
        yield "!!", f"{DISTRIBUTION} lists no requirements; install it again"
    elif not problems:
        num_pinned = len(pins) - list(pins.values()).count("")
        yield "ok", f"{len(pins)} installed, {num_pinned} of them pinned"


def package_problem(name: str, pin: str) -> str:
    """Return what is wrong with a package, or an empty string; an empty `pin` takes any version."""
    install = f"pip install '{name}=={pin}'" if pin else f"pip install {name}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed: {install}"
    except KeyError:
        return f"{name} has unreadable metadata; install it again"
    # torch 2.14.1+cpu counts as 2.14.1.
    is_right = not pin or version.partition("+")[0] == pin
    return "" if is_right else f"{name} is {version}, not {pin}: {install}"


def check_gpus() -> Findings:
    """Check that torch sees the GPUs, and count them by kind."""
    gpus, driver = visible_gpus(), driver_version()
    if not gpus and driver:
        yield (
            "!!",
            f"driver {driver} is installed, but torch sees no GPU; check that the driver is new "
            "enough for torch's CUDA, and that CUDA_VISIBLE_DEVICES does not hide them",
        )
    elif not gpus:
        yield "--", "none; only needed for larger models than the quickstart's"
    else:
        kinds = Counter(
            f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, "
            f"compute capability {gpu.major}.{gpu.minor}"
            for gpu in gpus
        )
        described = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
        yield "ok", f"{described}; driver {driver or 'unknown'}"


def check_weight_formats() -> Findings:
    """Find the weight formats that all GPUs serve; without GPUs, those of the CPU."""
    gpus = visible_gpus()
    if not gpus:
        from qurl_megatron.quantization import products

        in_int8 = products.int8_product(1024, 1024) is not products.in_float32
        yield (
            "ok",
            f"{', '.join(CAPABILITIES)} (SGLang on the CPU); only `qurl eval format=fp8-block` "
            f"needs a GPU. Servers multiply INT8 codes in {'INT8' if in_int8 else 'float32'}, "
            f"BF16 values in {'BF16' if products.multiplies_bfloat16() else 'float32'}",
        )
        return
    reasons = {
        name: next(filter(None, (why_not_served(name, (gpu.major, gpu.minor)) for gpu in gpus)), "")
        for name in CAPABILITIES
    }
    served = [name for name, why in reasons.items() if not why]
    others = [f"{name} {why}" for name, why in reasons.items() if why]
    yield "ok" if served else "!!", "; ".join([", ".join(served) or "none", *others])


def check_kernels() -> Findings:
    """Check that servers on a GPU find the CUDA toolkit that compiles their kernels."""
    from qurl_megatron.rollout import toolkit

    if not visible_gpus():
        yield "--", "no GPU for which servers would compile them"
        return
    variables = toolkit.environment()
    yield (
        "ok",
        f"compiled with {variables['CUDA_HOME']}, kept in {variables['SGLANG_CACHE_DIR']}",
    )


def check_transformer_engine() -> Findings:
    """Check that Transformer Engine is not installed on a machine without a GPU."""
    if importlib.util.find_spec("transformer_engine") is None:
        yield "--", "not installed; only needed for faster layers on a GPU (requirements-gpu.txt)"
    elif visible_gpus():
        yield "ok", "installed"
    else:
        yield (
            "!!",
            "installed without a GPU, where it breaks megatron.core: "
            "pip uninstall transformer-engine",
        )


def check_shared_memory() -> Findings:
    """Check the free space of /dev/shm."""
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    found = (
        f"{free_bytes / GIB:.1f} GiB free in {SHARED_MEMORY}; weights travel through it between "
        "processes of one machine"
    )
    if free_bytes >= ENOUGH_SHARED_BYTES:
        yield "ok", found
    else:
        yield (
            "!!",
            f"{found}. Make room for {ENOUGH_SHARED_BYTES / GIB:.0f} GiB (docker run "
            "--shm-size=8g), or lower quantization.bucket_bytes",
        )


def check_memory() -> Findings:
    """Check the memory that this machine, or its container, has left."""
    from qurl_megatron import device

    free, total = device.free_memory_bytes(), device.machine_memory_bytes()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    advice = f"the quickstart takes up to {ENOUGH_MEMORY_BYTES / GIB:.0f} GiB"
    yield _judged(free >= ENOUGH_MEMORY_BYTES, found, advice)


def check_disk() -> Findings:
    """Check the free space for runs, which are made in the working directory, and for scratch."""
    for what, place in (("runs", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        free = free_bytes(place)
        found = f"{free / GIB:.1f} GiB free for {what} in {place}"
        advice = "make room, or choose another directory"
        yield _judged(free >= ENOUGH_DISK_BYTES, found, advice)


def _judged(is_enough: bool, found: str, advice: str) -> tuple[Status, str]:
    return ("ok", found) if is_enough else ("!!", f"{found}; {advice}")


def check_environment() -> Findings:
    """Say what the variables of this shell would break, and what qurl does about it."""
    from qurl_megatron import device

    yield from (("ok", text) for text in mended or ["HOME and TMPDIR can be used"])
    variables = device.child_environment({})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if problem := missing_interface(name, variables.get(name, "")):
            yield "--", f"{problem}; only needed between nodes"


def check_slurm() -> Findings:
    """Find the Slurm that jobs can be submitted to."""
    version = output_of(["sbatch", "--version"]).strip()
    if version:
        yield "ok", version
    else:
        yield "--", "absent; only needed for `qurl launch --executor slurm`"


CHECKS: dict[str, Callable[[], Findings]] = {
    "packages": check_packages,
    "GPUs": check_gpus,
    "weight formats": check_weight_formats,
    "kernels": check_kernels,
    "Transformer Engine": check_transformer_engine,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "disk": check_disk,
    "environment": check_environment,
    "Slurm": check_slurm,
}


def visible_gpus() -> list[Any]:
    """Return torch's properties of the GPUs; torch is imported here, and may be broken."""
    from qurl_megatron import device

    return device.gpu_properties()


def driver_version() -> str:
    """Return the version of the NVIDIA driver; an empty string without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return output_of(query).partition("\n")[0].strip()


def output_of(command: list[str]) -> str:
    """Return what a command prints; an empty string if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
