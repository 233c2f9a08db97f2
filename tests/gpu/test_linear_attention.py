"""FLA's kernels compute in BF16 what torch computes in float32, forward and backward."""

import pytest
import torch

from linear_attention import BOUNDS, build_mixer, inputs
from qurl_megatron.learner.delta_net import has_fla


@pytest.mark.skipif(not has_fla(), reason="flash-linear-attention is not installed")
def test_fla_and_torch_give_the_same_outputs_and_gradients() -> None:
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        qkv, decay, beta, weight = (tensor.cuda().to(dtype).requires_grad_() for tensor in inputs())
        mixer = build_mixer(weight)
        mix = mixer._mix_with_fla if dtype == torch.bfloat16 else mixer._mix
        outputs = mix(qkv, decay.float(), beta, BOUNDS)
        outputs.float().square().sum().backward()
        results.append([outputs, *(t.grad for t in (qkv, decay, beta, weight))])
    for name, own, expected in zip(
        ("outputs", "qkv", "decay", "beta", "weight"), *results, strict=True
    ):
        error = (own.float() - expected).norm() / expected.norm()
        assert error < 2e-2, (name, float(error))
