"""What happens on a machine with a GPU, shown without one.

Environments are read, and a recorder stands for CUDA's events. `benchmarks/gpu` runs the rest on a
GPU.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

import stub_driver
from benchmarks.gpu import kit, timing
from qurl_megatron import device
from qurl_megatron.config.schema import ConfigError, ServerConfig, WeightFormat
from qurl_megatron.config.server_options import command_line
from qurl_megatron.launch.prepare import load_recipe, prepare_new, recipe_names
from qurl_megatron.rollout.server import ServerPlan


def test_deepgemm_compiles_a_few_of_its_kernels_at_a_servers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    plan = ServerPlan(tmp_path, ServerConfig(), "fp8-block", 64, tmp_path / "log", seed=0)
    from sglang.srt.environ import envs

    assert envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get() is False
    for name, value in plan.environment().items():
        monkeypatch.setenv(name, value)
    assert envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get() is True


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_integers_are_refused_on_blackwell_which_has_no_product_for_them(
    weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "capabilities", lambda: [(9, 0), (10, 0)])
    refused = (
        f"^weight format {weight_format}: needs compute capability 9.0 or less, and a GPU of this "
        r"machine has 10.0, which serves bf16, fp8, fp8-tensor$"
    )
    monkeypatch.chdir(tmp_path)
    words = [f"quantization.format={weight_format}"]
    with pytest.raises(ConfigError, match=refused):
        ServerPlan(tmp_path, ServerConfig(), weight_format, 64, tmp_path / "log", seed=0).start()
    with pytest.raises(ConfigError, match=refused):
        prepare_new("quickstart", words, num_gpus=2)


def test_servers_on_an_h100_start_as_the_docs_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their kernels and graphs, which take most of a start, for the servers of every recipe."""
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "lacks_flash_attention", lambda: False)
    model = Qwen2Config(num_attention_heads=16, num_key_value_heads=8, vocab_size=512)
    model.architectures = ["Qwen2ForCausalLM"]
    model.save_pretrained(tmp_path)
    servers = [load_recipe(name).recipe() for name in recipe_names()]
    words = []
    for config in servers:
        server, length = config.rollout.server, config.rollout.max_length
        method = config.quantization.format
        server.expert_parallel_size = 1  # the model is dense
        plan = ServerPlan(tmp_path, server, method, length, tmp_path / "log", seed=0)
        words.append(command_line({**plan.options(), **server.options}))
    output = stub_driver.run("server_arguments", json.dumps(words), directory=tmp_path)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    for config, resolved in zip(servers, found, strict=True):
        graphs = resolved.pop("cuda_graph_config")
        assert graphs["decode"]["max_bs"] == config.rollout.server.max_running_requests
        assert len(graphs["decode"]["bs"]) <= 52
        assert len(graphs["prefill"]["bs"]) <= 58
        assert graphs["prefill"]["max_bs"] == resolved.pop("chunked_prefill_size")
        assert resolved == {
            "attention_backend": "fa3",
            "sampling_backend": "pytorch",
            "enable_fp32_lm_head": True,
            "mem_fraction_static": config.rollout.server.mem_fraction_static,
            "disable_overlap_schedule": False,
            "disable_custom_all_reduce": False,
            "moe_runner_backend": "auto",
        }


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


def test_the_kit_has_pynvml_which_flashinfer_imports() -> None:
    owners = importlib.metadata.packages_distributions()["pynvml"]
    assert {kit.canonical(owner) for owner in owners} & kit.missing_packages({}).keys()


def test_installing_the_kit_names_the_toolkit(tmp_path: Path) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    assert kit.toolkit_exports(str(nvcc)) == [
        f"export CUDA_HOME={tmp_path}/cuda",
        f"export LIBRARY_PATH={tmp_path}/cuda/lib64:$LIBRARY_PATH",
    ]
    assert "nvcc is not on PATH" in kit.toolkit_exports(None)[0]


def test_tests_for_a_gpu_import_only_what_the_kit_packs() -> None:
    packed = kit.missing_packages({}).keys() | kit.BASE_PACKAGES | {"pytest"}
    owners = importlib.metadata.packages_distributions()
    tests = Path(__file__).parent
    # Skipped where it is not installed; the repository.
    ours = {"transformer_engine", "transformer_engine_torch", "qurl_megatron"}
    unread = [*(tests / "gpu").glob("*.py")]
    while unread:
        for node in ast.walk(ast.parse(unread.pop().read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for root in {name.partition(".")[0] for name in names} - ours:
                if (helper := tests / f"{root}.py").exists():
                    ours.add(root)
                    unread.append(helper)
                elif root not in sys.stdlib_module_names:
                    assert {kit.canonical(owner) for owner in owners[root]} & packed, root
