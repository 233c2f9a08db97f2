"""The learner's attention where Transformer Engine is not installed, on a GPU.

torch's fake tensors claim to be on a GPU: they have shapes and dtypes, but no values.
"""

import inspect
import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from qurl_megatron.learner import layers

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 6, 2, 8
BOUNDS = [0, 3, 4, 11]


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> layers.CausalAttention:
    """Return attention on the only context-parallel rank."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(layers.parallel_state, "get_context_parallel_group", lambda: group)
    config: Any = None
    return layers.CausalAttention(config)


def pack(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, None, PackedSeqParams]:
    """Return the arguments of attention over sequences of 3, 1 and 7 tokens."""
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    sequences = PackedSeqParams("thd", *[starts] * 2, *[starts.cpu()] * 2, 8, 8)
    query, key, value = (
        torch.randn(BOUNDS[-1], heads, HEAD_DIM, dtype=dtype, device=device)
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    )
    return query, key, value, None, sequences


def reference(**given: Any) -> Tensor:
    """Compute what torch documents of `varlen_attn`, one sequence after the other."""
    assert given["window_size"] == (-1, 0)  # "(-1, 0) for causal attention"
    assert torch.equal(given["cu_seq_q"], given["cu_seq_k"])
    bounds = given["cu_seq_q"].tolist()
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    assert given["max_q"] >= longest and given["max_k"] >= longest
    attended = []
    for start, stop in itertools.pairwise(bounds):
        query, key, value = (
            given[name][start:stop].transpose(0, 1) for name in ("query", "key", "value")
        )
        attended.append(
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(attended)


def test_flash_attention_is_asked_for_what_the_cpu_computes(
    attention: layers.CausalAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key, value, mask, sequences = pack(torch.float32, "cpu")
    signature = inspect.signature(varlen_attn)

    def compute(*arguments: Any, **keywords: Any) -> Tensor:
        return reference(**signature.bind(*arguments, **keywords).arguments)

    monkeypatch.setattr(layers, "varlen_attn", compute)
    on_gpu = layers._flash_attention(query, key, value, sequences).flatten(1)
    on_cpu = attention(query, key, value, mask, sequences)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-6)


def test_a_pack_in_bfloat16_goes_to_flash_attention_whole(
    attention: layers.CausalAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = Mock(wraps=varlen_attn)
    monkeypatch.setattr(layers, "varlen_attn", flash)
    with FakeTensorMode(allow_non_fake_inputs=True):
        context = attention(*pack(torch.bfloat16, "cuda"))
        assert context.shape == (BOUNDS[-1], HEADS * HEAD_DIM)
        assert context.dtype == torch.bfloat16 and context.is_cuda
    assert flash.call_args.args[0].shape == (BOUNDS[-1], HEADS, HEAD_DIM)
    attention(*pack(torch.bfloat16, "cpu"))
    assert flash.call_count == 1
