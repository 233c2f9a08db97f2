"""A driver of NVIDIA's without a GPU, with which SGLang imports what it imports on one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from qurl_megatron import device
from qurl_megatron.rollout import toolkit

# What SGLang's libraries look up in the driver. The stub's functions fail, and none is called.
FUNCTIONS = """
cuCtxFromGreenCtx cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDevResourceGenerateDesc
cuDevSmResourceSplitByCount cuDeviceGetCount cuDeviceGetDevResource cuDriverGetVersion
cuGetErrorName cuGetErrorString cuGetProcAddress cuGetProcAddress_v2 cuGreenCtxCreate
cuGreenCtxDestroy cuGreenCtxGetDevResource cuInit cuPointerGetAttribute cuStreamCreate
""".split()


def leave_only_packages(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let the machine have a GPU, no toolkit but the packages', and `directory` as its /tmp."""
    toolkit.environment.cache_clear()
    for name in ("CUDA_HOME", "CUDA_PATH", "SGLANG_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    folders = os.environ["PATH"].split(os.pathsep)
    without = [folder for folder in folders if not (Path(folder) / "nvcc").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(without))
    monkeypatch.setattr(toolkit, "SYSTEM", directory / "no toolkit")
    monkeypatch.setattr(toolkit.tempfile, "tempdir", str(directory))
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")


def run(
    module: str, *arguments: str, directory: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Run a module of the tests over the stub, which is built in `directory`; return its output."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the stub of the driver needs a C compiler")
    source = directory / "driver.c"
    source.write_text("\n".join(f"int {name}() {{ return 100; }}" for name in FUNCTIONS))
    library = directory / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-o", library, source], check=True)
    places = {"HOME": str(directory), "LD_LIBRARY_PATH": str(directory), "SGLANG_PLATFORM": ""}
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parent,
        env={**os.environ, **places, **(environment or {})},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
