"""SGLang applies every hook of the plugin, with a GPU and without one, or its process ends."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import run_ranks
from sglang_hooks import load_hooks

# What SGLang's libraries look up in the driver. The stub's functions fail, and none is called.
DRIVER = """
cuCtxFromGreenCtx cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDevResourceGenerateDesc
cuDevSmResourceSplitByCount cuDeviceGetCount cuDeviceGetDevResource cuDriverGetVersion
cuGetErrorName cuGetErrorString cuGetProcAddress cuGetProcAddress_v2 cuGreenCtxCreate
cuGreenCtxDestroy cuGreenCtxGetDevResource cuInit cuPointerGetAttribute cuStreamCreate
""".split()


def hooks_without_a_gpu() -> dict[str, str]:
    os.environ["SGLANG_PLATFORM"] = "qurl_cpu"
    return load_hooks()


def hooks_without_a_method() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins

    del Scheduler.run_batch
    load_plugins()


@pytest.fixture(scope="module")
def applied() -> dict[str, str]:
    return run_ranks(hooks_without_a_gpu, 1)[0]


def test_every_hook_takes_what_sglang_gives_it_without_a_gpu(applied: dict[str, str]) -> None:
    assert set(applied.values()) == {"fits"}, applied


def test_every_hook_takes_what_sglang_gives_it_on_a_gpu(
    applied: dict[str, str], tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the stub of the driver needs a C compiler")
    (tmp_path / "driver.c").write_text(
        "\n".join(f"int {name}() {{ return 100; }}" for name in DRIVER)
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-o", library, tmp_path / "driver.c"], check=True)
    places = {"HOME": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "sglang_hooks"],
        cwd=Path(__file__).parent,
        env={**os.environ, **places, "SGLANG_PLATFORM": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found == {"platform": "CudaSRTPlatform", "hooks": applied}


def test_a_hook_without_a_place_ends_the_process_with_its_name() -> None:
    missing = r"SGLang \d+\.\S+ has no sglang.srt.managers.scheduler.Scheduler.run_batch, which"
    with pytest.raises(RuntimeError, match=missing):
        run_ranks(hooks_without_a_method, 1)
