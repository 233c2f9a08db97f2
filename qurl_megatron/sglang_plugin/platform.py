"""SGLang on a machine without a GPU: the real server, with plain PyTorch underneath.

SGLang's own CPU engine needs kernels that no package registry carries. As an out-of-tree platform
it takes the native PyTorch path of every operator instead, which is all a small model needs.
Nothing here may import, at module level, what itself imports `current_platform`.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(SRTPlatform):
    """One CPU device, its memory the machine's, its collectives gloo."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def init_backend(self) -> None:
        """Replace what the native path is slowest at, and keep NCCL out of tensor parallelism."""
        from sglang.srt.distributed.device_communicators import pynccl
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        from qurl_megatron.sglang_plugin.attention import BatchedAttentionBackend
        from qurl_megatron.sglang_plugin.linear import apply_unquantized

        register_attention_backend("torch_native")(BatchedAttentionBackend)
        UnquantizedLinearMethod.apply = apply_unquantized
        pynccl.NCCLLibrary = no_nccl

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """There is only one."""

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"  # a few helper functions; compiling them takes the first request 40 s

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        return build_allocator


def build_allocator(size: int, page_size: int, **options: Any) -> Any:
    """SGLang's allocator for pages of one token; its paged one sorts whatever is freed."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    if page_size != 1:
        raise ValueError(f"page_size {page_size}: the qurl_cpu platform has pages of 1 token")
    return TokenToKVPoolAllocator(size, **options)


def no_nccl(path: str | None = None) -> None:
    """Stands in for the library, which is installed but of no use; its users then do without."""
    raise OSError("NCCL needs a GPU")


def keep_model_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Stands in for what pads heads and widths that `tp_size` does not divide.

    It runs on every CPU, but only SGLang's own CPU engine can load weights into the padded shapes.
    """
    return model_config
