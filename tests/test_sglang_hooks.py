"""SGLang applies every hook of the plugin, or its process ends; on a GPU: `test_gpu_start.py`."""

import os
import re

import pytest

from distributed import run_ranks
from sglang_hooks import load_hooks


def load_with_and_without_a_place() -> tuple[dict[str, str], str]:
    """Return what the hooks fit, and how the process ends if SGLang lacks a place of one."""
    os.environ["SGLANG_PLATFORM"] = "qurl_cpu"
    found = load_hooks()
    from sglang.srt import plugins
    from sglang.srt.managers.scheduler import Scheduler

    del Scheduler.run_batch
    plugins.HookRegistry.reset()
    plugins._plugins_loaded = False
    with pytest.raises(RuntimeError) as ended:
        plugins.load_plugins()
    return found, str(ended.value)


@pytest.fixture(scope="module")
def loaded() -> tuple[dict[str, str], str]:
    return run_ranks(load_with_and_without_a_place, 1)[0]


def test_every_hook_takes_what_sglang_gives_it_without_a_gpu(
    loaded: tuple[dict[str, str], str],
) -> None:
    assert set(loaded[0].values()) == {"fits"}, loaded[0]


def test_a_hook_without_a_place_ends_the_process_with_its_name(
    loaded: tuple[dict[str, str], str],
) -> None:
    missing = r"^SGLang \d+\.\S+ has no sglang.srt.managers.scheduler.Scheduler.run_batch, which"
    assert re.match(missing, loaded[1])
