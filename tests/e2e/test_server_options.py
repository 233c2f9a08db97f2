"""SGLang's own options on the real server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from transformers import AutoTokenizer

from e2e.reference import NEARER, Reference
from e2e.serving import PROMPTS, START_TIMEOUT_S, Sender
from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.config.values import OptionValue
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.preload import Preload
from qurl_megatron.rollout.server import ServerPlan, wait_ready
from tiny import EOS_TOKEN_ID, build_tiny_model, quantized

torch.set_num_threads(1)


def test_a_server_can_keep_keys_and_values_in_fp8(tmp_path: Path, preload: Preload | None) -> None:
    model_dir = build_tiny_model(tmp_path / "model")
    weights = quantized(model_dir, "int8")
    options: dict[str, OptionValue] = {"kv_cache_dtype": "fp8_e4m3"}
    server = ServerPlan(
        model_dir,
        ServerConfig(mem_fraction_static=0.3, max_total_tokens=8192, options=options),
        "int8",
        context_length=128,
        log_file=tmp_path / "server.log",
        seed=0,
    ).start(preload)
    try:
        wait_ready([server], START_TIMEOUT_S)
        with closing(Sender(server)) as sender:
            sender.send(weights)
        fleet = Fleet("rollout", {0: server}, loaded=True)
        client = RolloutClient(fleet, AutoTokenizer.from_pretrained(model_dir), [EOS_TOKEN_ID])
        groups = client.generate(
            PROMPTS, completions_per_prompt=4, temperature=1.0, max_response_length=64
        )
    finally:
        server.stop()
    difference = {}
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        reference = Reference(model_dir, weights, kv_cache_dtype=dtype)
        by_token = [
            torch.tensor(completion.behaviour_logprobs)
            - reference.logprobs(prompt.token_ids, completion.token_ids)
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for completion in group
        ]
        difference[dtype] = torch.cat(by_token).abs().mean().item()
    print(f"mean |log-prob difference| by the reference's keys and values: {difference}")
    assert difference[torch.float8_e4m3fn] < difference[torch.bfloat16] / NEARER
