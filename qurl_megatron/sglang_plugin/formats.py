"""The formats in which a server can hold weights, as SGLang chooses them by name.

A format decides which layers have which method: linear layers those of `linear.py`, experts that of
`moe.py`, and all others SGLang's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped

from qurl_megatron.sglang_plugin.linear import (
    BLOCK,
    Fp8BlockLinearMethod,
    Fp8LinearMethod,
    Int8LinearMethod,
    QuantizedLinearMethod,
)
from qurl_megatron.sglang_plugin.moe import QuantizedExpertsMethod


class QurlConfig(QuantizationConfig):
    """Base class of the quantization configs that SGLang chooses from by name.

    The name is given as `--quantization qurl_int8`, or in a model's config.json as
    `"quantization_config": {"quant_method": "qurl_int8"}`. Its `modules_to_not_convert` lists the
    linear layers that stay in BF16.
    """

    name: str
    linear_method: type[QuantizedLinearMethod]
    min_capability: int  # compute capability of the oldest GPU: 75 is 7.5

    def __init__(self, kept_layers: Sequence[str] = ()) -> None:
        super().__init__()
        self.kept_layers = list(kept_layers)

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.min_capability

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QurlConfig:
        return cls(config.get("modules_to_not_convert") or ())

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear layer or of experts; None for embeddings and lm_head."""
        if isinstance(layer, FusedMoE):
            if any(name.startswith(f"{prefix}.") for name in self.kept_layers):
                return None  # all are kept, see `config.keep`
            return QuantizedExpertsMethod(self.linear_method(self))
        if not isinstance(layer, LinearBase):
            return None
        if is_layer_skipped(prefix, self.kept_layers):
            return UnquantizedLinearMethod()
        return self.linear_method(self)

    def get_scaled_act_names(self) -> list[str]:
        return []


class Int8Config(QurlConfig):
    """INT8 codes, those of int4 too, with a scale per output channel."""

    name = "qurl_int8"
    linear_method = Int8LinearMethod
    min_capability = 75


class Fp8Config(QurlConfig):
    """FP8 codes with a scale per output channel; of `fp8-tensor` all are equal."""

    name = "qurl_fp8"
    linear_method = Fp8LinearMethod
    min_capability = 89


class Fp8BlockConfig(QurlConfig):
    """FP8 codes with a scale per block of 128 x 128."""

    name = "qurl_fp8_block"
    linear_method = Fp8BlockLinearMethod
    min_capability = 90
    weight_block_size = (BLOCK, BLOCK)  # SGLang's loaders of fused layers read it
