"""A server's start on an H100, without one: its hooks, its arguments, a kernel that it compiles.

One process shows all three, because it imports SGLang's CUDA packages for ten seconds.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

import stub_driver
from qurl_megatron.config.schema import Config
from qurl_megatron.config.server_options import command_line
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.launch.recipe import load_recipe, recipe_names
from qurl_megatron.rollout import start


@pytest.fixture(scope="module")
def servers() -> list[Config]:
    """Return the configuration of every recipe, for a model without experts."""
    configs = [load_recipe(name).config for name in recipe_names()]
    for config in configs:
        config.rollout.server.expert_parallel_size = 1
    return configs


@pytest.fixture(scope="module")
def started(servers: list[Config], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the process found, and `directory`, in which it has compiled."""
    directory = tmp_path_factory.mktemp("server")
    model = Qwen2Config(num_attention_heads=16, num_key_value_heads=8, vocab_size=512)
    model.architectures = ["Qwen2ForCausalLM"]
    model.save_pretrained(directory)
    words = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_driver.leave_only_packages(monkeypatch, directory)
        for config in servers:
            server, length = config.rollout.server, config.rollout.max_length
            method = config.quantization.format
            spec = ServerSpec(directory, server, method, length)
            words.append(command_line({**start.options(spec, seed=0), **server.options}))
        environment = start.environment(spec)
        output = stub_driver.run(
            "gpu_start",
            json.dumps(words),
            directory=directory,
            environment={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
    found: dict[str, Any] = {"environment": environment, "directory": directory}
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def test_every_hook_takes_what_sglang_gives_it_on_a_gpu(started: dict[str, Any]) -> None:
    assert started["platform"] == "CudaSRTPlatform"
    assert set(started["hooks"].values()) == {"fits"}, started["hooks"]


def test_servers_on_an_h100_start_as_the_docs_say(
    servers: list[Config], started: dict[str, Any]
) -> None:
    """Their kernels and graphs, which take most of a start, for the servers of every recipe."""
    for config, resolved in zip(servers, started["arguments"], strict=True):
        graphs = resolved.pop("cuda_graph_config")
        assert graphs["decode"]["max_bs"] == config.rollout.server.max_running_requests
        assert len(graphs["decode"]["bs"]) <= 52
        assert graphs["prefill"]["backend"] == "disabled"
        del resolved["chunked_prefill_size"]
        assert resolved == {
            "attention_backend": "fa3",
            "sampling_backend": "pytorch",
            "enable_fp32_lm_head": True,
            "mem_fraction_static": config.rollout.server.mem_fraction_static,
            "disable_overlap_schedule": False,
            "disable_custom_all_reduce": False,
            "moe_runner_backend": "auto",
        }


def test_servers_of_an_unpacked_kit_use_tritons_attention(started: dict[str, Any]) -> None:
    """The kit leaves out the other."""
    assert started["attention_of_kit"] == "triton"


def test_a_kernel_is_compiled_with_what_pip_installs(started: dict[str, Any]) -> None:
    environment, directory = started["environment"], started["directory"]
    assert Path(environment["CUDA_HOME"]).parent == Path(environment["SGLANG_CACHE_DIR"])
    assert started["compiled"] == "clamp_position"
    cache = Path(environment["SGLANG_JIT_CACHE_DIR"])
    assert len(list(cache.glob("sm90a/*/build-*/deps-*/*.so"))) == 1
    assert not (directory / ".cache" / "sglang").exists()  # nothing in the home directory
