"""Which quantized layers stay in BF16: the names and patterns of `quantization.keep`.

A name is a module's name in a Hugging Face checkpoint, or a part of it between dots. It stands for
all linear layers in the module. `*`, `?` and `[abc]` match as in a shell.

    model.layers.0.mlp.down_proj     one layer
    model.layers.0                   all linear layers of a block
    down_proj, *.down_proj           that layer of every block
    self_attn.[qkv]_proj             the three layers that a server holds as one
    mlp.experts                      all experts of every block, which a server holds as one
    in_proj_qkv, in_proj_z           the two of linear attention that a server holds as one

Some parts of a layer's tensor are full tensors of their own (`in_proj_qkv:key`, see
`weight_map.py`); the layer's name stands for all of them.
"""

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture


@functools.cache
def fused_layers(architecture: Architecture) -> list[tuple[str, ...]]:
    """Return the names of the model's linear layers, block by block.

    A tuple has the layers that a server holds as one, such as q, k and v or all experts of a block,
    and all parts of a layer.
    """
    groups = []
    for layer in range(architecture.num_layers):
        experts: list[str] = []
        for rule in weight_map.rules(architecture):
            if rule.quantized and layer in rule.layers(architecture.linear_layers):
                names = [name.removesuffix(".weight") for name in rule.hugging_face_names(layer)]
                if rule.of_experts:
                    experts += names
                else:
                    groups.append(tuple(names))
        if experts:
            groups.append(tuple(experts))
    return groups


def kept_layers(
    keep: Sequence[str], architecture: Architecture, field: str = "quantization.keep"
) -> list[str]:
    """Return the names of the linear layers that the patterns of `quantization.keep` match.

    `field` is the name of the patterns in messages.

    Raises:
        ConfigError: a pattern matches no linear layer, or the patterns match only some of the
            layers that a server holds as one.
    """
    if not keep:  # a plan asks thousands of times
        return []
    groups = fused_layers(architecture)
    names = [name for group in groups for name in group]
    kept = matching(keep, names, f"{field}=", "embeddings, norms and lm_head are BF16 anyway")
    for group in groups:
        missing = layers_of([name for name in group if name not in kept])
        if missing and len(missing) < len(layers_of(group)):
            raise ConfigError(
                f"{field}: has {_listed(layers_of(sorted(kept & {*group})))} without "
                f"{_listed(missing)}; a server holds them as one layer, so keep all or none"
            )
    return [name for name in names if name in kept]


def matching(patterns: Sequence[str], names: Sequence[str], field: str, why: str) -> set[str]:
    """Return the names of linear layers that match; `field` and `why` are for the message.

    Raises:
        ConfigError: a pattern matches no name.
    """
    matching: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(f".{layer_of(name)}.", f"*.{pattern}.*")}
        if not matches:
            raise ConfigError(
                f"{field}{pattern}: matches no quantized layer ({why}); names are such as "
                f"{names[0]} or *.down_proj"
            )
        matching |= matches
    return matching


def layer_of(name: str) -> str:
    """Return the name of the layer that a part belongs to: `in_proj_qkv` of `in_proj_qkv:key`."""
    return name.partition(":")[0]


def layers_of(names: Sequence[str]) -> list[str]:
    """Return the names that layers have in a checkpoint, each once."""
    return list(dict.fromkeys(map(layer_of, names)))


def module_of(name: str) -> str:
    """Return the name to keep a layer by; for an expert's, that of all experts of its block."""
    block, is_of_expert, _ = name.partition(".experts.")
    return f"{block}.experts" if is_of_expert else layer_of(name)


def _listed(names: list[str]) -> str:
    """Return the names, or the first of many and their number."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} others"
