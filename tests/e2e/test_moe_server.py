"""A mixture of experts on the real server, in each format and over ranks and groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.reference import NEARER, Reference
from e2e.serving import (
    PROMPTS,
    START_TIMEOUT_S,
    Deployment,
    assert_checksums_match_the_held_tensors,
    assert_reloads_bit_for_bit,
    joined,
    launched,
)
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.quantization.checksum import checksum, combine
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.rollout.control import ServerControl
from qurl_megatron.rollout.preload import Preload
from qurl_megatron.rollout.server import ServerPlan, wait_ready
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
    "fp8": (2, 1, {}),
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


def fits(size: int) -> bool:
    """Return whether this machine can run a server of so many ranks."""
    return not torch.cuda.is_available() or size <= torch.cuda.device_count()


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, preload: Preload | None
) -> Iterator[dict[str, Experts]]:
    with ExitStack() as stack:
        starting = {
            weight_format: stack.enter_context(
                launched(
                    tmp_path_factory.mktemp(weight_format),
                    weight_format,
                    preload,
                    size,
                    groups,
                    records_routing=True,
                    architecture="qwen3_moe",
                    num_hidden_layers=LAYERS,
                    num_experts_per_tok=TOP_K,
                    **dimensions,
                )
            )
            for weight_format, (size, groups, dimensions) in SERVERS.items()
            if fits(size)
        }
        yield {
            weight_format: Experts(
                stack.enter_context(joined(*server, weight_format, (LAYERS, TOP_K))),
                *SERVERS[weight_format][:2],
            )
            for weight_format, server in starting.items()
        }


@pytest.fixture(params=SERVERS)
def experts(request: pytest.FixtureRequest, servers: dict[str, Experts]) -> Experts:
    if not fits(SERVERS[request.param][0]):
        pytest.skip("two ranks need a GPU each; this machine has one")
    return servers[request.param]


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


def test_two_groups_of_ranks_load_a_quantized_directory(
    tmp_path: Path, preload: Preload | None
) -> None:
    """SGLang reads the files itself, and its loaders divide every expert."""
    if not fits(2):
        pytest.skip("two ranks need a GPU each; this machine has one")
    model, written = build_tiny_model(tmp_path / "model", "qwen3_moe"), tmp_path / "int8"
    quantize_directory(model, written, "int8", lambda *_: None)
    server = ServerPlan(
        written,
        ServerConfig(
            tensor_parallel_size=2,
            expert_parallel_size=2,
            mem_fraction_static=0.3,
            max_total_tokens=1024,
        ),
        "int8",
        context_length=64,
        log_file=tmp_path / "server.log",
        seed=0,
        loads=True,
    ).start(preload)
    try:
        wait_ready([server], START_TIMEOUT_S)
        with closing(ServerControl(server, "retract")) as control:
            held = combine(control.checksums())
    finally:
        server.stop()
    stored = load_file(written / "model.safetensors")
    assert held == {name: checksum(tensor) for name, tensor in stored.items()}
