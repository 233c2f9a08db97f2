"""The options of SGLang that `rollout.server.options` must not set, each with the reason.

An option may change how fast a server samples, but not what is known of a token: the log-prob of
the distribution it was drawn from, and the version of the weights that computed it. Options on this
list would break that, or set again what this package sets. Everything else passes through.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from qurl_megatron.config.schema import ConfigError, ServerConfig

# SGLang takes no prompt within six tokens of a server's context length, or of its KV cache.
CONTEXT_RESERVE = 6

_SPECULATIVE = "the log-probs of speculative decoding are not proven to be those of the policy"
_LOGITS = "it would change logits or sampling, so log-probs would not be those of the policy"
_WEIGHTS = "the server must hold exactly the weights that the learner publishes"
_LAYOUT = "weights are published to tensor-parallel ranks only; set tensor_parallel_size instead"
_CACHE = "prefixes of older weights could stay outside of the cache that a publish empties"
_REQUESTS = "the servers are controlled and asked over plain HTTP, one answer per request"
_HARDWARE = "`qurl` places servers on GPUs and cores"
_RESERVED = "`qurl` sets it"

# Patterns of option names, as in `fnmatch`; the first match gives the reason.
REFUSED: dict[str, str] = {
    # What this package sets; a reason names the field to set instead, if there is one.
    "tp_size": "set the server's tensor_parallel_size",
    "tensor_parallel_size": "set the server's tensor_parallel_size",
    "mem_fraction_static": "set the server's mem_fraction_static",
    "max_running_requests": "set the server's max_running_requests",
    "max_total_tokens": "set the server's max_total_tokens",
    "context_length": "set max_prompt_length and max_response_length",
    "random_seed": "set seed",
    "model": "set model",
    "model_path": "set model",
    "quantization": "set quantization.format",
    "dtype": "the served weights are bfloat16 or of quantization.format",
    "weight_version": "every publish sets it",
    "load_format": _RESERVED,
    "tokenizer_*": "prompts and answers travel as token ids",
    "detokenizer_*": "prompts and answers travel as token ids",
    "skip_tokenizer_init": "prompts and answers travel as token ids",
    "grammar_backend": "no request asks for structured output",
    "host": _RESERVED,
    "port": _RESERVED,
    "nccl_port": _RESERVED,
    "api_key": _RESERVED,
    "admin_api_key": _RESERVED,
    "config": "give every option by its name",
    "h": "see `python -m sglang.launch_server --help`",
    "help": "see `python -m sglang.launch_server --help`",
    "device": _HARDWARE,
    "base_gpu_id": _HARDWARE,
    "gpu_id_step": _HARDWARE,
    "numa_node": _HARDWARE,
    "use_ray": _HARDWARE,
    # What a token's log-prob says.
    "speculative_*": _SPECULATIVE,
    "decoupled_spec_*": _SPECULATIVE,
    "spec_*": _SPECULATIVE,
    "enable_multi_layer_eagle": _SPECULATIVE,
    "dllm_*": _LOGITS,
    "enable_custom_logit_processor": _LOGITS,
    "preferred_sampling_params": _LOGITS,
    "sampling_defaults": _LOGITS,
    "enable_strict_thinking": _LOGITS,
    "constrained_json_*": _LOGITS,
    "forward_hooks": _LOGITS,
    "msprobe_*": _LOGITS,
    "debug_tensor_dump_*": _LOGITS,
    "enable_mis": _LOGITS,
    "enable_hisparse": _LOGITS,
    "hisparse_config": _LOGITS,
    "is_embedding": _LOGITS,
    "prefill_only_disable_kv_cache": _LOGITS,
    "allow_auto_truncate": "it would cut prompts without a word",
    "max_queued_requests": "the server would abort requests, and lose their answers",
    "abort_on_priority_when_disabled": "the server would abort requests, and lose their answers",
    # Which weights compute it.
    "quantization_param_path": "its scales fit one set of weights, and every step changes them",
    "json_model_override_args": _WEIGHTS,
    "model_*": _WEIGHTS,
    "modelopt_*": _WEIGHTS,
    "quantize_and_serve": _WEIGHTS,
    "torchao_config": _WEIGHTS,
    "rl_quant_profile": _WEIGHTS,
    "trust_remote_code": _WEIGHTS,
    "revision": _WEIGHTS,
    "download_dir": _WEIGHTS,
    "delete_ckpt_after_loading": _WEIGHTS,
    "decrypted_*": _WEIGHTS,
    "custom_weight_loader": _WEIGHTS,
    "weight_loader_*": _WEIGHTS,
    "weight_cache_*": _WEIGHTS,
    "remote_instance_*": _WEIGHTS,
    "modelexpress_config": _WEIGHTS,
    "engine_info_bootstrap_port": _WEIGHTS,
    "checkpoint_engine_*": _WEIGHTS,
    "cpu_offload_gb": _WEIGHTS,
    "offload_*": _WEIGHTS,
    "kt_*": _WEIGHTS,
    "*lora*": _WEIGHTS,
    "enable_memory_saver": _WEIGHTS,
    "enable_weights_cpu_backup": _WEIGHTS,
    "enable_draft_weights_cpu_backup": _WEIGHTS,
    "enable_multimodal": _WEIGHTS,
    "encoder_*": _WEIGHTS,
    "language_only": _WEIGHTS,
    # Which processes hold them.
    "pp_*": _LAYOUT,
    "pipeline_parallel_size": _LAYOUT,
    "dp_size": _LAYOUT,
    "data_parallel_size": _LAYOUT,
    "load_balance_method": _LAYOUT,
    "*dp_attention*": _LAYOUT,
    "enable_dp_lm_head": _LAYOUT,
    "dcp_*": _LAYOUT,
    "decode_context_parallel_size": _LAYOUT,
    "attn_cp_size": _LAYOUT,
    "attention_context_parallel_size": _LAYOUT,
    "moe_dp_size": _LAYOUT,
    "moe_data_parallel_size": _LAYOUT,
    "moe_dense_tp_size": _LAYOUT,
    "dwdp_size": _LAYOUT,
    "cp_strategy": _LAYOUT,
    "enable_cp_*": _LAYOUT,
    "*prefill_cp*": _LAYOUT,
    "*prefill_context_parallel": _LAYOUT,
    "*cache_layer_split": _LAYOUT,
    "ep_size": "set the server's expert_parallel_size",
    "expert_parallel_size": "set the server's expert_parallel_size",
    "enable_return_routed_experts": "set rollout.routing",
    "ep_*": _LAYOUT,
    "*eplb*": _LAYOUT,
    "init_expert_location": _LAYOUT,
    "elastic_*": _LAYOUT,
    "enable_elastic_*": _LAYOUT,
    "max_ep_size": _LAYOUT,
    "nnodes": _LAYOUT,
    "node_rank": _LAYOUT,
    "dist_init_addr": _LAYOUT,
    "nccl_init_addr": _LAYOUT,
    # Where keys and values live.
    "*hierarchical_cache": _CACHE,
    "hicache_*": _CACHE,
    "*lmcache*": _CACHE,
    "*flexkv*": _CACHE,
    "radix_cache_backend": _CACHE,
    "enable_streaming_session": _CACHE,
    "enable_session_radix_cache": _CACHE,
    "disaggregation_*": _CACHE,
    "enable_pdmux": _CACHE,
    "pdmux_*": _CACHE,
    # How it is spoken to.
    "fastapi_root_path": _REQUESTS,
    "enable_http2": _REQUESTS,
    "*grpc*": _REQUESTS,
    "smg_*": _REQUESTS,
    "sidecar*": _REQUESTS,
    "*ssl*": _REQUESTS,
    "incremental_streaming_output": _REQUESTS,
    "stream_output": _REQUESTS,
}


def check_names(section: str, server: ServerConfig) -> None:
    """Check that a server's options are none that `qurl` must refuse.

    `section` is the server's section in error messages, such as `rollout.server`.

    Raises:
        ConfigError: an option is refused; the message names it with the reason.
    """
    for name, value in server.options.items():
        if reason := refusal(name):
            raise ConfigError(f"{section}.options.{name}={value}: refused, because {reason}")


def refusal(name: str) -> str | None:
    """Return why an option is refused, by its name with underscores; None if it is not."""
    return next((why for pattern, why in REFUSED.items() if fnmatchcase(name, pattern)), None)
