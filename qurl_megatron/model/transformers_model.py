"""Models of transformers, with which commands other than a run compute."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import Weights, read_config, text_name


def transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a directory that `check_model` accepts."""
    import transformers

    weights = Weights(directory, Architecture.from_directory(directory))
    if not weights.block:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    # transformers reads FP8 with another library, and only whole blocks.
    config = read_config(directory)
    model_class = getattr(transformers, config["architectures"][0])
    names = [name for file in weights.files for name in weights.names(file)]
    return model_class.from_pretrained(
        None,
        config=model_class.config_class.from_dict(config),
        state_dict={text_name(name): weights.whole(name) for name in names},
        dtype=dtype,
    )


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a transformers model as full tensors; they are views.

    transformers joins the experts of a layer in one parameter, and their gate and up too; it also
    joins the queries, keys and values of a linear attention.
    """
    for name, parameter in model.named_parameters():
        of_layer, _, kind = name.rpartition(".")
        if of_layer.endswith((".in_proj_qkv", ".conv1d")):
            config: Any = model.config
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            rows = parameter.flatten(1).split([keys, keys, len(parameter) - 2 * keys])
            for part, view in zip(("query", "key", "value"), rows, strict=True):
                yield f"{of_layer}:{part}.weight", view
            continue
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, parameter
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for expert, weights in enumerate(parameter):
            for part, view in zip(kinds, weights.chunk(len(kinds)), strict=True):
                yield f"{of_layer}.{expert}.{part}.weight", view
