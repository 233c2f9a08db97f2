"""Options of SGLang's own: which pass through, and what is said of the others."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from qurl_megatron.config.schema import Config, ConfigError, ServerConfig
from qurl_megatron.config.server_options import ALLOWED, check_names
from qurl_megatron.config.text import load, save, with_overrides
from qurl_megatron.config.values import OptionValue
from qurl_megatron.evaluation.avg_at_k import EvalConfig
from qurl_megatron.rollout.options import check_options, command_line, first_error, flag_of


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
        ("speculative_algorithm", "its log-probs are not proven"),
        ("dtype", "the served weights are bfloat16"),
        ("quantization", "set quantization.format"),
        ("tp_size", "set the server's tensor_parallel_size"),
        ("max_total_tokens", "set the server's max_total_tokens"),
        ("kv_cache_dtyp", r"did you mean kv_cache_dtype\?"),
        ("enable_custom_logit_processor", "qurl passes on only"),
        ("enable_lora", "qurl passes on only kv_cache_dtype, page_size, .*, enable_metrics"),
    ],
)
def test_an_option_that_is_not_on_the_list_is_refused_by_name(option: str, reason: str) -> None:
    server = ServerConfig(options={"page_size": 1, option: "x"})
    with pytest.raises(ConfigError, match=f"^rollout.server.options.{option}=x: refused; {reason}"):
        check_names("rollout.server", server)


def test_sglang_has_every_option_on_the_list() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert {flag_of(name) for name in ALLOWED} <= parser._option_string_actions.keys()


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("kv_cache_dtype", "int3", "invalid choice: 'int3' (choose from"),
        ("page_size", "many", "invalid int value: 'many'"),
        ("page_size", True, "takes a value, not true or false"),
        ("enable_mixed_chunk", 1, "takes true or false"),
    ],
)
def test_a_value_that_sglang_does_not_take_is_named_with_its_option(
    option: str, value: Any, error: str
) -> None:
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
    with pytest.raises(ConfigError, match="^server.options.page_size=many: invalid int"):
        check_options({"server": ServerConfig(options={"page_size": "many"})})
    monkeypatch.setattr("subprocess.run", None)
    check_options({"server": ServerConfig()})
