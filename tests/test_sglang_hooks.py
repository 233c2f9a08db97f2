"""SGLang applies every hook of the plugin, with a GPU and without one, or its process ends."""

import json
import os
from pathlib import Path

import pytest

import stub_driver
from distributed import run_ranks
from sglang_hooks import load_hooks


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
    found = json.loads(stub_driver.run("sglang_hooks", directory=tmp_path).splitlines()[-1])
    assert found == {"platform": "CudaSRTPlatform", "hooks": applied}


def test_a_hook_without_a_place_ends_the_process_with_its_name() -> None:
    missing = r"SGLang \d+\.\S+ has no sglang.srt.managers.scheduler.Scheduler.run_batch, which"
    with pytest.raises(RuntimeError, match=missing):
        run_ranks(hooks_without_a_method, 1)
