"""A mixture of experts on the real server, in each format and over ranks and groups of ranks."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from e2e.reference import NEARER, Reference
from e2e.serving import (
    PROMPTS,
    Deployment,
    assert_checksums_match_the_held_tensors,
    assert_reloads_bit_for_bit,
    joined,
    launched,
)
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.quantization.checksum import checksum, combine
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.rollout.start import running
from tiny import build_tiny_model, quantized

torch.set_num_threads(1)

LAYERS, TOP_K = 2, 2
# Every width of a rank is whole blocks of 128.
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "num_key_value_heads": 4,
}
# By format: ranks of the server, groups of them that have different experts, the model's sizes.
# BF16 is how evaluation servers hold a model.
SERVERS: dict[WeightFormat, tuple[int, int, dict[str, int]]] = {
    "int8": (1, 1, {}),
    "bf16": (2, 2, {}),
    "int4-g32": (2, 1, {"moe_intermediate_size": 128}),
    "fp8-block": (2, 2, WHOLE_BLOCKS),
}


@dataclass(frozen=True)
class Experts:
    """A running server of experts, and what it sampled with its first weights."""

    deployment: Deployment
    size: int
    groups: int

    @cached_property
    def sampled(self) -> list[tuple[Prompt, Completion]]:
        """Two completions of each prompt."""
        self.deployment.sender.send(self.deployment.weights[0])
        groups = self.deployment.generate(PROMPTS)
        return [(p, each) for p, group in zip(PROMPTS, groups, strict=True) for each in group]

    def compare(self, weight_format: str) -> tuple[float, float]:
        """Return how far the server is from a reference in this format.

        That is the mean |log-prob difference| of sampled tokens, and the share of tokens and layers
        for which the two chose other experts.
        """
        model_dir = self.deployment.model_dirs[0]
        weights = quantized(model_dir, weight_format)
        reference = Reference(model_dir, weights, self.size, expert_parallel_size=self.groups)
        differences, others = [], []
        for prompt, completion in self.sampled:
            logprobs = reference.logprobs(prompt.token_ids, completion.token_ids)
            differences.append((torch.tensor(completion.behaviour_logprobs) - logprobs).abs())
            chosen = torch.stack(reference.routed_experts, dim=1)[:-1]
            assert completion.routed_experts is not None
            recorded = completion.routed_experts.long()
            assert recorded.shape == chosen.shape
            others.append((recorded.sort()[0] != chosen.sort()[0]).any(-1).float().flatten())
        return torch.cat(differences).mean().item(), torch.cat(others).mean().item()


def skip_without_gpus(size: int) -> None:
    """Skip a test that needs a server of more ranks than this machine has GPUs, if it has any."""
    if 0 < torch.cuda.device_count() < size:
        pytest.skip(f"{size} ranks need a GPU each")


@pytest.fixture(scope="module", params=SERVERS)
def experts(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Experts]:
    own, directory = request.param, tmp_path_factory.mktemp(request.param)
    size, groups, dimensions = SERVERS[own]
    skip_without_gpus(size)
    model: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "num_experts_per_tok": TOP_K,
        **dimensions,
    }
    with (
        launched(
            directory,
            own,
            size,
            groups,
            records_routing=True,
            architecture="qwen3_moe",
            **model,
        ) as server,
        joined(*server, own, (LAYERS, TOP_K)) as deployment,
    ):
        yield Experts(deployment, size, groups)


def test_logprobs_and_chosen_experts_are_those_of_the_codes_that_were_sent(
    experts: Experts,
) -> None:
    own = experts.deployment.weight_format
    compared = {each: experts.compare(each) for each in {"bf16", "int8", "fp8", own}}
    print(f"{own} server, mean |log-prob difference| and share of other experts: {compared}")
    difference, share = compared.pop(own)
    # A token whose logits of the router are level after rounding may pass through another expert.
    assert difference < min(other for other, _ in compared.values()) / (NEARER / 2)
    # A bfloat16 logit of the router can round to a tie; another format changes 1 to 15 % of them.
    assert share < min(other for _, other in compared.values()) / 2


def test_experts_are_recorded_for_prompts_from_the_cache_too(experts: Experts) -> None:
    deployment, (prompt, first) = experts.deployment, experts.sampled[-1]
    assert first.routed_experts is not None and first.routed_experts.dtype == torch.int16
    deployment.sender.send(deployment.weights[0])
    (again,), (cached,) = (
        [group[0] for group in deployment.generate([prompt], temperature=0.01)] for _ in range(2)
    )
    read = len(prompt.token_ids) - 1
    for completion in (again, cached):
        assert completion.routed_experts is not None
        assert torch.equal(
            completion.routed_experts[:read].sort()[0], first.routed_experts[:read].sort()[0]
        )


def test_weights_reload_any_number_of_times_bit_for_bit(experts: Experts) -> None:
    reloads = 20 if experts.deployment.weight_format == "int8" else 6
    assert_reloads_bit_for_bit(experts.deployment, reloads)


def test_the_server_returns_the_checksum_of_every_experts_tensors(experts: Experts) -> None:
    deployment = experts.deployment
    last = [name for name in deployment.weights[0] if "layers.1.mlp.experts.7.down_proj" in name]
    corrupted = [*last, "model.layers.0.mlp.gate.weight"]
    assert_checksums_match_the_held_tensors(deployment, corrupted)


def test_two_groups_of_ranks_load_a_quantized_directory(tmp_path: Path) -> None:
    """SGLang reads the files itself, and its loaders divide every expert."""
    skip_without_gpus(2)
    model, written = build_tiny_model(tmp_path / "model", "qwen3_moe"), tmp_path / "int8"
    quantize_directory(model, written, "int8", lambda *_: None)
    config = ServerConfig(
        mem_fraction_static=0.3,
        tensor_parallel_size=2,
        expert_parallel_size=2,
        max_total_tokens=1024,
    )
    spec = ServerSpec(written, config, "int8", 64, loads=True)
    with running(spec, tmp_path / "server.log", seed=0) as server:
        held = combine(asyncio.run(server.checksums()))
    stored = load_file(written / "model.safetensors")
    assert held == {name: checksum(tensor) for name, tensor in stored.items()}
