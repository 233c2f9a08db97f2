"""Ranks from the launcher's variables, work done once for all, and the CPU runtime's borders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed import run_ranks
from qurl_megatron import device

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def environment(monkeypatch):
    for name in (*LAUNCHERS, *SLURM):
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(n, str(v)) for n, v in variables.items()]


def where() -> tuple[int, int, int]:
    return device.rank(), device.world_size(), device.local_rank()


def test_a_process_of_no_launcher_is_alone(environment):
    assert where() == (0, 1, 0)


def test_ranks_are_those_of_the_slurm_step(environment):
    environment(SLURM_PROCID=9, SLURM_LOCALID=1, SLURM_STEP_NUM_TASKS=16)
    assert where() == (9, 16, 1)


def test_the_batch_shell_is_no_rank(environment):
    environment(SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NTASKS=16)
    assert where() == (0, 1, 0)


def test_torchruns_variables_go_before_slurms(environment):
    environment(SLURM_PROCID=1, SLURM_LOCALID=0, SLURM_STEP_NUM_TASKS=2)
    environment(RANK=11, WORLD_SIZE=16, LOCAL_RANK=3)
    assert where() == (11, 16, 3)


def test_ranks_without_a_meeting_point_are_told_what_is_missing(environment):
    environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1")
    with pytest.raises(RuntimeError, match="MASTER_PORT not set"):
        device.initialize_distributed()


def once() -> tuple[str, str]:
    device.initialize_distributed()
    value = device.from_rank_zero(lambda: f"from rank {device.rank()}")
    with pytest.raises((KeyError, RuntimeError)) as failure:
        device.from_rank_zero(lambda: {}["no such key"])
    torch.distributed.destroy_process_group()
    return value, f"{failure.type.__name__}: {failure.value}"


def test_work_of_rank_zero_reaches_every_rank_and_so_does_its_failure():
    assert run_ranks(once, 2) == [
        ("from rank 0", "KeyError: 'no such key'"),
        ("from rank 0", "RuntimeError: rank 0 failed: KeyError: 'no such key'"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA needs no stand-in")
def test_cuda_means_cpu_inside_the_runtime_only():
    from megatron.core.tensor_parallel import random

    def patched() -> list[Any]:
        return [
            torch.cuda.current_device,
            torch.cuda.synchronize,
            random._get_cuda_rng_state,
            random._set_cuda_rng_state,
        ]

    before = patched()
    with pytest.raises(ZeroDivisionError), device.megatron_runtime():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(1, device="cuda").cuda().device.type == "cpu"
        random._set_cuda_rng_state(random._get_cuda_rng_state())
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        raise ZeroDivisionError
    assert patched() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_weights_for_a_gpu_of_ones_own_go_over_gloo(monkeypatch):
    assert device.carrier_towards([]) == "gloo"  # without a GPU everything does
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "device", lambda: torch.device("cuda", 1))
    assert device.carrier_towards([2, 3]) == "nccl"
    assert device.carrier_towards([0, 1]) == "gloo"


def test_sglangs_attention_is_missed_only_beside_a_gpu(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: spec)
    assert not device.lacks_flash_attention()
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    assert device.lacks_flash_attention()
    (tmp_path / "flash_ops.abi3.so").touch()
    assert not device.lacks_flash_attention()
