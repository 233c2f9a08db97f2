"""An SGLang platform for machines without a GPU: the real server, computing in plain PyTorch.

SGLang's own CPU engine needs kernels that no package registry carries. On an out-of-tree platform,
SGLang takes the native PyTorch path of every operator instead, which is enough for a small model.
No module that imports `current_platform` may be imported here at module level, because SGLang
imports this module to define it.
"""

import gc
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

from qurl_megatron.machine.imports import late
from qurl_megatron.machine.memory import trim_heap

# Triton functions that only hybrid models call, by their names in `sglang.kernels.ops`, and the
# functions of `delta_net.py` that replace them.
KERNELS = {
    "attention.fla.chunk.chunk_gated_delta_rule": "extend",
    "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": "decode",
    "attention.fla.layernorm_gated.layernorm_fn": "gated_norm",
    "attention.linear.fused_gdn_gating.fused_gdn_gating": "gates",
    "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous": (
        "split_projections"
    ),
    "elementwise.elementwise.fused_gate_sigmoid_mul_add": "add_shared_expert",
    "elementwise.elementwise.fused_sigmoid_mul": "gated_attention",
    "mamba.causal_conv1d_triton.causal_conv1d_fn": "convolve_prompts",
    "mamba.causal_conv1d_triton.causal_conv1d_update": "convolve_tokens",
    "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers": "keep_states",
}


class CpuPlatform(CpuSRTPlatform):
    """SGLang's own CPU device, with the machine's memory and gloo, on an out-of-tree platform."""

    _enum = PlatformEnum.OOT

    def init_backend(self) -> None:
        """Replace the slowest operators, and every operator that needs a GPU."""
        import torch
        from sglang.srt.layers import sampler
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.layers.logits_processor import LogitsProcessor
        from sglang.srt.layers.moe.token_dispatcher import standard
        from sglang.srt.layers.quantization.unquant import (
            UnquantizedFusedMoEMethod,
            UnquantizedLinearMethod,
        )
        from sglang.srt.state_capturer import base

        from qurl_megatron.quantization.products import multiply_unquantized
        from qurl_megatron.sglang_plugin.attention import BatchedAttentionBackend
        from qurl_megatron.sglang_plugin.formats import apply_unquantized_experts
        from qurl_megatron.sglang_plugin.sampling import SamplersTorch

        register_attention_backend("torch_native")(BatchedAttentionBackend)
        UnquantizedLinearMethod.apply = lambda method, layer, x, bias=None: multiply_unquantized(
            x, layer.weight, bias
        )
        UnquantizedFusedMoEMethod.apply = apply_unquantized_experts
        original = LogitsProcessor._compute_lm_head
        LogitsProcessor._compute_lm_head = partialmethod(compute_lm_head, original)
        sampler.torch = SamplersTorch()
        standard.get_device = lambda: self.device_type  # SGLang's knows no out-of-tree platform
        # Before it gives memory back, SGLang waits for the kind of device that torch was built for.
        get_device_module = torch.get_device_module
        torch.get_device_module = lambda device="cpu": get_device_module(device)  # type: ignore[assignment]
        # Pinned memory needs a GPU. SGLang pins the mask of states to keep, and the table of each
        # token's experts.
        torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment,misc]
        base.BaseHostCache = base.BaseDeviceCache

    def empty_cache(self) -> None:
        """Free the nodes of an emptied cache of prefixes, and give the memory back to the kernel.

        The nodes refer to each other, so only Python's garbage collector frees them: by itself
        after hundreds of publishes. A collection is quick here, since a server is a fork of a
        process that has frozen what it imported.
        """
        gc.collect()
        trim_heap()

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True  # see `delta_net.py`

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"  # compiling a few helper functions would delay the first request by 40 s


def compute_lm_head(
    processor: Any,
    original: Callable[..., Any],
    hidden: Any,
    lm_head: Any,
    *more: Any,
    **named: Any,
) -> Any:
    """Return logits [tokens, vocabulary] float32, in place of `LogitsProcessor._compute_lm_head`.

    SGLang's own function converts the whole weight at every call.
    """
    from qurl_megatron.quantization.products import sum_bfloat16

    if not processor.use_fp32_lm_head:
        return original(processor, hidden, lm_head, *more, **named)
    return sum_bfloat16(hidden, lm_head.weight)


def resume(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    """Release unused memory before sampling goes on, around `Scheduler.continue_generation`.

    SGLang itself empties only torch's CUDA cache there, whatever the platform is.
    """
    from sglang.srt.platforms import current_platform

    if request.torch_empty_cache:
        current_platform.empty_cache()
    original(scheduler, request)


def rest(original: Callable[..., None], scheduler: Any) -> None:
    """Wait for a request, around a method that `Scheduler` calls in each round while paused.

    With sleep-on-idle SGLang waits while it is idle, but not while it is paused: its loop would
    take a core from the learner, whose turn it is. Without sleep-on-idle this returns at once.
    """
    original(scheduler)
    scheduler.maybe_sleep_on_idle()


def keep_model_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Return the config unchanged, in place of `adjust_config_with_unaligned_cpu_tp`.

    SGLang's function pads heads and widths that `tp_size` does not divide. It runs on every CPU,
    but only SGLang's own CPU engine can load weights into the padded shapes.
    """
    return model_config


def kernels() -> dict[str, Callable[..., Any]]:
    """Return what replaces each of `KERNELS`; `delta_net.py` is imported at the first call."""
    return {kernel: late(f"{__package__}.delta_net:{name}") for kernel, name in KERNELS.items()}
