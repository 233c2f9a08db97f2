"""Checksums of what lies in a server's layers now, under the names weights were sent by.

`POST /weights_checker {"action": "checksum"}` answers, for each tensor-parallel rank, with the
checksum of every part it holds by `checksum.part_key`; `checksum.combine` makes full tensors' of
them. They are taken of the very parameters the layers multiply with, after SGLang's own loaders
have fused and sharded what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor

from qurl_megatron.quantization.checksum import checksum, part_key
from qurl_megatron.sglang_plugin.linear import BLOCK

Part = tuple[
    str, Tensor, int, int
]  # name, its values here, first row and column in the full tensor


def compute_checksum(checker: Any) -> dict[str, Any]:
    """Stands in for SGLang's `WeightChecker._compute_checksum`, which needs a GPU."""
    checksums = {
        part_key(name, row, column): checksum(tensor, row_offset=row, column_offset=column)
        for name, tensor, row, column in parts(checker._get_model())
    }
    return {
        "checksums": {key: str(value) for key, value in checksums.items()},
        "per_gpu_checksum": str(sum(checksums.values())),
        "parallelism_info": checker._parallelism_info().model_dump(),
    }


def parts(model: torch.nn.Module) -> Iterator[Part]:
    """Every parameter of `model` on this rank, cut into the Hugging Face tensors it is made of."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield from _parts(module, module_name, name, parameter.detach())


def _parts(module: torch.nn.Module, path: str, name: str, tensor: Tensor) -> Iterator[Part]:
    rows_of_one = BLOCK if name == "weight_scale_inv" else 1  # a block's scale stands for so many
    if isinstance(module, QKVParallelLinear):
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        rows = 0
        for projection, size, rank in (
            ("q_proj", module.q_proj_shard_size // rows_of_one, module.tp_rank),
            ("k_proj", module.kv_proj_shard_size // rows_of_one, kv_rank),
            ("v_proj", module.v_proj_shard_size // rows_of_one, kv_rank),
        ):
            sender = f"{path.removesuffix('qkv_proj')}{projection}.{name}"
            yield sender, tensor[rows : rows + size], rank * size, 0
            rows += size
    elif isinstance(module, MergedColumnParallelLinear):
        rows = 0
        for projection, full_size in zip(
            ("gate_proj", "up_proj"), module.output_sizes, strict=True
        ):
            size = full_size // module.tp_size // rows_of_one
            sender = f"{path.removesuffix('gate_up_proj')}{projection}.{name}"
            yield sender, tensor[rows : rows + size], module.tp_rank * size, 0
            rows += size
    elif isinstance(module, RowParallelLinear) and name in ("weight", "weight_scale_inv"):
        yield f"{path}.{name}", tensor, 0, module.tp_rank * tensor.shape[1]
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        rows = shard.org_vocab_end_index - shard.org_vocab_start_index  # without padding
        yield f"{path}.{name}", tensor[:rows], shard.org_vocab_start_index, 0
    else:
        yield f"{path}.{name}", tensor, 0, 0
