"""Options of SGLang's own: which pass through, and what is said of the others."""

import argparse
import re
from pathlib import Path

import pytest

from qurl_megatron.config.schema import Config, ConfigError, ServerConfig
from qurl_megatron.config.server_options import ALLOWED, check_options, command_line, flag_of
from qurl_megatron.config.text import load, save, with_overrides
from qurl_megatron.config.values import OptionValue
from qurl_megatron.evaluation.evaluate import EvalConfig


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
        ("enable_deterministic_inference", "with it SGLang draws all answers to a prompt alike"),
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
        check_options("rollout.server", server)


def test_sglang_takes_the_options_of_the_list_with_these_values() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for name, kind in ALLOWED.items():
        option = parser._option_string_actions[flag_of(name)]
        if kind is bool:
            assert option.nargs == 0, name
        elif isinstance(kind, tuple):
            assert set(kind) == set(option.choices or ()), name
        else:
            assert option.type is kind or name == "max_prefill_tokens", name  # also takes 16k
            assert option.choices is None, name


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("kv_cache_dtype", "int3", "takes one of auto, fp8_e5m2, "),
        ("page_size", "many", "takes a whole number"),
        ("watchdog_timeout", "long", "takes a number"),
        ("page_size", True, "takes a value, not true or false"),
        ("enable_mixed_chunk", 1, "takes true or false"),
    ],
)
def test_a_value_that_sglang_does_not_take_is_named_with_its_option(
    option: str, value: OptionValue, error: str
) -> None:
    fine: dict[str, OptionValue] = {
        "enable_mixed_chunk": True,
        "chunked_prefill_size": -1,
        "radix_eviction_policy": "lfu",
        "watchdog_timeout": 5,
    }
    check_options("server", ServerConfig(options=fine))
    message = re.escape(f"evaluation.server.options.{option}={value}: {error}")
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_options("evaluation.server", ServerConfig(options=fine | {option: value}))
