"""Check that this machine has what a run needs, for `qurl doctor`. Nothing is changed.

Each check is a function that returns results. A check that raises becomes a failed result.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from qurl_megatron.config.schema import QuantizationConfig

DISTRIBUTION = "qurl-megatron"
PYTHONS = ((3, 11), (3, 12))
SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
SLURM_COMMANDS = ("sinfo", "squeue", "sbatch", "srun", "scontrol")
GIB = 2**30
ENOUGH_DISK_BYTES = 10 * GIB
ENOUGH_SHARED_BYTES = 2 * QuantizationConfig().bucket_bytes  # one is filled while one is read
PROBE_TIMEOUT_S = 5

# Smallest compute capability that serves each format. The servers compute in bfloat16, and
# sgl_kernel is compiled for 8.0 and above; the fp8 bounds are those of its matrix products.
MIN_CAPABILITY = {
    "bf16": (8, 0),
    "int8": (8, 0),
    "int4": (8, 0),
    "fp8": (8, 9),
    "fp8-tensor": (8, 9),
    "fp8-block": (9, 0),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one check."""

    status: Literal["ok", "!!", "--"]
    """ok: present and right. !!: a run needs it, and it is wrong. --: absent, and rarely needed."""

    name: str
    """The subject of the check."""

    text: str
    """The finding, or the remedy."""


def check_machine() -> list[Result]:
    """Return the results of all checks, in the order of the page."""
    checks: dict[str, Callable[[], Iterable[Result]]] = {
        "Python": lambda: [check_python(sys.version_info[:2])],
        "packages": lambda: check_packages(requirements(), installed_version),
        "GPUs": lambda: check_gpus(visible_gpus(), driver_version()),
        "Transformer Engine": lambda: [
            check_transformer_engine(bool(visible_gpus()), has_module("transformer_engine"))
        ],
        "shared memory": lambda: [check_shared_memory(shutil.disk_usage(SHARED_MEMORY).free)],
        "disk": lambda: [
            check_disk(Path.cwd(), shutil.disk_usage(".").free, os.access(".", os.W_OK))
        ],
        "loopback ports": lambda: [check_ports(connect_on_loopback)],
        "Slurm": lambda: [check_slurm(shutil.which, slurm_version)],
        "InfiniBand": lambda: [check_infiniband(INFINIBAND)],
    }
    return [result for name, check in checks.items() for result in run_check(name, check)]


def page(results: list[Result]) -> str:
    """Return the results as aligned text of at most 100 columns."""
    width = max(len(result.name) for result in results)
    return "\n".join(
        textwrap.fill(
            result.text,
            100,
            initial_indent=f"{result.status}  {result.name:{width}}  ",
            subsequent_indent=" " * (width + 6),
            break_on_hyphens=False,
        )
        for result in results
    )


def run_check(name: str, check: Callable[[], Iterable[Result]]) -> list[Result]:
    """Run a check and return its results, or one failed result if it raises."""
    try:
        return list(check())
    except Exception as error:
        reason = " ".join(str(error).split())
        return [Result("!!", name, f"the check failed: {type(error).__name__}: {reason}")]


def check_python(version: tuple[int, ...]) -> Result:
    """Check the Python version, (major, minor)."""
    name = f"{version[0]}.{version[1]}"
    if version in PYTHONS:
        return Result("ok", "Python", name)
    return Result("!!", "Python", f"{name} is not supported; install Python 3.11 or 3.12")


def check_packages(
    required: dict[str, str | None], installed: Callable[[str], str | None]
) -> Iterator[Result]:
    """Check that the required packages are installed, with the pinned versions.

    `required` maps names to a version, or None for any; `installed` returns a package's version,
    or None.
    """
    wrong = list(_wrong_packages(required, installed))
    yield from wrong
    if not required:
        yield Result("!!", "packages", f"{DISTRIBUTION} lists no requirements; install it again")
    elif not wrong:
        pins = sum(version is not None for version in required.values())
        yield Result("ok", "packages", f"{len(required)} installed, {pins} of them pinned")


def _wrong_packages(
    required: dict[str, str | None], installed: Callable[[str], str | None]
) -> Iterator[Result]:
    for name, pin in required.items():
        install = f"pip install '{name}=={pin}'" if pin else f"pip install {name}"
        try:
            version = installed(name)
        except Exception:
            yield Result("!!", "packages", f"{name} has unreadable metadata; install it again")
            continue
        if version is None:
            yield Result("!!", "packages", f"{name} is not installed: {install}")
        elif pin and version.partition("+")[0] != pin:
            yield Result("!!", "packages", f"{name} is {version}, not {pin}: {install}")


def check_gpus(gpus: list[Any], driver: str | None) -> Iterator[Result]:
    """Check the GPUs, given torch's properties of each, and say which weight formats they serve.

    `driver` is the NVIDIA driver's version, None without a driver.
    """
    if not gpus and driver:
        yield Result(
            "!!",
            "GPUs",
            f"driver {driver} is installed, but torch sees no GPU; check that the driver is new "
            "enough for torch's CUDA, and that CUDA_VISIBLE_DEVICES does not hide them",
        )
    elif not gpus:
        yield Result("--", "GPUs", "none; only needed for larger models than the quickstart's")
    if not gpus:
        yield Result(
            "ok",
            "weight formats",
            f"{', '.join(MIN_CAPABILITY)} (SGLang on the CPU); only `qurl eval format=fp8-block` "
            "needs a GPU",
        )
        return
    kinds = Counter(
        f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        for gpu in gpus
    )
    described = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    yield Result("ok", "GPUs", f"{described}; driver {driver or 'unknown'}")
    capability = min((gpu.major, gpu.minor) for gpu in gpus)
    served = [name for name, minimum in MIN_CAPABILITY.items() if capability >= minimum]
    others = [
        f"{name} needs compute capability {minimum[0]}.{minimum[1]}"
        for name, minimum in MIN_CAPABILITY.items()
        if capability < minimum
    ]
    text = "; ".join([", ".join(served) or "none", *others])
    yield Result("ok" if served else "!!", "weight formats", text)


def check_transformer_engine(has_gpu: bool, is_installed: bool) -> Result:
    """Check that Transformer Engine is not installed on a machine without a GPU."""
    name = "Transformer Engine"
    if has_gpu and is_installed:
        return Result("ok", name, "installed")
    if is_installed:
        return Result(
            "!!",
            name,
            "installed without a GPU, where it breaks megatron.core: "
            "pip uninstall transformer-engine",
        )
    return Result(
        "--", name, "not installed; only needed for faster layers on a GPU (requirements-gpu.txt)"
    )


def check_shared_memory(free_bytes: int) -> Result:
    """Check the free space of /dev/shm."""
    free = f"{free_bytes / GIB:.1f} GiB free in {SHARED_MEMORY}"
    use = "weights travel through it between processes of one machine"
    if free_bytes >= ENOUGH_SHARED_BYTES:
        return Result("ok", "shared memory", f"{free}; {use}")
    return Result(
        "!!",
        "shared memory",
        f"{free}; {use}. Make room for {ENOUGH_SHARED_BYTES / GIB:.0f} GiB (docker run "
        "--shm-size=8g), or lower quantization.bucket_bytes",
    )


def check_disk(directory: Path, free_bytes: int, is_writable: bool) -> Result:
    """Check that runs can be written to a directory."""
    free = f"{free_bytes / GIB:.1f} GiB free in {directory}"
    if not is_writable:
        return Result("!!", "disk", f"{directory} is not writable; set output_dir")
    if free_bytes < ENOUGH_DISK_BYTES:
        return Result("!!", "disk", f"{free}, little for checkpoints; make room or set output_dir")
    return Result("ok", "disk", f"{free}; runs are written to output_dir, here by default")


def check_ports(connect: Callable[[], None]) -> Result:
    """Check that one process can reach another on loopback."""
    try:
        connect()
    except OSError as error:
        return Result(
            "!!",
            "loopback ports",
            f"127.0.0.1 cannot be used ({error}); learner and servers meet there. Bring the "
            "loopback interface up and allow connections to it",
        )
    return Result("ok", "loopback ports", "127.0.0.1 can be bound and reached")


def check_slurm(which: Callable[[str], str | None], version: Callable[[], str]) -> Result:
    """Check Slurm's commands; `which` returns a command's path, or None."""
    missing = [command for command in SLURM_COMMANDS if which(command) is None]
    if len(missing) == len(SLURM_COMMANDS):
        return Result("--", "Slurm", "absent; only needed for `qurl launch --executor slurm`")
    if missing:
        return Result("!!", "Slurm", f"{', '.join(missing)} not found; complete the Slurm client")
    return Result("ok", "Slurm", f"{version()}: {', '.join(SLURM_COMMANDS)}")


def check_infiniband(directory: Path) -> Result:
    """Check for InfiniBand devices in a sysfs directory."""
    devices = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if not devices:
        return Result("--", "InfiniBand", "no devices; only needed for fast runs on several nodes")
    return Result("ok", "InfiniBand", f"{len(devices)} devices: {', '.join(devices)}")


def requirements() -> dict[str, str | None]:
    """Return the package's requirements: name -> pinned version, or None.

    They come from the installed distribution, or if there is none from the checkout's
    requirements.txt.
    """
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    lines = [line for line in declared if "extra ==" not in line]
    checkout = Path(__file__).parents[1] / "requirements.txt"
    if not lines and checkout.is_file():
        lines = checkout.read_text().partition("# development")[0].splitlines()
    return parse_requirements(lines)


def parse_requirements(lines: list[str]) -> dict[str, str | None]:
    """Return name -> pinned version, or None, of requirement lines such as `torch==2.11.0`."""
    matches = (re.match(r"([\w.-]+)(?:\[.*?\])?\s*(?:==\s*([^\s;,#]+))?", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Return whether a module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def visible_gpus() -> list[Any]:
    """Return torch's properties of the GPUs; torch is imported here, and may be broken."""
    from qurl_megatron import device

    return device.gpu_properties()


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(query).splitlines()
    return lines[0].strip() if lines else None


def slurm_version() -> str:
    """Return Slurm's version, such as `slurm 23.11.4`."""
    return _output(["sinfo", "--version"]).strip() or "unknown version"


def connect_on_loopback() -> None:
    """Bind a port of 127.0.0.1 and connect to it.

    Raises:
        OSError: it cannot be bound or reached.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname(), timeout=PROBE_TIMEOUT_S):
            pass


def _output(command: list[str]) -> str:
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
