"""Where this process runs: the only room that branches on cpu or cuda.

On a machine without a GPU, Megatron-core runs as it is, unedited, on gloo: `megatron_runtime`
answers for the few CUDA calls its sources make unconditionally. With `cli` and `launch`, this is
also the only room that reads environment variables.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

T = TypeVar("T")


@functools.cache
def accelerator() -> Literal["cpu", "cuda"]:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> torch.device:
    """The device of this process: one GPU a local rank, or the CPU."""
    if accelerator() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def num_gpus() -> int:
    """GPUs this process sees; 0 on a machine without one."""
    return torch.cuda.device_count() if accelerator() == "cuda" else 0


def communication_backend() -> Literal["gloo", "nccl"]:
    return "gloo" if accelerator() == "cpu" else "nccl"


def carrier_towards(gpus: Collection[int]) -> Literal["gloo", "nccl"]:
    """What carries tensors from this rank to processes on `gpus` of this machine.

    NCCL refuses two ranks on one GPU ("Duplicate GPU detected"). gloo takes tensors of a GPU too,
    through host memory.
    """
    return "gloo" if device().index in gpus else communication_backend()


def lacks_flash_attention() -> bool:
    """Whether SGLang is beside a GPU without the compiled attention it would choose there."""
    if accelerator() == "cpu":
        return False
    package = importlib.util.find_spec("sgl_kernel")
    folders = (package.submodule_search_locations or []) if package else []
    return not any(list(Path(folder).glob("flash_ops*")) for folder in folders)


def logit_chunk_elements(rows: int) -> int:
    """Logits computed at once on a rank that holds `rows` of the vocabulary.

    Within a core's cache, but 64 tokens' at least, since every chunk reads the whole weight; on a
    GPU a quarter GiB.
    """
    return max(2**18, 64 * rows) if accelerator() == "cpu" else 2**26


def _from_environment(torchrun: str, slurm: str, default: int) -> int:
    """torchrun's variable, or else the one srun gives each task of a step."""
    if torchrun in os.environ:
        return int(os.environ[torchrun])
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # unset in the batch shell, which is no task
        return int(os.environ[slurm])
    return default


def rank() -> int:
    return _from_environment("RANK", "SLURM_PROCID", 0)


def world_size() -> int:
    return _from_environment("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", 1)


def local_rank() -> int:
    return _from_environment("LOCAL_RANK", "SLURM_LOCALID", 0)


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `additions`, for a process it starts."""
    return {**os.environ, **additions}


def limit_threads(threads: int) -> None:
    """CPU threads of this process's tensor operations."""
    torch.set_num_threads(threads)


def initialize_distributed(timeout_s: float = 1800.0) -> None:
    """Make the default process group of all learner ranks.

    More than one rank meets at MASTER_ADDR:MASTER_PORT; a single one needs nothing. A collective
    that waits longer than `timeout_s` ends the process.

    Raises:
        RuntimeError: several ranks and no meeting point.
    """
    if accelerator() == "cuda":
        torch.cuda.set_device(device())
    arguments: dict[str, Any] = {}
    if world_size() == 1:
        arguments = {"store": dist.HashStore()}
    else:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise RuntimeError(
                f"{world_size()} ranks but {' and '.join(missing)} not set; "
                "start the ranks with `qurl train`, torchrun or the sbatch script"
            )
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or gloo asks for the hostname
    dist.init_process_group(
        communication_backend(),
        rank=rank(),
        world_size=world_size(),
        timeout=timedelta(seconds=timeout_s),
        **arguments,
    )


def from_rank_zero(work: Callable[[], T]) -> T:
    """What `work()` returns on global rank 0, on every rank; where it raises, every rank raises."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            dist.broadcast_object_list([None, f"{type(error).__name__}: {error}"])
            raise
    dist.broadcast_object_list(outcome)
    result, failure = outcome
    if failure is not None:
        raise RuntimeError(f"rank 0 failed: {failure}")
    return result


class _CudaMeansCpu(TorchFunctionMode):
    """Reads the CUDA device literals in Megatron's sources as the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1:  # optimizers ask for torch.cuda.FloatTensor
            return func(*args).replace("torch.", "torch.cuda.")
        if not kwargs:
            return func(*args)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


@contextmanager
def megatron_runtime() -> Iterator[None]:
    """Enter it around everything that builds, runs or checkpoints a Megatron model.

    It holds for the entering thread only, and costs about a microsecond an operation on the CPU;
    on a GPU it is nothing.
    """
    if accelerator() == "cuda":
        yield
        return
    from megatron.core.tensor_parallel import random

    nothing = torch.empty(0)  # no dropout: recomputed layers need no random state
    with ExitStack() as patches:
        for module, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda device=None: None),
            (random, "_get_cuda_rng_state", lambda **_: nothing),
            (random, "_set_cuda_rng_state", lambda *_, **__: None),
        ):
            patches.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        with _CudaMeansCpu():
            yield


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's norm interface over torch's RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, device=device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(torch.nn.Module):
    """Megatron's core attention interface over torch's scaled dot product, causal only."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.repeats = config.num_attention_heads // config.num_query_groups

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any
    ) -> Tensor:
        """`query` [time, batch, heads, head_dim], `key` and `value` with key-value heads.

        Returns [time, batch, heads * head_dim].
        """
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.repeats > 1
        )
        return context.permute(2, 0, 1, 3).flatten(2)


@functools.cache
def _has_transformer_engine() -> bool:
    # Looked for only beside a GPU: its bare wheel raises RuntimeError at import without one.
    return accelerator() == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of a part of this pipeline stage.

    Transformer Engine's where it is installed beside a GPU; anywhere else Megatron's own layers
    with torch's RMSNorm and scaled dot product attention.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    norm: type[torch.nn.Module]
    if _has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm
        )
    else:
        norm = RMSNorm
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, virtual_stage), layer_norm=norm
    )


def transformer_config_fields() -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that depend on the machine."""
    return {
        "use_cpu_initialization": accelerator() == "cpu",
        "bias_activation_fusion": accelerator() == "cuda",
        "apply_rope_fusion": _has_transformer_engine(),
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": accelerator() == "cuda",
    }


def gpu_properties() -> list[Any]:
    """Return torch's properties of each GPU: `name`, `major`, `minor`, `total_memory` in bytes."""
    return [torch.cuda.get_device_properties(index) for index in range(num_gpus())]
