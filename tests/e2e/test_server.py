"""The real SGLang server with this package's plugin, in each weight format."""

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from torch import Tensor

from e2e.reference import NEARER, Reference
from e2e.serving import (
    PROMPTS,
    Deployment,
    assert_checksums_match_the_held_tensors,
    assert_reloads_bit_for_bit,
    joined,
    launched,
)
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.config.values import OptionValue
from qurl_megatron.rollout.fleet import FleetTooSmall
from qurl_megatron.rollout.server import ServerFailed
from qurl_megatron.rollout.start import running
from tiny import EOS_TOKEN_ID, build_tiny_model, quantized

torch.set_num_threads(1)

# Fused layers need whole blocks of 128, and so do the inputs of all layers on a GPU.
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
FORMATS: dict[WeightFormat, dict[str, Any]] = {  # format -> overrides of the model's dimensions
    "bf16": {},
    "int8": {},
    "fp8": {},
    "fp8-block": WHOLE_BLOCKS,
}
CORRUPTED = ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]


@pytest.fixture(scope="module", params=FORMATS)
def deployment(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    own, directory = request.param, tmp_path_factory.mktemp(request.param)
    with (
        launched(directory, own, tied=True, **FORMATS[own]) as server,
        joined(*server, own) as deployment,
    ):
        yield deployment


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start an INT8 server on two tensor-parallel ranks that share one key-value head."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need a GPU each; this machine has one")
    with (
        launched(tmp_path_factory.mktemp("tp2"), "int8", 2, num_key_value_heads=1) as server,
        joined(*server, "int8") as deployment,
    ):
        yield deployment


def sampled(deployment: Deployment) -> list[tuple[list[int], list[int], Tensor]]:
    """Return prompts, completions and the server's log-probs, two completions per prompt."""
    return [
        (prompt.token_ids, completion.token_ids, torch.tensor(completion.behaviour_logprobs))
        for prompt, group in zip(PROMPTS, deployment.generate(PROMPTS), strict=True)
        for completion in group
    ]


def mean_difference(
    rows: list[tuple[list[int], list[int], Tensor]], reference: Reference, temperature: float = 1.0
) -> float:
    """Return the mean |server - reference| of the tokens' log-probs."""
    return (
        torch.cat(
            [
                (logprobs - reference.logprobs(prompt, completion, temperature)).abs()
                for prompt, completion, logprobs in rows
            ]
        )
        .mean()
        .item()
    )


def test_logprobs_are_those_of_the_codes_that_were_sent(deployment: Deployment) -> None:
    deployment.sender.send(deployment.weights[0])
    rows = sampled(deployment)
    model_dir, own = deployment.model_dirs[0], deployment.weight_format
    difference = {
        weight_format: mean_difference(
            rows, Reference(model_dir, quantized(model_dir, weight_format))
        )
        for weight_format in {"bf16", "int8", "fp8", own}
    }
    print(f"{own} server, mean |log-prob difference| to references: {difference}")
    # In wide layers a flipped activation code is visible, but another format differs far more.
    assert difference.pop(own) < min(difference.values()) / NEARER


def test_completions_carry_the_version_they_were_sampled_with(deployment: Deployment) -> None:
    for version in (3, 4):
        deployment.sender.send(deployment.weights[0], version)
        groups = deployment.generate(PROMPTS)
        assert {tuple(c.token_versions) for group in groups for c in group} == {
            (version,) * len(c.token_ids) for group in groups for c in group
        }


def test_a_completion_ends_at_a_stop_token_or_is_marked_truncated(
    deployment: Deployment,
) -> None:
    for completion in itertools.chain(*deployment.generate(PROMPTS, temperature=2.0)):
        assert len(completion.token_ids) == len(completion.behaviour_logprobs)
        assert EOS_TOKEN_ID not in completion.token_ids[:-1]
        assert completion.truncated == (completion.token_ids[-1] != EOS_TOKEN_ID)
        assert not completion.truncated or len(completion.token_ids) == 24


def test_weights_reload_any_number_of_times_bit_for_bit(deployment: Deployment) -> None:
    reloads = 20 if deployment.weight_format == "int8" else 6
    assert_reloads_bit_for_bit(deployment, reloads)


def test_what_a_run_never_sends_ends_no_server_and_changes_nothing(deployment: Deployment) -> None:
    """The first would reach `int(None)` in the scheduler, the second be answered "Succeeded"."""
    deployment.sender.send(deployment.weights[0])
    before, server = deployment.greedy()[:2], deployment.server
    update = {"names": ["delta of version 7"], "dtypes": ["uint8"], "shapes": [[1]]}
    update |= {"group_name": "weights", "load_format": "flattened_bucket", "flush_cache": True}
    outside = {"names": ["../../etc"], "dtypes": ["int8"], "shapes": [[1]], "weight_version": "1"}
    for path, body, status in (
        ("/update_weights_from_distributed", update, 400),
        ("/update_weights_from_distributed", update | outside, 400),
        ("/update_weights_from_disk", {"model_path": "/etc"}, 404),
        ("/health_generate", None, 404),
    ):
        url = f"{server.url}{path}"
        assert httpx.post(url, json=body, headers=server.headers).status_code == status
        # Another user of the machine has no key, and another run has not this server.
        assert httpx.post(url, json=body).status_code in (401, 404)
        other = {**server.headers, "Qurl-Run": "another"}
        assert httpx.post(url, json=body, headers=other).status_code in (404, 409)
    assert deployment.greedy()[:2] == before


def test_the_prefix_cache_never_serves_old_weights(deployment: Deployment) -> None:
    first, second = deployment.weights
    deployment.sender.send(second)
    *fresh, cached = deployment.greedy()
    assert cached == 0

    deployment.sender.send(first)
    deployment.greedy()
    *of_first, cached = deployment.greedy()
    assert cached == len(PROMPTS[3].token_ids) - 1
    deployment.sender.send(second)
    *after_update, cached = deployment.greedy()
    assert cached == 0
    assert after_update == fresh != of_first


def test_the_server_returns_the_checksum_of_every_tensor(deployment: Deployment) -> None:
    assert_checksums_match_the_held_tensors(deployment, CORRUPTED)


def test_two_ranks_return_the_checksums_of_full_tensors(two_ranks: Deployment) -> None:
    assert_checksums_match_the_held_tensors(two_ranks, CORRUPTED)


def test_logprobs_use_the_temperature_and_the_full_vocabulary_for_any_top_p(
    deployment: Deployment,
) -> None:
    deployment.sender.send(deployment.weights[0])
    reference = Reference(deployment.model_dirs[0], deployment.weights[0])
    sampling = {"temperature": 0.7, "top_p": 0.6, "max_new_tokens": 24, "ignore_eos": True}
    rows = []
    for prompt in PROMPTS:
        completion, logprobs, _ = deployment.ask(prompt.token_ids, **sampling)
        rows.append((prompt.token_ids, completion, torch.tensor(logprobs)))
    # Log-probs renormalized over the nucleus would be larger by up to -log(0.6) = 0.5.
    right = mean_difference(rows, reference, temperature=0.7)
    assert right < mean_difference(rows, reference, temperature=1.0) / (NEARER / 2)


def test_completions_carry_the_tokens_that_each_was_drawn_from(deployment: Deployment) -> None:
    deployment.sender.send(deployment.weights[0])
    reference = Reference(deployment.model_dirs[0], deployment.weights[0])
    top_p = 0.1
    groups = deployment.client.generate(
        PROMPTS,
        completions_per_prompt=2,
        temperature=0.7,
        max_completion_length=24,
        top_p=top_p,
        records_masks=True,
    )
    # Rounding in blocks has moved one token's probability from 0.1 to 0.0928, and in other formats
    # none to below 0.1 (740 tokens, three runs each).
    slack = 0.01 if deployment.weight_format == "fp8-block" else 0.005
    sizes, differences = set(), []
    answers = [
        (prompt, each) for prompt, group in zip(PROMPTS, groups, strict=True) for each in group
    ]
    for prompt, completion in answers:
        assert completion.sampling_masks is not None
        of_tokens, token_ids = completion.sampling_masks
        masks, length = token_ids.split(of_tokens.tolist()), len(prompt.token_ids)
        logits = reference.logits(torch.tensor(prompt.token_ids + completion.token_ids))
        rows = (logits[length - 1 : -1] / 0.7).softmax(-1)
        drawn = zip(completion.token_ids, completion.behaviour_logprobs, masks, rows, strict=True)
        for token, logprob, mask, row in drawn:
            sizes.add(len(mask))
            # The likeliest tokens up to top_p in all.
            assert row[mask].min() > row.sort(descending=True).values[len(mask)] - 0.001
            assert row[mask].sum() > top_p - slack
            assert row[mask].sum() - row[mask].min() < top_p + 0.005
            differences.append(logprob - (row[token] / row[mask].sum()).log())
    assert len(sizes) > 1
    assert torch.stack(differences).abs().mean() < 0.01  # over all tokens it is 2, -log(top_p)


def test_a_server_can_keep_keys_and_values_in_fp8(tmp_path: Path) -> None:
    options: dict[str, OptionValue] = {"kv_cache_dtype": "fp8_e4m3"}
    with (
        launched(tmp_path, "int8", options=options) as server,
        joined(*server, "int8") as deployment,
    ):
        model_dir, weights = deployment.model_dirs[0], deployment.weights[0]
        deployment.sender.send(weights)
        rows = sampled(deployment)
    in_fp8, in_bf16 = (
        mean_difference(rows, Reference(model_dir, weights, kv_cache_dtype=dtype))
        for dtype in (torch.float8_e4m3fn, torch.bfloat16)
    )
    print(f"mean |log-prob difference| to keys and values in FP8 {in_fp8}, in BF16 {in_bf16}")
    assert in_fp8 < in_bf16 / NEARER


def test_a_request_that_its_caller_gave_up_is_sampled_no_further(tmp_path: Path) -> None:
    length = 8000  # tens of seconds
    with (
        launched(tmp_path, "bf16", context_length=8192, max_position_embeddings=8192) as server,
        joined(*server, "bf16") as deployment,
    ):
        deployment.sender.send(deployment.weights[0])
        main = psutil.Process(deployment.server.pid)
        tree = [main, *main.children(recursive=True)]
        (scheduler,) = (p for p in tree if "scheduler" in " ".join(p.cmdline()))

        def is_sampling() -> bool:
            before = scheduler.cpu_times().user
            time.sleep(1.0)
            return scheduler.cpu_times().user - before > 0.5

        body = {
            "input_ids": PROMPTS[0].token_ids,
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True},
        }
        with pytest.raises(httpx.ReadTimeout):
            url, headers = f"{deployment.server.url}/generate", deployment.server.headers
            httpx.post(url, json=body, headers=headers, timeout=2.0)
        began, sampled_for = time.monotonic(), 0.0
        while is_sampling():
            sampled_for = time.monotonic() - began
        print(f"sampled for {sampled_for:.0f} s more")
        assert sampled_for < 8


def test_two_ranks_compute_with_their_shards(two_ranks: Deployment) -> None:
    two_ranks.sender.send(two_ranks.weights[0])
    rows, model_dir, weights = sampled(two_ranks), two_ranks.model_dirs[0], two_ranks.weights[0]
    # Each rank quantizes its own part of the row-parallel layers' inputs.
    shards = mean_difference(rows, Reference(model_dir, weights, tensor_parallel_size=2))
    whole = mean_difference(rows, Reference(model_dir, weights, tensor_parallel_size=1))
    print(f"two ranks, mean |log-prob difference|: to shards {shards}, to one rank {whole}")
    assert shards < whole / 20


def test_two_ranks_reload_bit_for_bit(two_ranks: Deployment) -> None:
    assert_reloads_bit_for_bit(two_ranks, reloads=6)


def test_a_server_that_dies_while_it_samples_is_reported_with_its_log(
    two_ranks: Deployment,
) -> None:  # the last test of this server
    main = psutil.Process(two_ranks.server.pid)
    tree = [main, *main.children(recursive=True)]
    scheduler = next(p for p in tree if "scheduler" in " ".join(p.cmdline()))
    threading.Timer(1.0, scheduler.send_signal, [signal.SIGKILL]).start()
    with pytest.raises(FleetTooSmall, match="(?s)closed the connection.*server.log ends:\n."):
        for _ in range(1000):
            two_ranks.generate(PROMPTS)
    two_ranks.server.stop()
    assert not psutil.wait_procs(tree, timeout=10)[1]


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    model_dir = build_tiny_model(tmp_path / "without_weights")
    (model_dir / "model.safetensors").unlink()
    log_file = tmp_path / "server.log"
    spec = ServerSpec(model_dir, ServerConfig(), "int8", 64, loads=True)
    with pytest.raises(ServerFailed, match="(?s)died while starting.*without_weights"):
        with running(spec, log_file, seed=0):
            pass
