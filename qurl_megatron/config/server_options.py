"""The options of SGLang that `rollout.server.options` may set: each was tried, or is plain.

An option may change how fast a server samples, but not what is known of a token: its log-prob in
the distribution it was drawn from, and the version of the weights that computed it. SGLang has over
500 options, and each release adds more. So an option that is not listed is refused.

SGLang's own parser knows the values of each, but importing it takes 10 to 30 seconds. So they are
listed here, and `tests/test_server_options.py` compares them with the parser's.
"""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches

from qurl_megatron.config.schema import ConfigError, ServerConfig
from qurl_megatron.config.values import OptionValue

# SGLang refuses a prompt within six tokens of a server's context length, or of its KV cache.
CONTEXT_RESERVE = 6

_ATTENTION = tuple(
    "triton torch_native flex_attention dsa nsa qsa dsv4 compressed fa3 fa4 flashinfer "
    "llada2_cfg_flashinfer flashmla trtllm_mla cutedsl_mla tokenspeed_mla trtllm_mha hpc_ops "
    "minicpm_flashattn minicpm_flashinfer aiter wave intel_amx ascend intel_xpu".split()
)
_GRAPHS = ("full", "breakable", "disabled")

# By purpose. Each has a type, or the words that it takes; a bool is a flag.
ALLOWED: Mapping[str, type[OptionValue] | tuple[str, ...]] = {
    # memory
    "kv_cache_dtype": tuple(
        "auto fp8_e5m2 fp8_e4m3 mxfp8 bf16 bfloat16 nvfp4 fp4_mx_block16".split()
    ),
    "page_size": int,
    "disable_radix_cache": bool,
    "radix_eviction_policy": ("lru", "lfu", "slru", "priority", "tlru"),
    # batches
    "chunked_prefill_size": int,
    "enable_mixed_chunk": bool,
    "max_prefill_tokens": int,
    "prefill_max_requests": int,
    "schedule_conservativeness": float,
    "schedule_policy": tuple(
        "lpm random fcfs dfs-weight lof priority routing-key hrrn shortest-prefill-first".split()
    ),
    # scheduler
    "disable_overlap_schedule": bool,
    "num_continuous_decode_steps": int,
    "scheduler_recv_interval": int,
    "sleep_on_idle": bool,
    # kernels
    "attention_backend": _ATTENTION,
    "decode_attention_backend": _ATTENTION,
    "prefill_attention_backend": _ATTENTION,
    "triton_attention_num_kv_splits": int,
    "fp8_gemm_backend": tuple(
        "auto deep_gemm flashinfer_trtllm flashinfer_cutlass flashinfer_deepgemm "
        "flashinfer_cutedsl cutlass triton aiter".split()
    ),
    # exactness
    "enable_fp32_lm_head": bool,
    # graphs
    "disable_cuda_graph": bool,
    "disable_cuda_graph_padding": bool,
    "cuda_graph_backend_decode": _GRAPHS,
    "cuda_graph_backend_prefill": _GRAPHS,
    "cuda_graph_max_bs_decode": int,
    "cuda_graph_max_bs_prefill": int,
    # ranks
    "disable_custom_all_reduce": bool,
    "enable_nccl_nvls": bool,
    # limits
    "dist_timeout": int,
    "watchdog_timeout": float,
    # start
    "skip_server_warmup": bool,
    # log
    "decode_log_interval": int,
    "log_level": str,
    "enable_metrics": bool,
}

# For options that users of SGLang know: what to do instead.
_INSTEAD = {
    "tp_size": "set the server's tensor_parallel_size",
    "ep_size": "set the server's expert_parallel_size",
    "context_length": "set max_prompt_length and max_completion_length",
    "random_seed": "set seed",
    "model_path": "set model",
    "quantization": "set quantization.format",
    "dtype": "the served weights are bfloat16 or of quantization.format",
    "enable_return_routed_experts": "set rollout.routing",
    "sampling_backend": "it is pytorch; another compiles for minutes before the first top_p",
    "enable_deterministic_inference": "with it SGLang draws all answers to a prompt alike",
    "speculative_algorithm": "its log-probs are not proven to be those of the policy",
} | {field.name: f"set the server's {field.name}" for field in dataclasses.fields(ServerConfig)}


def check_options(section: str, server: ServerConfig) -> None:
    """Check that a server's options are on the list, and have values that SGLang takes.

    `section` is the server's section in error messages, such as `rollout.server`.

    Raises:
        ConfigError: an option is wrong; the message says what would be right.
    """
    for name, value in server.options.items():
        if reason := _objection(name, value):
            raise ConfigError(f"{section}.options.{name}={value}: {reason}")


def _objection(name: str, value: OptionValue) -> str:
    """Return what is wrong with an option, or an empty text."""
    if name not in ALLOWED:
        close = " or ".join(get_close_matches(name, ALLOWED, cutoff=0.8))
        all_of_them = f"qurl passes on only {', '.join(ALLOWED)}"
        instead = _INSTEAD.get(name) or (f"did you mean {close}?" if close else all_of_them)
        return f"refused; {instead}"
    kind = ALLOWED[name]
    if (kind is bool) != isinstance(value, bool):
        return "takes true or false" if kind is bool else "takes a value, not true or false"
    if isinstance(kind, tuple):
        return "" if value in kind else f"takes one of {', '.join(kind)}"
    try:
        kind(str(value))  # the command line passes it as text
    except ValueError:
        return f"takes {'a whole number' if kind is int else 'a number'}"
    return ""


def tokens_of_requests(server: ServerConfig, max_length: int, requests: int) -> int:
    """Return the size in tokens of a KV cache for so many requests of `max_length` tokens."""
    page = int(server.options.get("page_size", 1))
    return requests * -(-(max_length + CONTEXT_RESERVE) // page) * page


def states_per_request(server: ServerConfig, *, on_gpu: bool) -> int:
    """Return how many states of linear attention SGLang reserves memory for, per request.

    A request computes with one. The others keep states of prefixes: two always and, while the
    request runs, two more with the overlap schedule or one without.
    """
    if server.options.get("disable_radix_cache"):
        return 1
    overlaps = on_gpu and not server.options.get("disable_overlap_schedule")
    return 5 if overlaps else 4


def command_line(options: Mapping[str, object]) -> list[str]:
    """Return options, by name with underscores, as words of a command line.

    True gives a flag, False omits it. A value is joined to its option by "=", so that it may begin
    with a dash. Only the path of a configuration file is a word of its own, because SGLang does not
    find it otherwise.
    """
    words = []
    for name, value in options.items():
        flag = flag_of(name)
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)] if name == "config" else [f"{flag}={value}"]
    return words


def flag_of(name: str) -> str:
    """Return the name of an option on the command line."""
    return f"--{name.replace('_', '-')}"
