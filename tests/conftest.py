import gc
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from answering import Address
from qurl_megatron.config.schema import Config

# A worker takes file after file. The longest are first, so that none is left over at the end.
LONGEST_FILES = [
    "test_rehearsal",
    "test_learner",
    "test_checkpoint",
    "test_rooms",
    "test_reshard",
    "test_proof_benchmark",
    "test_cli",
    "test_gpu_start",
    "test_moe_kernels",
    "test_refusals",
    "test_adapters_on_their_way",
    "test_recipe",
    "test_plan",
    "test_experiment",
    "test_quantized_forward",
    "test_agents",
    "test_reward_function",
    "test_scoring",
    "test_preflight",
    "test_publish",
    "test_export",
    "test_transformer_engine_layers",
    "test_packaging",
    "test_adapters",
    "test_report",
    "test_memory",
    "test_delta_publish",
    "test_quantize_kernels",
    "test_smollm2",
    "test_fuzz",
    "test_critic",
    "test_sglang_moe",
    "test_mismatch",
    "test_docs",
    # in e2e
    "test_training",
    "test_quickstart",
    "test_faults",
    "test_sleep",
    "test_kills",
    "test_adapted_servers",
    "test_fleet",
    "test_server",
    "test_outputs",
    "test_versions",
    "test_moe_server",
    "test_asynchronous",
    "test_servers_at",
    "test_hybrid_server",
]

# On a busy machine an example may take any time.
hypothesis.settings.register_profile("qurl", deadline=None)
hypothesis.settings.load_profile("qurl")


@pytest.hookimpl(optionalhook=True)  # pytest runs without xdist too
def pytest_xdist_setupnodes() -> None:
    """Have workers, and the ranks that they start, be forks of one process, unless there is a GPU.

    CUDA refuses to work in forks of a process that asked for a GPU, as the imports do.
    """
    import execnet.gateway_io

    import forks
    from distributed import PRELOADED
    from qurl_megatron import device

    if device.accelerator() == "cpu":
        forks.begin(*PRELOADED)
        execnet.gateway_io.Popen2IOMaster = forks.Worker  # type: ignore[misc, assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort test files by how long they take; the tests of a file keep their order."""
    place = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    """Leave what the test files imported out of garbage collections: it is never garbage."""
    gc.freeze()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up SGLang's models and loaders, without a server."""
    import sglang_loader  # here, so that tests which do not need it do not import torch
    from tiny import build_tiny_model

    with sglang_loader.engine(build_tiny_model(tmp_path_factory.mktemp("engine"))):
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model."""
    from tiny import build_tiny_model  # here, because it imports torch

    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a real model, SmolLM2-135M-Instruct."""
    from qurl_megatron.model import smollm2

    directory = tmp_path_factory.mktemp("smollm2")
    smollm2.write(directory)
    return directory


@pytest.fixture
def address() -> Iterator[Address]:
    """Return an address that answers HTTP requests."""
    address = Address()
    with address.answering():
        yield address


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore what signals do; until a launcher takes them, they do nothing."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def short_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the quickstart few problems, a reward without processes and a model without lessons.

    Every preparation of a run generates and checks all problems, which takes seconds for 10,000.
    """
    from qurl_megatron.recipes import quickstart

    whole = quickstart.recipe

    def recipe() -> Config:
        config = whole()
        config.prompts.options["size"] = 2000
        config.reward = "exact"
        config.model_builder = "qurl_megatron.recipes.quickstart:build_model"
        return config

    monkeypatch.setattr(quickstart, "recipe", recipe)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a run's directory on a file system of its own, with 4 MB."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(run_dir)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"NOT TESTED, mounting a small disk needs root: {mounted.stderr.strip()}")
    yield run_dir
    subprocess.run(["umount", "--lazy", str(run_dir)], check=True)
