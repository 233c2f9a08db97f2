"""What the learner hands to FLA's kernels: stand-ins with their signatures compute by torch."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from linear_attention import BOUNDS, build_mixer, inputs
from qurl_megatron.model.delta_rule import causal_conv, chunk_plan, gated_delta_rule


def plan_of(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> Any:
    assert cu_seqlens.dtype == torch.int64 and torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert (cu_seqlens.diff() > 0).all()
    return chunk_plan(tuple(cu_seqlens.tolist()), torch.device("cpu"))


def causal_conv1d(
    x: Tensor, weight: Tensor, *, activation: str, **sequences: Tensor
) -> tuple[Tensor, None]:
    assert activation == "silu" and x.dim() == 3
    return torch.nn.functional.silu(causal_conv(x[0], weight, plan_of(**sequences).since))[
        None
    ], None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    **sequences: Tensor,
) -> tuple[Tensor, None]:
    assert use_qk_l2norm_in_kernel and q.dtype == torch.bfloat16
    plan = plan_of(**sequences)
    return gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], plan)[0][None].to(v.dtype), None


def test_fla_is_given_what_torch_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, rule = SimpleNamespace(causal_conv1d=causal_conv1d), SimpleNamespace()
    rule.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name, module in {
        "fla": SimpleNamespace(),
        "fla.modules": SimpleNamespace(),
        "fla.modules.causal_conv1d": conv,
        "fla.ops": SimpleNamespace(),
        "fla.ops.gated_delta_rule": rule,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    *given, weight = inputs()
    mixer = build_mixer(weight)
    with_fla = mixer._mix_with_fla(*given, BOUNDS)
    assert with_fla.dtype == torch.bfloat16
    assert torch.equal(with_fla, mixer._mix(*given, BOUNDS).bfloat16())
