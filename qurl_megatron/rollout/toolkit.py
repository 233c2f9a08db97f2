"""The compilers of servers on a GPU, and the folder of their compiled kernels.

SGLang compiles small kernels when a server first needs them: with nvcc and a C++ compiler, through
ninja. Triton compiles a C file, for which it needs Python's headers. The packages in
requirements.txt have nvcc, CUDA's headers and its libraries, but in folders in which SGLang does
not look. A toolkit made of links to them is used where the machine has none of its own.

Compiled kernels are kept on the machine itself, in a folder of this user. SGLang's compilers depend
on file locks, which the file system of a home directory may lack.
"""

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from qurl_megatron.config.schema import ConfigError

SYSTEM = Path("/usr/local/cuda")
NEEDED = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")
INSTALL = "install a CUDA 13 toolkit and set CUDA_HOME to it, or install requirements.txt"


@functools.cache
def environment() -> Mapping[str, str]:
    """Return the variables with which a server finds its compilers and their compiled kernels.

    Raises:
        ConfigError: something is missing, or the folder belongs to somebody else.
    """
    if missing := missing_compilers():
        raise ConfigError(f"a server on a GPU compiles kernels: {'; '.join(missing)}")
    cache = cache_dir()
    return {
        "CUDA_HOME": str(find_toolkit(cache)),
        # ninja is beside this Python, whose environment may not be activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "SGLANG_CACHE_DIR": str(cache),
        "SGLANG_JIT_CACHE_DIR": str(cache / "jit"),
    }


def missing_compilers() -> list[str]:
    """Return, for each missing thing beside CUDA's toolkit, what it is and how to install it."""
    found = {
        "no C++ compiler (c++ or CXX): apt install g++": shutil.which(os.environ.get("CXX", "c++")),
        "no C compiler (cc or CC): apt install gcc": shutil.which(os.environ.get("CC", "cc")),
        "no Python.h: apt install python3-dev": _python_header().exists(),
    }
    return [problem for problem, is_there in found.items() if not is_there]


def _python_header() -> Path:
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


def find_toolkit(cache: Path) -> Path:
    """Return a complete CUDA toolkit; in `cache` one may be made of links.

    CUDA_HOME comes first, then the toolkit of the nvcc on PATH, /usr/local/cuda and the packages.

    Raises:
        ConfigError: there is no toolkit, or the one that CUDA_HOME names is not complete.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if given := os.environ.get(name):
            if missing := _missing(Path(given)):
                raise ConfigError(
                    f"{name}={given}: no CUDA toolkit to compile with, it has no {missing}; unset "
                    f"{name}, or {INSTALL}"
                )
            return Path(given)
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).parent.parent] if nvcc else []
    for place in [*places, SYSTEM]:
        if not _missing(place):
            return place
    spec = importlib.util.find_spec("nvidia")
    for packages in (spec.submodule_search_locations or []) if spec else []:
        if (Path(packages) / "cu13").is_dir() and not _missing(root := _link(packages, cache)):
            return root
    raise ConfigError(f"no CUDA toolkit, with which a server on a GPU compiles kernels: {INSTALL}")


def _missing(toolkit: Path) -> str:
    """Return what a toolkit lacks, or an empty string."""
    return " and no ".join(name for name in NEEDED if not (toolkit / name).exists())


def _link(packages: str, cache: Path) -> Path:
    """Return a toolkit made of links to CUDA's packages; make it if it is not there yet."""
    installed = Path(packages) / "cu13"
    root = cache / f"toolkit{packages.replace('/', '-')}"
    links = {root / name: installed / name for name in ("bin", "include", "nvvm")}
    for library in installed.glob("lib/lib*"):
        links[root / "lib64" / library.name] = library
        name, dot_so, _ = library.name.partition(".so")
        links[root / "lib64" / f"{name}{dot_so}"] = library  # the linker asks for no version
    (root / "lib64").mkdir(parents=True, exist_ok=True)
    for link, target in links.items():
        if not link.is_symlink():
            # Another server may make it now, so the link is renamed into its place.
            new = link.with_name(f"{link.name}.{os.getpid()}")
            new.symlink_to(target)
            new.rename(link)
    return root


def cache_dir() -> Path:
    """Return the folder of compiled kernels: SGLANG_CACHE_DIR, or one of this user's own in /tmp.

    Raises:
        ConfigError: somebody else could write to it. Servers load programs from there.
    """
    if given := os.environ.get("SGLANG_CACHE_DIR"):
        return Path(given)
    folder = Path(tempfile.gettempdir()) / f"qurl-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: others may write to this folder, from which servers load programs; remove "
            "it, or set SGLANG_CACHE_DIR to another"
        )
    return folder
