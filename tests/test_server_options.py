"""Options of SGLang's own: which pass through, and what is said of the others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config, ConfigError, ServerConfig
from qurl_megatron.config.server_options import REFUSED, check_names, refusal
from qurl_megatron.config.values import OptionValue
from qurl_megatron.config.yaml_file import load, save
from qurl_megatron.evaluation.avg_at_k import EvalConfig
from qurl_megatron.rollout.options import check_options, command_line, first_error


def test_options_are_given_by_name_and_keep_their_yaml_types(tmp_path: Path) -> None:
    words = ["kv_cache_dtype=fp8_e4m3", "chunked_prefill_size=-1", "enable_mixed_chunk=true"]
    config = with_overrides(Config(), [f"rollout.server.options.{word}" for word in words])
    options = config.rollout.server.options
    assert options == {
        "kv_cache_dtype": "fp8_e4m3",
        "chunked_prefill_size": -1,
        "enable_mixed_chunk": True,
    }
    assert command_line({**options, "model": "-m", "config": "key.yaml"}) == [
        "--kv-cache-dtype=fp8_e4m3",
        "--chunked-prefill-size=-1",
        "--enable-mixed-chunk",
        "--model=-m",
        *("--config", "key.yaml"),
    ]
    assert command_line({"enable_mixed_chunk": False}) == []
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    assert with_overrides(EvalConfig(), ["server.options.page_size=2"]).server.options == {
        "page_size": 2
    }


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("speculative_algorithm", "speculative decoding are not proven"),
        ("enable_custom_logit_processor", "change logits or sampling"),
        ("preferred_sampling_params", "change logits or sampling"),
        ("dtype", "bfloat16 or of quantization.format"),
        ("quantization", "set quantization.format"),
        ("torchao_config", "exactly the weights"),
        ("load_format", "`qurl` sets it"),
        ("tokenizer_path", "travel as token ids"),
        ("tp_size", "set the server's tensor_parallel_size"),
        ("dp_size", "tensor-parallel ranks only"),
        ("hicache_storage_backend", "prefixes of older weights"),
        ("weight_version", "every publish sets it"),
        ("max_lora_rank", "exactly the weights"),
        ("context_length", "set max_prompt_length"),
    ],
)
def test_an_option_that_would_falsify_a_run_is_refused_by_name(option: str, reason: str) -> None:
    server = ServerConfig(options={"page_size": 1, option: "x"})
    with pytest.raises(ConfigError, match=f"^rollout.server.options.{option}=x: refused.*{reason}"):
        check_names("rollout.server", server)


@pytest.fixture(scope="module")
def sglang_options() -> dict[str, str]:
    """Return the field of each option name that SGLang's parser takes."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        flag.lstrip("-").replace("-", "_"): action.dest
        for action in parser._actions
        for flag in action.option_strings
    }


def test_every_option_of_sglang_is_decided_on(sglang_options: dict[str, str]) -> None:
    """After an update of SGLang, read the options that are new, decide, and correct the number."""
    passed = {dest for name, dest in sglang_options.items() if not refusal(name)}
    passed = {dest for dest in passed if not refusal(dest)}
    assert len(passed) == 212, sorted(passed)


def test_every_refusal_is_of_an_option_that_sglang_has(sglang_options: dict[str, str]) -> None:
    refused = {}
    for pattern, reason in REFUSED.items():
        refused[pattern] = [name for name in sglang_options if refusal(name) == reason]
    assert [pattern for pattern, names in refused.items() if not names] == []


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("kv_cache_dtyp", "fp8", "SGLang has no such option; did you mean kv_cache_dtype"),
        ("xyz", 1, "SGLang has no such option"),
        ("kv_cache_dtype", "int3", "invalid choice: 'int3' (choose from"),
        ("page_size", "many", "invalid int value: 'many'"),
        ("page_size", True, "takes a value, not true or false"),
        ("enable_mixed_chunk", 1, "takes true or false"),
        ("ep", 2, "refused, because set the server's expert_parallel_size"),
    ],
)
def test_an_option_that_sglang_does_not_take_is_named(option: str, value: Any, error: str) -> None:
    fine: dict[str, OptionValue] = {
        "enable_mixed_chunk": True,
        "chunked_prefill_size": -1,
        "radix_eviction_policy": "lfu",
    }
    assert first_error({"rollout.server": fine}) is None
    message = first_error({"rollout.server": fine, "evaluation.server": {option: value}})
    assert message and message.startswith(f"evaluation.server.options.{option}={value}: {error}")
    assert "\n" not in message


def test_the_check_before_a_run_asks_sglang_only_if_there_are_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="^server.options.page_sise=1: .*did you mean page_size"):
        check_options({"server": ServerConfig(options={"page_sise": 1})})
    monkeypatch.setattr("subprocess.run", None)
    check_options({"server": ServerConfig()})
