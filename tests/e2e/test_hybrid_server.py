"""Hybrid models on the real server: their states beside keys and values, and a shared expert."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.reference import NEARER, MixedReference, Reference
from e2e.serving import (
    PROMPTS,
    Deployment,
    assert_checksums_match_the_held_tensors,
    assert_reloads_bit_for_bit,
    held_checksums,
    joined,
    launched,
    wait_for_tokens,
)
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import PauseMode
from qurl_megatron.config.values import OptionValue
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.rollout.server import RELEASED
from qurl_megatron.weight_sync.bucket import IN_PLACE
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.direct import ServerParameters
from tiny import quantized

torch.set_num_threads(1)
ON_GPU = torch.cuda.is_available()
# The kernels of a GPU take heads of these sizes.
HEADS = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SIZES: dict[str, Any] = {"hidden_size": 256, **HEADS} if ON_GPU else {}

# Requests of several prompts do not fit in it at once, and SGLang holds none of it back for them.
SMALL_CACHE: dict[str, OptionValue] = {
    "max_total_tokens": 1024,
    "schedule_conservativeness": 0.0,
    "decode_log_interval": 8,
}
LINEAR = "model.layers.1.linear_attn"
CORRUPTED = [
    f"{LINEAR}.A_log",
    f"{LINEAR}.dt_bias",
    f"{LINEAR}.conv1d:value.weight",
    f"{LINEAR}.in_proj_qkv:key.weight",
    f"{LINEAR}.in_proj_qkv:key.weight_scale",
    f"{LINEAR}.in_proj_a.weight",
    "model.layers.3.self_attn.q_proj.weight",
]
CORRUPTED_EXPERTS = [
    *CORRUPTED,
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
    "model.layers.3.mlp.experts.5.down_proj.weight",
]
# An activation's code that flips changes a state, and so all later tokens: by up to 0.005 on the
# mean. Other weights, or states of other weights, change log-probs by 0.1 to 0.5.
LARGEST_MEAN = 0.05 if ON_GPU else 0.02


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("hybrid")
    with (
        launched(
            directory, "int8", architecture="qwen3_5_text", options=SMALL_CACHE, **SIZES
        ) as server,
        joined(*server, "int8") as deployment,
    ):
        yield deployment


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a hybrid of experts on two tensor-parallel ranks."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need a GPU each; this machine has one")
    directory = tmp_path_factory.mktemp("hybrid_experts")
    with (
        launched(directory, "int8", 2, architecture="qwen3_5_moe_text", **SIZES) as server,
        joined(*server, "int8") as deployment,
    ):
        yield deployment


def difference(completions: list[tuple[Prompt, Completion]], reference: Reference) -> float:
    """Return the mean |server - reference| of the log-probs of all tokens."""
    return float(
        torch.cat(
            [
                (
                    torch.tensor(completion.behaviour_logprobs)
                    - reference.logprobs(prompt.token_ids, completion.token_ids)
                ).abs()
                for prompt, completion in completions
            ]
        ).mean()
    )


def reference_of(deployment: Deployment, number: int) -> Reference:
    return Reference(deployment.model_dirs[0], deployment.weights[number])


def with_prompts(groups: list[list[Completion]]) -> list[tuple[Prompt, Completion]]:
    return [(p, each) for p, group in zip(PROMPTS, groups, strict=True) for each in group]


def test_the_server_returns_the_checksum_of_every_tensor(deployment: Deployment) -> None:
    assert_checksums_match_the_held_tensors(deployment, CORRUPTED)


def test_experts_and_the_shared_one_are_held_in_the_ranks_as_they_were_sent(
    experts: Deployment,
) -> None:
    assert_checksums_match_the_held_tensors(experts, CORRUPTED_EXPERTS)


def test_weights_reload_bit_for_bit(deployment: Deployment) -> None:
    assert_reloads_bit_for_bit(deployment, reloads=4)


@pytest.mark.parametrize("served", ["deployment", "experts"])
def test_logprobs_are_those_of_the_codes_that_were_sent(
    served: str, request: pytest.FixtureRequest
) -> None:
    deployment: Deployment = request.getfixturevalue(served)
    deployment.sender.send(deployment.weights[0])
    completions = with_prompts(deployment.generate(PROMPTS))
    model_dir, ranks = deployment.model_dirs[0], deployment.server.tensor_parallel_size
    to = {
        name: difference(completions, Reference(model_dir, quantized(model_dir, name), ranks))
        for name in ("bf16", "int8", "fp8")
    }
    print(f"{served}, mean |log-prob difference|: {to}")
    assert to.pop("int8") < min(to.values()) / NEARER


def test_completions_of_one_prompt_share_its_state(deployment: Deployment) -> None:
    deployment.sender.send(deployment.weights[0])
    prompt = [2 + 7 * token % 250 for token in range(150)]
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    tokens, logprobs, cached = deployment.ask(prompt, **sampling)
    assert cached == 0
    again, from_state, cached = deployment.ask(prompt, **sampling)
    assert cached == 128  # two chunks of 64, after which the state was kept
    assert again == tokens
    torch.testing.assert_close(
        torch.tensor(from_state), torch.tensor(logprobs), rtol=0, atol=2 * LARGEST_MEAN
    )
    deployment.sender.send(deployment.weights[1])
    assert deployment.ask(prompt, **sampling)[2] == 0


def test_requests_that_a_full_cache_retracts_go_on_from_states_computed_again(
    deployment: Deployment,
) -> None:
    deployment.sender.send(deployment.weights[0])
    completions = with_prompts(
        deployment.client.generate(
            PROMPTS, completions_per_prompt=6, temperature=1.0, max_completion_length=120
        )
    )
    assert "KV cache pool is full. Retract" in Path(deployment.server.log_file).read_text()
    assert difference(completions, reference_of(deployment, 0)) < LARGEST_MEAN


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_every_token_is_of_the_version_that_it_names(
    deployment: Deployment, pause_mode: PauseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment.sender, "pause_mode", pause_mode)
    deployment.sender.send(deployment.weights[0], version=10)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(
            deployment.client.generate,
            PROMPTS,
            completions_per_prompt=1,
            temperature=1.0,
            max_completion_length=160,
        )
        wait_for_tokens(deployment.server)
        deployment.sender.send(deployment.weights[1], version=11)
        completions = with_prompts(running.result())
    sent = dict(zip((10, 11), deployment.weights, strict=True))
    spanning = [each for each in completions if len(set(each[1].token_versions)) == 2]
    assert spanning
    to_mixed, to_whole = [], []
    references = [reference_of(deployment, number) for number in (0, 1)]
    for prompt, completion in spanning:
        versions = torch.tensor(completion.token_versions)
        logprobs = torch.tensor(completion.behaviour_logprobs)
        # A position's state is computed when the token after it is sampled.
        of_prompt = versions[:1].expand(len(prompt.token_ids))
        by_position = torch.cat([of_prompt, versions[1:], versions[-1:]])
        mixed = MixedReference(deployment.model_dirs[0], sent, by_position)
        old, new = (each.logprobs(prompt.token_ids, completion.token_ids) for each in references)
        computed_again = torch.where(versions == 10, old, new)
        to_mixed.append(difference([(prompt, completion)], mixed))
        to_whole.append(float((logprobs - computed_again).abs().mean()))
    by_mode = {"in_place": to_mixed, "retract": to_whole}
    right = sum(by_mode.pop(pause_mode)) / len(spanning)
    wrong = sum(*by_mode.values()) / len(spanning)
    print(f"{pause_mode}, mean |log-prob difference|: {right}, to the other mode: {wrong}")
    assert right < LARGEST_MEAN
    assert right < wrong / NEARER


@pytest.mark.skipif(ON_GPU, reason="a GPU's memory is torch_memory_saver's: benchmarks/gpu")
def test_a_server_that_slept_answers_as_before(deployment: Deployment) -> None:
    server = deployment.server
    deployment.sender.send(deployment.weights[0])
    before = deployment.greedy()
    asyncio.run(server.sleep(RELEASED["cache"]))
    asyncio.run(server.wake(RELEASED["cache"]))
    asyncio.run(server.resume())
    assert deployment.greedy() == before
    asyncio.run(server.sleep(RELEASED["all"]))
    asyncio.run(server.wake(RELEASED["all"]))
    deployment.sender.send(deployment.weights[0])
    assert deployment.greedy() == before


def test_what_is_written_into_the_parameters_is_served(deployment: Deployment) -> None:
    server = deployment.server
    deployment.sender.send(deployment.weights[1])
    expected = deployment.greedy()[:2]
    deployment.sender.send(deployment.weights[0])
    held = ServerParameters()
    held.attach({"server": asyncio.run(server.parameters())})
    held.keep({"server": server.machine}, ["server"])
    asyncio.run(server.pause())
    for name, tensor in deployment.weights[1].items():
        held.write(Change.whole(name, (0, 0), tensor))
    asyncio.run(
        server.update_weights([IN_PLACE], [torch.uint8], [[1]], group_name="", weight_version=12)
    )
    asyncio.run(server.resume())
    sent = {name: checksum(tensor) for name, tensor in deployment.weights[1].items()}
    assert held_checksums(deployment) == sent
    assert deployment.greedy()[:2] == expected
