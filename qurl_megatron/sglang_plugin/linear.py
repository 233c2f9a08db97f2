"""Linear layers with INT8, INT4 or FP8 weight codes, which can be loaded any number of times.

A layer holds exactly what the learner sends:

    weight            [out, in]                            codes
    weight_scale      [out, 1] float32                     one scale per output channel, or
    weight_scale_inv  [ceil(out/128), ceil(in/128)] float32  one per block of 128 x 128 codes

    weight            [out, in / 2] uint8                  INT4: two codes a byte, and
    weight_scale      [out, in / group size] bfloat16      one scale per channel and group of inputs

With one scale per channel, activations x are quantized per token on the fly (QuRL Eq. 2):

    out = (x_codes @ weight.T) * x_scale * weight_scale.T + bias

With blocks, activations are quantized per token and 128 channels. INT4 multiplies activations as
they are by the weight's values, which are rounded to bfloat16 as SGLang's W4A16 kernels round them:

    out = x @ bfloat16(codes * scale).T + bias

Over a base of adapters (LoRA, `extensions/adapters`) a layer has two more parameters, and adds
their product to `out` in float32. On a CPU the sum alone is rounded: if `out` were rounded before,
rounding the sum would lose most of a product that is small beside it. A layer that fuses
projections has an A for each, one behind another. A row of B has values only in the columns of its
own projection's A, and 0 elsewhere, so two products serve all projections:

    lora_a            [projections * rank, in] bfloat16
    lora_b            [out, projections * rank] bfloat16

    out = out + (alpha / rank) (x @ lora_a.T) @ lora_b.T

SGLang's own W8A8 layers transpose and rebind their weights after the first load, and then refuse or
lose a second load. These layers multiply by a transposed view and never replace a parameter.

On a GPU, sgl_kernel computes the products; it requires that view and divisible sizes (in by 16, out
by 8). INT4 is the exception: SGLang's Marlin kernels take codes only in an order of their own, to
which every publish would have to be converted. So a layer's values are written out, and multiplied
as BF16. On an H100 SGLang's Triton kernel for W4A16 experts, with a layer as the only
expert, was 17 times as slow as INT8. On a CPU `quantization/products.py` has the products.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor
from torch.nn.functional import linear

from qurl_megatron.quantization.activations import BLOCK, in_groups, quantize_tokens
from qurl_megatron.quantization.products import (
    in_float32,
    int8_product,
    kept,
    multiplies_bfloat16,
    multiply_unquantized,
    sum_bfloat16,
)
from qurl_megatron.quantization.quantize import int4_values

MAX_TOKENS = 128  # of a CPU product: its sums and their operands stay in a core's cache


class QuantizedLinearMethod(LinearMethodBase):
    """Base class: the parameters and the CPU arithmetic that the formats share."""

    code_dtype: torch.dtype
    packing = 1  # codes that share a byte
    zero = 0  # the byte that holds codes 0
    scale_dtype = torch.float32
    scale_name = "weight_scale"  # of the parameter
    block: tuple[int, int | None] = (1, None)  # rows and columns of one scale; None: all columns
    quantizes_activations = True

    def __init__(self, quant_config: Any) -> None:
        """Take a `formats.QurlConfig`."""
        self.quant_config = quant_config  # SGLang's loaders read its block size, if it has one

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., None],
        **attributes: Any,
    ) -> None:
        """Register this rank's shard, with codes 0 and scales 1 until weights arrive."""
        # SGLang passes its older loader to methods that it does not know. These parameter classes
        # are made for the newer one, and block scales load only with that.
        weight_loader = getattr(layer, "weight_loader_v2", weight_loader)
        weight = ModelWeightParameter(
            data=self.zero_codes(sum(output_partition_sizes), input_size_per_partition),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )
        layer.register_parameter("weight", weight)
        scale = self.create_scales(input_size_per_partition, output_partition_sizes, weight_loader)
        layer.register_parameter(self.scale_name, scale)
        if rank := self.quant_config.adapter_rank:
            width, out = len(output_partition_sizes) * rank, sum(output_partition_sizes)
            sizes = {"lora_a": (width, input_size_per_partition), "lora_b": (out, width)}
            for name, size in sizes.items():
                values = torch.zeros(size, dtype=torch.bfloat16)
                layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))

    def zero_codes(self, *shape: int) -> Tensor:
        """Return codes 0, packed, for weights of this shape."""
        *rows, columns = shape
        size = (*rows, columns // self.packing)
        return torch.full(size, self.zero, dtype=torch.uint8).view(self.code_dtype)

    def create_scales(
        self, input_size: int, output_sizes: list[int], weight_loader: Callable[..., None]
    ) -> torch.nn.Parameter:
        """Return scales 1 for this rank's shard, [out, 1] float32."""
        return ChannelQuantScaleParameter(
            data=torch.ones(sum(output_sizes), 1, dtype=torch.float32),
            output_dim=0,
            weight_loader=weight_loader,
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` [..., in] bfloat16 by the weight; return [..., out] bfloat16."""
        tokens = x.reshape(-1, x.shape[-1])
        multiply = self.multiply_cuda if x.is_cuda else self.multiply_cpu
        if self.quant_config.adapter_rank and not x.is_cuda:
            tokens = tokens.float()
        out = multiply(tokens, layer.weight, getattr(layer, self.scale_name), bias)
        if self.quant_config.adapter_rank:
            out = add_adapters(out, tokens, layer, self.quant_config.adapter_scaling)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def multiply_cpu(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `x` [tokens, in] by weight codes [out, in] and both scales, in float32.

        Return [tokens, out] in the dtype of `x`.
        """
        out = x.new_empty(len(x), len(weight))
        for tokens, rounded in zip(x.split(MAX_TOKENS), out.split(MAX_TOKENS), strict=True):
            codes, x_scale = quantize_tokens(tokens, self.code_dtype)
            sums = self.multiply_codes(codes, weight, scale).mul_(x_scale)
            rounded.copy_(sums if bias is None else sums.add_(bias))
        return out

    def multiply_codes(self, codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Multiply the values of activation codes [tokens, in] by a weight and its scale.

        Return [tokens, out] float32.
        """
        return sum_bfloat16(codes, weight).mul_(scale.t())

    def multiply_cuda(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Multiply as `multiply_cpu` does, with SGLang's GPU kernels."""
        raise NotImplementedError


class Int8LinearMethod(QuantizedLinearMethod):
    """INT8 weights and activations; on a CPU the sums are exact."""

    code_dtype = torch.int8

    def multiply_codes(self, codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        product = in_float32 if weight.is_cuda else int8_product(*weight.shape)
        return product(codes, weight, scale)

    def multiply_cuda(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Differs from the CPU if x / scale ends in .5: this kernel rounds it away from 0.
        from sgl_kernel import int8_scaled_mm
        from sglang.kernels.ops.quantization.int8_kernel import per_token_quant_int8

        codes, x_scale = per_token_quant_int8(x.contiguous())
        return int8_scaled_mm(codes, weight.t(), x_scale, scale, out_dtype=x.dtype, bias=bias)


class Fp8LinearMethod(QuantizedLinearMethod):
    """FP8 (E4M3) weights and activations; products are exact in float32, sums are rounded."""

    code_dtype = torch.float8_e4m3fn

    def multiply_cuda(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        from sgl_kernel import fp8_scaled_mm, sgl_per_token_quant_fp8

        x = x.contiguous()
        codes = torch.empty_like(x, dtype=self.code_dtype)
        x_scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        sgl_per_token_quant_fp8(x, codes, x_scale)
        return fp8_scaled_mm(codes, weight.t(), x_scale, scale, out_dtype=x.dtype, bias=bias)


class Fp8BlockLinearMethod(QuantizedLinearMethod):
    """FP8 (E4M3) weights in blocks of 128 x 128, activations per token and 128 channels."""

    code_dtype = torch.float8_e4m3fn
    scale_name = "weight_scale_inv"
    block = (BLOCK, BLOCK)

    def create_scales(
        self, input_size: int, output_sizes: list[int], weight_loader: Callable[..., None]
    ) -> torch.nn.Parameter:
        """Return scales 1 for blocks, [ceil(out/128), ceil(in/128)] float32.

        Raises:
            ValueError: a block would belong to two of the layers fused on this rank.
        """
        if len(output_sizes) > 1 and any(size % BLOCK for size in output_sizes):
            raise ValueError(
                f"qurl_fp8_block: the widths {output_sizes} of layers fused on this rank are not "
                f"all multiples of {BLOCK}, so a block would belong to two of them"
            )
        shape = (-(-sum(output_sizes) // BLOCK), -(-input_size // BLOCK))
        return BlockQuantScaleParameter(
            data=torch.ones(shape, dtype=torch.float32),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )

    def multiply_cpu(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        rows, columns = weight.shape
        codes, x_scale = quantize_tokens(in_groups(x, BLOCK), self.code_dtype)
        values = (codes * x_scale).view(len(x), -1)[:, :columns]

        def scaled(codes: Tensor) -> Tensor:
            spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
            return codes.float() * spread[:, :columns]

        out = values @ kept(weight, scaled).t()
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def multiply_cuda(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        from sglang.srt.layers.quantization.fp8_utils import dispatch_w8a8_block_fp8_linear

        return dispatch_w8a8_block_fp8_linear()(
            input=x,
            weight=weight,
            block_size=[BLOCK, BLOCK],
            weight_scale=scale,
            input_scale=None,
            bias=bias,
        )


class Int4LinearMethod(QuantizedLinearMethod):
    """INT4 weights, two codes a byte, in groups of 128 input channels; activations in BF16."""

    code_dtype = torch.uint8
    packing = 2
    zero = 0x88  # each code is stored plus 8
    scale_dtype = torch.bfloat16
    block = (1, 128)
    quantizes_activations = False

    def create_scales(
        self, input_size: int, output_sizes: list[int], weight_loader: Callable[..., None]
    ) -> torch.nn.Parameter:
        """Return scales 1 for groups, [out, in / group size] bfloat16.

        Raises:
            ValueError: a group would belong to two ranks, or be smaller than the others.
        """
        group_size = self.block[1]
        if input_size % group_size:
            raise ValueError(
                f"{self.quant_config.get_name()}: {input_size} input channels of this rank do "
                f"not divide into groups of {group_size}"
            )
        shape = sum(output_sizes), input_size // group_size
        return GroupQuantScaleParameter(
            data=torch.ones(shape, dtype=self.scale_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )

    def multiply_cpu(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        def values(packed: Tensor) -> Tensor:
            rounded = int4_values(packed, scale)
            is_float = x.dtype == torch.float32 or not multiplies_bfloat16()
            return rounded.float() if is_float else rounded

        return multiply_unquantized(x, kept(weight, values), bias)

    def multiply_cuda(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        return linear(x, int4_values(weight, scale), bias)


class Int4Group32LinearMethod(Int4LinearMethod):
    """INT4 weights in groups of 32 input channels."""

    block = (1, 32)


def add_adapters(out: Tensor, x: Tensor, layer: Any, scaling: float) -> Tensor:
    """Add the product of a layer's adapters and `x` [tokens, in] to `out` [tokens, out].

    In a row-parallel layer the result is this rank's part of a sum, as `out` is.
    """
    if x.is_cuda:
        return out.addmm_(x @ layer.lora_a.t(), layer.lora_b.t(), alpha=scaling)
    low = linear(x, kept(layer.lora_a, Tensor.float))
    wide = kept(layer.lora_b, Tensor.float)
    return out.addmm_(low, wide.t(), alpha=scaling)
