"""Checksums of the weights that a server's layers hold, under the names they were sent with.

`POST /weights_checker {"action": "checksum"}` returns, for each tensor-parallel rank, the checksum
of every part of a tensor that the rank holds, by `checksum.part_key`. `checksum.combine` adds them
up to full tensors' checksums. They are computed from the parameters that the layers multiply with,
after SGLang's own loaders have fused and sharded what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor

from qurl_megatron.quantization.checksum import Part, checksums, part_key
from qurl_megatron.sglang_plugin.linear import BLOCK
from qurl_megatron.weight_sync.direct import describe

HeldPart = tuple[str, Part]  # the name of a Hugging Face tensor, and the part that this rank holds


def compute_checksum(checker: Any) -> dict[str, Any]:
    """Return this rank's checksums, in place of `WeightChecker._compute_checksum`.

    SGLang's own method needs a GPU.
    """
    parts = _parts_by_key(checker)
    values = dict(zip(parts, checksums(parts.values()), strict=True))
    return {
        "checksums": {key: str(value) for key, value in values.items()},
        "per_gpu_checksum": str(sum(values.values())),
        "parallelism_info": checker._parallelism_info().model_dump(),
    }


def handle(original: Callable[..., Any], checker: Any, action: str, **options: Any) -> Any:
    """Do an action of SGLang's weights checker, around `WeightChecker.handle`.

    The action `parameters` hands out the parameters to processes of this machine, in the form of
    `compute_checksum`, with texts of `direct.describe` for checksums.
    """
    if action != "parameters":
        return original(checker, action=action, **options)
    return {
        "checksums": {key: describe(part.values) for key, part in _parts_by_key(checker).items()},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info().model_dump(),
    }


def _parts_by_key(checker: Any) -> dict[str, Part]:
    """Return the parts of tensors that a checker's model holds, by `checksum.part_key`."""
    held = held_parts(checker._get_model())
    return {
        part_key(name, part.row, part.column): part
        for name, parts in held.items()
        for part in parts
    }


def held_parts(model: torch.nn.Module) -> dict[str, list[Part]]:
    """Return this rank's parameters, cut into the Hugging Face tensors they were fused from.

    They are lists of parts, by the tensors' names. They are made once for a model: its parameters
    stay where they are.
    """
    parts: dict[str, list[Part]] | None = getattr(model, "_qurl_held_parts", None)
    if parts is None:
        parts = {}
        for name, part in _held_parts(model):
            parts.setdefault(name, []).append(part)
        object.__setattr__(model, "_qurl_held_parts", parts)
    return parts


def _held_parts(model: torch.nn.Module) -> Iterator[HeldPart]:
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield from _cut(module, module_name, name, parameter.detach())


def _cut(module: torch.nn.Module, path: str, name: str, tensor: Tensor) -> Iterator[HeldPart]:
    """Yield the parts of one parameter of a module that is at `path` in the model."""
    rows_per_entry = BLOCK if name == "weight_scale_inv" else 1  # rows of the weight
    if isinstance(module, QKVParallelLinear):
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        rows = 0
        for projection, size, rank in (
            ("q_proj", module.q_proj_shard_size // rows_per_entry, module.tp_rank),
            ("k_proj", module.kv_proj_shard_size // rows_per_entry, kv_rank),
            ("v_proj", module.v_proj_shard_size // rows_per_entry, kv_rank),
        ):
            sent_name = f"{path.removesuffix('qkv_proj')}{projection}.{name}"
            yield sent_name, Part(tensor[rows : rows + size], rank * size, 0)
            rows += size
    elif isinstance(module, MergedColumnParallelLinear):
        rows = 0
        for projection, full_size in zip(
            ("gate_proj", "up_proj"), module.output_sizes, strict=True
        ):
            size = full_size // module.tp_size // rows_per_entry
            sent_name = f"{path.removesuffix('gate_up_proj')}{projection}.{name}"
            yield sent_name, Part(tensor[rows : rows + size], module.tp_rank * size, 0)
            rows += size
    elif isinstance(module, FusedMoE):
        yield from _cut_experts(module, path, name, tensor)
    elif isinstance(module, RowParallelLinear) and name in ("weight", "weight_scale_inv"):
        yield f"{path}.{name}", Part(tensor, 0, module.tp_rank * tensor.shape[1])
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        rows = shard.org_vocab_end_index - shard.org_vocab_start_index  # without padding
        yield f"{path}.{name}", Part(tensor[:rows], shard.org_vocab_start_index, 0)
    else:
        yield f"{path}.{name}", Part(tensor, 0, 0)


def _cut_experts(layer: FusedMoE, path: str, name: str, tensor: Tensor) -> Iterator[HeldPart]:
    """Yield the parts of a fused parameter `[experts, ...]` of a layer's experts on this rank."""
    fused, _, sent_name = name.partition("_")
    first = layer.moe_ep_rank * layer.num_local_experts
    for expert, values in enumerate(tensor, start=first):
        if fused == "w13":
            for projection, part in zip(("gate_proj", "up_proj"), values.chunk(2), strict=True):
                row = layer.moe_tp_rank * len(part)
                yield f"{path}.{expert}.{projection}.{sent_name}", Part(part, row, 0)
        else:
            # Ranks share the columns, but each has all scales of whole rows.
            shared = sent_name != "weight_scale"
            column = layer.moe_tp_rank * values.shape[1] if shared else 0
            yield f"{path}.{expert}.down_proj.{sent_name}", Part(values, 0, column)
