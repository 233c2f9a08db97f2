"""The options of SGLang that `rollout.server.options` may set: those that were tried or are plain.

An option may change how fast a server samples, but not what is known of a token: the log-prob of
the distribution it was drawn from, and the version of the weights that computed it. SGLang has 475
options, and each release adds more. So one that is not on this list is refused.
"""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches

from qurl_megatron.config.schema import ConfigError, ServerConfig

# SGLang takes no prompt within six tokens of a server's context length, or of its KV cache.
CONTEXT_RESERVE = 6

# Each option with what it is for.
ALLOWED: dict[str, str] = {
    "kv_cache_dtype": "memory",
    "page_size": "memory",
    "disable_radix_cache": "memory",
    "radix_eviction_policy": "memory",
    "chunked_prefill_size": "batches",
    "enable_mixed_chunk": "batches",
    "max_prefill_tokens": "batches",
    "prefill_max_requests": "batches",
    "schedule_conservativeness": "batches",
    "schedule_policy": "batches",
    "disable_overlap_schedule": "scheduler",
    "num_continuous_decode_steps": "scheduler",
    "scheduler_recv_interval": "scheduler",
    "sleep_on_idle": "scheduler",
    "attention_backend": "kernels",
    "decode_attention_backend": "kernels",
    "prefill_attention_backend": "kernels",
    "triton_attention_num_kv_splits": "kernels",
    "sampling_backend": "kernels",
    "fp8_gemm_backend": "kernels",
    "enable_fp32_lm_head": "exactness",
    "enable_deterministic_inference": "exactness",
    "disable_cuda_graph": "graphs",
    "disable_cuda_graph_padding": "graphs",
    "cuda_graph_backend_decode": "graphs",
    "cuda_graph_backend_prefill": "graphs",
    "cuda_graph_max_bs_decode": "graphs",
    "cuda_graph_max_bs_prefill": "graphs",
    "disable_custom_all_reduce": "ranks",
    "enable_nccl_nvls": "ranks",
    "dist_timeout": "limits",
    "watchdog_timeout": "limits",
    "skip_server_warmup": "start",
    "decode_log_interval": "log",
    "log_level": "log",
    "enable_metrics": "log",
}

# What to do instead of setting an option that users of SGLang know.
_INSTEAD = {
    "tp_size": "set the server's tensor_parallel_size",
    "ep_size": "set the server's expert_parallel_size",
    "context_length": "set max_prompt_length and max_response_length",
    "random_seed": "set seed",
    "model_path": "set model",
    "quantization": "set quantization.format",
    "dtype": "the served weights are bfloat16 or of quantization.format",
    "enable_return_routed_experts": "set rollout.routing",
    "speculative_algorithm": "its log-probs are not proven to be those of the policy",
} | {field.name: f"set the server's {field.name}" for field in dataclasses.fields(ServerConfig)}


def check_names(section: str, server: ServerConfig) -> None:
    """Check that a server's options are on the list.

    `section` is the server's section in error messages, such as `rollout.server`.

    Raises:
        ConfigError: one is not; the message says what to do instead, or which options there are.
    """
    for name, value in server.options.items():
        if name in ALLOWED:
            continue
        close = " or ".join(get_close_matches(name, ALLOWED, cutoff=0.8))
        all_of_them = f"qurl passes on only {', '.join(ALLOWED)}"
        instead = _INSTEAD.get(name) or (f"did you mean {close}?" if close else all_of_them)
        raise ConfigError(f"{section}.options.{name}={value}: refused; {instead}")
