"""SGLang's own models and weight loaders without a server, one rank of it after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def engine(model_dir: Path) -> Iterator[None]:
    """What SGLang wants to be there before it builds a model: groups of one, its arguments."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.models.registry import import_model_classes
    from sglang.srt.runtime_context import publish, reset_context
    from sglang.srt.server_args import ServerArgs

    import_model_classes("sglang.srt.models")  # cached; a meta default device would break it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    publish(ServerArgs(model_path=str(model_dir), device="cpu"), role="scheduler")
    try:
        yield
    finally:
        reset_context()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def as_rank(rank: int, size: int) -> AbstractContextManager[Any]:
    """Within it SGLang takes this process for tensor-parallel rank `rank` of `size`."""
    from sglang.srt.runtime_context import get_parallel

    attention = {"attn_tp_size": size, "attn_tp_rank": rank, "attn_dp_size": 1, "attn_dp_rank": 0}
    return get_parallel().override(tp_size=size, tp_rank=rank, **attention)


def build(model_dir: Path, weight_format: str) -> Any:
    """SGLang's model as this rank builds it, on torch's default device."""
    from sglang.srt.models.registry import ModelRegistry
    from transformers import AutoConfig

    from qurl_megatron.sglang_plugin import linear

    quantization = {
        "bf16": None,
        "int8": linear.Int8Config,
        "fp8": linear.Fp8Config,
        "fp8-tensor": linear.Fp8Config,
        "fp8-block": linear.Fp8BlockConfig,
    }[weight_format]
    config = AutoConfig.from_pretrained(model_dir)
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return model_class(config, quantization() if quantization else None)
    finally:
        torch.set_default_dtype(before)


def held(
    model_dir: Path, weight_format: str, sent: Mapping[str, Tensor], size: int
) -> dict[str, Tensor]:
    """Load `sent` into all ranks of a server of `size`; what they then hold, put together.

    Fails where ranks hold different values of the same place, or none.
    """
    from qurl_megatron.sglang_plugin.verify import parts

    whole = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in sent.items()}
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in sent.items()}
    for rank in range(size):
        with as_rank(rank, size):
            model = build(model_dir, weight_format)
            model.load_weights((name, tensor.clone()) for name, tensor in sent.items())
        for name, tensor, row, column in parts(model):
            index = (slice(row, row + tensor.shape[0]),)
            if tensor.dim() == 2:
                index = (*index, slice(column, column + tensor.shape[1]))
            place, again = whole[name][index], seen[name][index]
            assert place.shape == tensor.shape, f"{name} reaches beyond its end on rank {rank}"
            assert torch.equal(place[again].view(torch.uint8), tensor[again].view(torch.uint8))
            place.copy_(tensor)
            again.fill_(True)
    for name, places in seen.items():
        assert places.all(), f"no rank holds all of {name}"
    return whole
