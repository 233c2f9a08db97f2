"""What happens on a machine with a GPU, shown without one.

Environments are read, and a recorder stands for CUDA's events. `benchmarks/gpu` runs the rest on a
GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import timing
from qurl_megatron import device
from qurl_megatron.config.schema import ConfigError, ServerConfig
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.rollout.start import environment, start


def test_deepgemm_compiles_a_few_of_its_kernels_at_a_servers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    spec = ServerSpec(tmp_path, ServerConfig(), "fp8-block", 64)
    from sglang.srt.environ import envs

    assert envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get() is False
    for name, value in environment(spec).items():
        monkeypatch.setenv(name, value)
    assert envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get() is True


def test_int8_is_refused_on_blackwell_which_has_no_product_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = [SimpleNamespace(major=major, minor=0, total_memory=80 * 10**9) for major in (9, 10)]
    monkeypatch.setattr(device, "gpu_properties", lambda: gpus)
    refused = (
        r"^weight format int8: needs compute capability 9.0 or less, and a GPU of this machine has "
        r"10.0, which serves bf16, int4, fp8, fp8-tensor$"
    )
    monkeypatch.chdir(tmp_path)
    words = ["quantization.format=int8"]
    with pytest.raises(ConfigError, match=refused):
        start(ServerSpec(tmp_path, ServerConfig(), "int8", 64), tmp_path / "log", seed=0)
    with pytest.raises(ConfigError, match=refused):
        prepare_new("quickstart", words, num_gpus=2)


class Gpu:
    """Records what a timer asks of CUDA; each pass is queued within `queued_in` spins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queued_in: int) -> None:
        self.calls: list[str] = []
        self.queued_in = queued_in
        monkeypatch.setattr(device, "accelerator", lambda: "cuda")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.calls.append("spin"))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def record(self) -> None:
        self.calls.append("record")

    def query(self) -> bool:
        return self.calls.count("spin") < self.queued_in

    def synchronize(self) -> None:
        self.calls.append("wait")

    def elapsed_time(self, end: Gpu) -> float:
        return 4.0


@pytest.mark.parametrize("queued_in", [1, 2])
def test_a_pass_is_timed_behind_a_spin_so_that_python_is_not(
    monkeypatch: pytest.MonkeyPatch, queued_in: int
) -> None:
    gpu = Gpu(monkeypatch, queued_in)
    time_s = timing._time(lambda turn: gpu.calls.append("pass"), 0)
    assert time_s == 0.004
    once = ["synchronize", "spin", "record", "pass", "record", "wait"]
    assert gpu.calls == once * queued_in


def test_a_pass_that_waits_for_the_gpu_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, queued_in=99)
    with pytest.raises(RuntimeError, match="waits for the GPU"):
        timing._time(lambda turn: None, 0)
