"""Ranks, backends and devices; work on rank 0; the runtime for machines without a GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from distributed import run_ranks
from qurl_megatron import device
from qurl_megatron.config.schema import ConfigError, ServerConfig
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.machine import gpus
from qurl_megatron.rollout.start import start

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Remove all launcher variables; return a function that sets some."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables: Any) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def test_ranks_are_those_of_torchrun_and_one_without_a_launcher(
    set_environment: Callable[..., None],
) -> None:
    set_environment()
    assert (device.rank(), device.world_size(), device.local_rank()) == (0, 1, 0)
    set_environment(RANK=11, WORLD_SIZE=16, LOCAL_RANK=3)
    assert (device.rank(), device.world_size(), device.local_rank()) == (11, 16, 3)


def succeed_and_fail_on_rank_zero() -> tuple[str, str]:
    device.initialize_distributed()
    empty: dict[str, str] = {}
    value = device.from_rank_zero(lambda: f"from rank {device.rank()}")
    with pytest.raises((KeyError, RuntimeError)) as failure:
        device.from_rank_zero(lambda: empty["no such key"])
    torch.distributed.destroy_process_group()
    return value, f"{failure.type.__name__}: {failure.value}"


def test_results_and_failures_of_rank_zero_reach_every_rank() -> None:
    assert run_ranks(succeed_and_fail_on_rank_zero, 2) == [
        ("from rank 0", "KeyError: 'no such key'"),
        ("from rank 0", "RuntimeError: rank 0 failed: KeyError: 'no such key'"),
    ]


def limits_of_the_group() -> tuple[float, str]:
    device.initialize_distributed()
    group = torch.distributed.group.WORLD
    assert group is not None
    limit_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    torch.distributed.destroy_process_group()
    return limit_s, os.environ["NCCL_CUMEM_ENABLE"]


def test_ranks_wait_for_a_long_rollout_and_share_the_servers_memory_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait in a broadcast while rank 0 samples. NCCL wants one cuMem mode on both sides."""
    from sglang.srt.server_args import ServerArgs

    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    ((limit_s, learners_mode),) = run_ranks(limits_of_the_group, 1)
    assert limit_s >= 24 * 3600
    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    assert learners_mode == str(int(defaults["enable_symm_mem"]))  # what a server sets


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU needs no CPU runtime")
def test_cuda_means_cpu_only_within_the_runtime() -> None:
    from megatron.core.tensor_parallel import random

    from qurl_megatron.learner.cpu_runtime import megatron_runtime

    def patched_functions() -> list[Any]:
        return [
            torch.cuda.current_device,
            torch.cuda.synchronize,
            random._get_cuda_rng_state,
            random._set_cuda_rng_state,
        ]

    before = patched_functions()
    with pytest.raises(ZeroDivisionError), megatron_runtime():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(1, device="cuda").cuda().device.type == "cpu"
        random._set_cuda_rng_state(random._get_cuda_rng_state())
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        raise ZeroDivisionError
    assert patched_functions() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies BF16 itself")
def test_bfloat16_products_of_a_cpu_are_sums_in_float32_rounded_once() -> None:
    from qurl_megatron.learner.cpu_runtime import bfloat16_products

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(48, 512, generator=generator).bfloat16().requires_grad_()
    bias = torch.randn(48, generator=generator).bfloat16()
    with bfloat16_products():
        out = torch.nn.functional.linear(x, weight, bias)
        out.backward(out.detach())
    assert x.grad is not None and weight.grad is not None
    exact, grad = x.detach().double() @ weight.detach().double().t() + bias.double(), out.detach()
    exact_grads = grad.double() @ weight.double(), grad.double().t() @ x.double()
    for rounded, expected in zip((out, x.grad, weight.grad), (exact, *exact_grads), strict=True):
        assert rounded.dtype == torch.bfloat16
        half_a_step = 2.0**-8 * expected.abs() + 1e-3  # and what float32 sums lose near 0
        assert ((rounded.double() - expected).abs() <= half_a_step).all()


def test_tensors_for_a_process_on_the_same_gpu_go_over_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cpu")
    assert device.backend_to([0]) == "gloo"
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "device", lambda: torch.device("cuda", 1))
    assert device.backend_to([2, 3]) == "nccl"
    assert device.backend_to([0, 1]) == "gloo"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPUs of this machine")
def test_gpus_that_torch_cannot_use_are_refused_and_hidden_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\necho 'GPU 1: NVIDIA H100'\n")
    smi.chmod(0o755)
    assert device.unusable_gpus() == ""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    refused = f"^torch sees none of this machine's 2 GPUs: install a driver .* {torch.version.cuda}"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=refused):
        prepare_new("quickstart", [], num_gpus=0)
    with pytest.raises(ConfigError, match=refused):
        start(ServerSpec(tmp_path, ServerConfig(), "int8", 64), tmp_path / "log", seed=0)
    smi.write_text("#!/bin/sh\nexec sleep 60\n")  # a broken driver
    monkeypatch.setattr(gpus, "DRIVER_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"not answered in 0.2 s: .*; restart this machine, or"):
        device.unusable_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert device.unusable_gpus() == ""
