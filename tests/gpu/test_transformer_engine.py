"""`fp8-tensor` and `fp8-block` equal the results of Transformer Engine's quantizers bit for bit."""

from typing import Any

import pytest
import torch

from qurl_megatron.quantization.quantize import quantize


@pytest.fixture
def engine() -> Any:
    reason = 'is not installed (pip install --no-build-isolation "transformer-engine[pytorch]")'
    return pytest.importorskip("transformer_engine.pytorch", reason=f"transformer_engine {reason}")


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(128, 128), (256, 512), (1024, 384)]  # Transformer Engine requires whole blocks
    tensors = []
    for shape in shapes:
        for magnitude in (0.02, 1e-5, 1e4):
            tensors.append((torch.randn(shape, generator=generator) * magnitude).to(dtype).cuda())
    tensors.append(torch.zeros(128, 128, dtype=dtype, device="cuda"))
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_tensor_is_float8_current_scaling(engine: Any, dtype: torch.dtype) -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3, device=torch.device("cuda"), rowwise=True, columnwise=False
    )
    for weight in weights(dtype):
        theirs, ours = quantizer(weight), quantize(weight, "fp8-tensor")
        assert torch.equal(theirs._data.view(torch.uint8), ours.codes.view(torch.uint8))
        assert torch.equal(theirs._scale_inv.flatten(), ours.scale.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_block_is_float8_block_scaling(engine: Any, dtype: torch.dtype) -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        force_pow_2_scales=True,
        amax_epsilon=0.0,
        block_scaling_dim=2,
    )
    for weight in weights(dtype):
        theirs, ours = quantizer(weight), quantize(weight, "fp8-block")
        assert torch.equal(theirs._rowwise_data.view(torch.uint8), ours.codes.view(torch.uint8))
        rows, columns = ours.scale.shape
        # Transformer Engine pads the columns of scales to a multiple of four.
        assert torch.equal(theirs._rowwise_scale_inv[:rows, :columns], ours.scale)
