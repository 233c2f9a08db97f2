"""What happens on a machine with a GPU, shown without one.

Environments are read, libraries are asked for their signatures, memory is added up, and a recorder
stands for CUDA's events. `benchmarks/gpu` runs the rest on a GPU.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import kit, policy, throughput, timing
from qurl_megatron import device
from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.planning.memory import GIB
from qurl_megatron.rollout.server import ServerPlan

H100_BYTES = int(79.1 * GIB)


def test_deepgemm_compiles_a_few_of_its_kernels_at_a_servers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    plan = ServerPlan(tmp_path, ServerConfig(), "fp8-block", 64, tmp_path / "log", seed=0)
    assert plan.environment()["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "1"
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils

    assert "SGLANG_JIT_DEEPGEMM_FAST_WARMUP" in inspect.getsource(compile_utils)


def test_a_gpu_whose_deepgemm_takes_other_scales_is_refused_for_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.layers import deep_gemm_wrapper

    from qurl_megatron.sglang_plugin.formats import Fp8BlockConfig

    config = Fp8BlockConfig()
    method, layer = config.linear_method(config), torch.nn.Module()
    create: Any = method.create_scales
    monkeypatch.setattr(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", True)
    with pytest.raises(ValueError, match=r"compute capability 10\); use format fp8"):
        create(layer, 128, [128], None)
    monkeypatch.setattr(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", False)
    create(layer, 128, [128], None)
    assert layer.weight_scale_inv.shape == (1, 1)


@pytest.mark.parametrize(
    ("operator", "arguments", "called"),
    [
        ("int8_scaled_mm", "mat_a mat_b scales_a scales_b out_dtype bias", "Int8LinearMethod"),
        ("fp8_scaled_mm", "mat_a mat_b scales_a scales_b out_dtype bias", "Fp8LinearMethod"),
        ("sgl_per_token_quant_fp8", "input output_q output_s", "Fp8LinearMethod"),
    ],
)
def test_the_library_for_hopper_has_the_operators_that_layers_call(
    operator: str, arguments: str, called: str
) -> None:
    from qurl_megatron.sglang_plugin import linear

    folder = Path(str(distribution("sglang-kernel").locate_file("sgl_kernel")))
    library = (folder / "sm90" / "common_ops.abi3.so").read_bytes()
    (schema,) = set(re.findall(rb"\0(" + operator.encode() + rb"\([^\0]*\) -> [^\0]*)\0", library))
    parsed = torch._C.parse_schema(schema.decode().replace("Tensor!", "Tensor(a!)", 1))
    assert [argument.name for argument in parsed.arguments] == arguments.split()
    wrapper = ast.parse((folder / "gemm.py").read_text())
    (function,) = (
        node for node in wrapper.body if isinstance(node, ast.FunctionDef) and node.name == operator
    )
    assert [argument.arg for argument in function.args.args] == arguments.split()
    source = inspect.getsource(getattr(linear, called).multiply_cuda)
    call = next(
        node
        for node in ast.walk(ast.parse(inspect.cleandoc(source)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == operator
    )
    given = arguments.split()[: len(call.args)] + [str(keyword.arg) for keyword in call.keywords]
    assert given == arguments.split()


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


def test_the_kit_has_what_flashinfer_imports_of_nvidia() -> None:
    flashinfer = Path(str(distribution("flashinfer-python").locate_file("flashinfer")))
    imported = {
        alias.name
        for node in ast.parse((flashinfer / "utils.py").read_text()).body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "pynvml" in imported
    owner = next(
        name
        for name in kit.NEEDED_OF_NVIDIA
        if any(str(file) == "pynvml.py" for file in distribution(name).files or [])
    )
    assert owner in kit.missing_packages({})


def test_installing_the_kit_names_the_toolkit(tmp_path: Path) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    assert kit.toolkit_exports(str(nvcc)) == [
        f"export CUDA_HOME={tmp_path}/cuda",
        f"export LIBRARY_PATH={tmp_path}/cuda/lib64:$LIBRARY_PATH",
    ]
    assert "nvcc is not on PATH" in kit.toolkit_exports(None)[0]


def test_a_32b_server_and_its_policy_fit_beside_each_other_on_80_gb() -> None:
    hidden, intermediate, layers, heads, key_value_heads = policy.SHAPES["32B"]
    head_dim = hidden // heads
    layer = hidden * (2 * heads + 2 * key_value_heads) * head_dim + 3 * hidden * intermediate
    embeddings = 2 * policy.VOCABULARY * hidden
    learner_bytes = 2 * (layer + embeddings)
    graphs_bytes, context_bytes = 3 * GIB, GIB // 2  # E: of a server, and of each process
    # The learner has two buckets, or one tensor that is larger; the server has one.
    buckets_bytes = 3 * max(throughput.BUCKET_BYTES, 2 * policy.VOCABULARY * hidden)
    beside = learner_bytes + buckets_bytes + graphs_bytes + 2 * context_bytes
    assert beside <= throughput.RESERVED_BYTES
    fraction = throughput.static_fraction(H100_BYTES)
    assert 0.8 <= fraction < 0.85
    cache_bytes = fraction * H100_BYTES - 2 * (layers * layer + embeddings)
    cache_tokens = cache_bytes / (layers * 2 * key_value_heads * head_dim * 2)
    # BF16: batches of 1 and 16 sequences of 1536 tokens, up to twice the cache, and no more.
    assert [batch for batch in throughput.BATCHES if batch * 1536 <= 2 * cache_tokens] == [1, 16]


def test_tests_for_a_gpu_import_only_what_the_kit_packs() -> None:
    packed = kit.missing_packages({}).keys() | kit.BASE_PACKAGES | {"pytest"}
    owners = importlib.import_module("importlib.metadata").packages_distributions()
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
