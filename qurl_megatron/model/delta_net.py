"""Hybrids, in which most layers have gated DeltaNet in place of attention: their config.json.

`learner/delta_net.py` has their layers, and `sglang_plugin/delta_net.py` what servers need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.model.config_json import ArchitectureError, read_positive, read_size

CHUNK = 64  # tokens that the gated delta rule computes at once, here and in FLA's kernels


@dataclass(frozen=True)
class DeltaNet:
    """The layers of gated DeltaNet, a linear attention, in a hybrid model.

    In the layers between them, attention rotates only the first channels of a head, and each
    channel of its output has a gate. All norms of a hybrid multiply by 1 + weight, except the one
    after the linear attention.
    """

    layers: tuple[bool, ...]  # for every layer, whether its attention is linear
    key_heads: int  # of queries too; each has the same number of value heads
    value_heads: int
    key_dim: int  # channels of one head
    value_dim: int
    conv_width: int  # tokens that the convolution before the linear attention sees
    rotary_factor: float  # the share of an attention head's channels that is rotated

    @classmethod
    def read(cls, config: dict[str, Any], num_layers: int, head_dim: int, file: Path) -> DeltaNet:
        """Read the fields of a config.json that has been through `with_fields`.

        Raises:
            ArchitectureError: they contradict each other.
        """
        every = read_size(config, "full_attention_interval", file)
        layers = tuple((layer + 1) % every > 0 for layer in range(num_layers))
        kinds = ["linear_attention" if linear else "full_attention" for linear in layers]
        if config.get("layer_types") not in (None, kinds):
            raise ArchitectureError(
                f"{file}: 'layer_types' must repeat a block of linear_attention that ends with "
                "one full_attention; full_attention_interval, or the first of these, says "
                f"{every} layers"
            )
        factor = read_positive(config, "partial_rotary_factor", file, 0.25)
        if factor > 1 or head_dim * factor % 2:
            raise ArchitectureError(
                f"{file}: partial_rotary_factor {factor} of a head's {head_dim} channels is not an "
                "even number"
            )
        hybrid = cls(
            layers=layers,
            key_heads=read_size(config, "linear_num_key_heads", file, 16),
            value_heads=read_size(config, "linear_num_value_heads", file, 32),
            key_dim=read_size(config, "linear_key_head_dim", file, 128),
            value_dim=read_size(config, "linear_value_head_dim", file, 128),
            conv_width=read_size(config, "linear_conv_kernel_dim", file, 4),
            rotary_factor=factor,
        )
        if hybrid.value_heads % hybrid.key_heads:
            raise ArchitectureError(
                f"{file}: {hybrid.value_heads} value heads of linear attention do not divide into "
                f"groups over {hybrid.key_heads} key heads"
            )
        return hybrid

    @property
    def keys(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that rules of the weight map name."""
        return {
            "linear_keys": self.keys,
            "linear_values": self.values,
            "linear_heads": self.value_heads,
            "linear_head": self.value_dim,
            "conv": self.conv_width,
        }

    @property
    def projected(self) -> int:
        """Outputs of a layer's input projections and inputs of its output projection, added up."""
        return 2 * self.keys + 3 * self.values + 2 * self.value_heads

    @property
    def flops(self) -> float:
        """FLOPs of a layer's rule and convolution for one token, in the forward pass.

        They are those of `model.delta_rule`: products of the tokens of a chunk with each other, a
        triangular solve, and three products with the state.
        """
        inside = CHUNK * (5 * self.key_dim + 3 * self.value_dim)
        rule = self.value_heads * (inside + 6 * self.key_dim * self.value_dim)
        return rule + 2 * self.conv_width * (2 * self.keys + self.values)


def with_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return a hybrid's config.json with two fields that SGLang reads and transformers does not.

    They are `full_attention_interval`, and `partial_rotary_factor` outside of `rope_parameters`,
    where transformers writes 0.25 whatever the factor is.
    """
    kinds = config.get("layer_types")
    every = config.get("full_attention_interval")
    if every is None and isinstance(kinds, list) and "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
    rope = config.get("rope_parameters")
    factor = config.get("partial_rotary_factor", 0.25)
    factor = rope.get("partial_rotary_factor", factor) if isinstance(rope, dict) else factor
    return {
        **config,
        "full_attention_interval": 4 if every is None else every,
        "partial_rotary_factor": factor,
    }


def unsupported(config: dict[str, Any]) -> Iterator[str]:
    """Yield what a hybrid needs and the learner, or the server, does not compute."""
    for name, *known in (
        ("attn_output_gate", True),
        ("output_gate_type", "swish", "silu", None),
        ("mamba_ssm_dtype", "float32", None),
        ("norm_topk_prob", True),  # transformers takes it for true, whatever it is
    ):
        if name in config and config[name] not in known:
            yield f"'{name}' must be {known[0]!r}; {config[name]!r:.80} is not supported"
