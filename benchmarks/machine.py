"""What the benchmarks share: arguments, the machine in words, spreads, memory, and ranks."""

import argparse
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import nan, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

import psutil
import torch

from qurl_megatron import device
from qurl_megatron.machine.network import free_port
from qurl_megatron.machine.processes import die_with_parent

MIB = 2**20


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_machine(*packages: str) -> None:
    """Print on one line the machine, and the versions of Python and of these packages."""
    versions = {"Python": platform.python_version(), **package_versions(packages)}
    words = [f"{processor()} ({instructions()})", f"{os.cpu_count()} cores"]
    words += [f"{name} {number}" for name, number in versions.items()]
    print(", ".join(words), flush=True)


def instructions() -> str:
    """Return the instruction set that torch uses, such as AVX512, and what multiplies INT8."""
    names = [torch.backends.cpu.get_cpu_capability()]
    if names == ["AVX512"]:  # else torch was told to use less than there is
        names += ["VNNI"] * torch.cpu._is_vnni_supported()
        names += ["AMX"] * torch.cpu._is_amx_tile_supported()
    return ", ".join(names)


def processor() -> str:
    """Return the processor's name, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def package_versions(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of these packages, "not installed" for one that is not there."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@contextmanager
def real_model(given: Path | None) -> Iterator[Path]:
    """Yield a model's directory: `given`, or else SmolLM2-135M-Instruct from its package."""
    from qurl_megatron.model import smollm2

    with tempfile.TemporaryDirectory() as directory:
        if given is None:
            smollm2.write(Path(directory))
        yield given or Path(directory)


def spread(values: Collection[float], form: str = ".2f") -> str:
    """Return in words the median of `values`, and the least and the most."""
    return f"{median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def standard_error(values: Collection[float]) -> float:
    """Return the standard error of the mean of `values`; that of a single value is not known."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else nan


def reset_peak() -> None:
    """Reset the peak that `peak_bytes` returns."""
    if device.accelerator() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def held_bytes() -> int:
    """Return the resident memory of this process; on a GPU, what torch has allocated there."""
    if device.accelerator() == "cuda":
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the most that `held_bytes` was since `reset_peak`."""
    if device.accelerator() == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak)


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Run `function(*arguments)` on this many ranks; return the result of global rank 0.

    Each rank is a process of its own with one thread. The ranks find each other through torchrun's
    variables. If one fails, the others are ended, and its error is raised.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result"
        words = (ranks, free_port(), result, function, arguments)
        torch.multiprocessing.spawn(_run_rank, words, nprocs=ranks)
        return pickle.loads(result.read_bytes())


def _run_rank(
    rank: int, ranks: int, port: int, result: Path, function: Callable[..., Any], arguments: Any
) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.update({name: str(value) for name, value in variables.items()})
    die_with_parent()  # torch asks for SIGINT, which a shell's background ignores
    torch.set_num_threads(1)
    returned = function(*arguments)
    if rank == 0:
        result.write_bytes(pickle.dumps(returned))
