"""The options of SGLang that `rollout.server.options` may set: those that were tried or are plain.

An option may change how fast a server samples, but not what is known of a token: the log-prob of
the distribution it was drawn from, and the version of the weights that computed it. SGLang has over
500 options, and each release adds more. So one that is not on this list is refused.
"""

import dataclasses
from difflib import get_close_matches

from qurl_megatron.config.schema import ConfigError, ServerConfig

# SGLang takes no prompt within six tokens of a server's context length, or of its KV cache.
CONTEXT_RESERVE = 6

# By what they are for.
ALLOWED = (
    "kv_cache_dtype page_size disable_radix_cache radix_eviction_policy "  # memory
    "chunked_prefill_size enable_mixed_chunk max_prefill_tokens prefill_max_requests "  # batches
    "schedule_conservativeness schedule_policy "  # batches
    "disable_overlap_schedule num_continuous_decode_steps "  # scheduler
    "scheduler_recv_interval sleep_on_idle "  # scheduler
    "attention_backend decode_attention_backend prefill_attention_backend "  # kernels
    "triton_attention_num_kv_splits fp8_gemm_backend "  # kernels
    "enable_fp32_lm_head enable_deterministic_inference "  # exactness
    "disable_cuda_graph disable_cuda_graph_padding cuda_graph_backend_decode "  # graphs
    "cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "  # graphs
    "disable_custom_all_reduce enable_nccl_nvls "  # ranks
    "dist_timeout watchdog_timeout "  # limits
    "skip_server_warmup "  # start
    "decode_log_interval log_level enable_metrics"  # log
).split()

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
    "sampling_backend": "it is pytorch; another compiles for minutes before the first top_p",
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
