"""SGLang's fused kernels compute on a GPU what the CPU's loop over experts computes."""

import pytest

from moe_layer import CONFIGS, build_layer, routed


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("weight_format", CONFIGS)
def test_fused_experts_are_those_of_the_cpu(weight_format: str) -> None:
    layer, method, _ = build_layer(weight_format)
    dispatched = routed()
    expected = method.apply(layer, dispatched).hidden_states.float()
    layer.cuda()
    topk = dispatched.topk_output
    on_gpu = dispatched._replace(
        hidden_states=dispatched.hidden_states.cuda(),
        topk_output=topk._replace(
            topk_weights=topk.topk_weights.cuda(), topk_ids=topk.topk_ids.cuda()
        ),
    )
    out = method.apply(layer, on_gpu).hidden_states.cpu().float()
    # As in test_linear.py; here activations are rounded to codes twice.
    assert (out - expected).norm() / expected.norm() < 1e-2
