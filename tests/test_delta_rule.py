"""The gated delta rule in chunks against the recurrence that it stands for, of packed sequences."""

import itertools

import pytest
import torch
from torch import Tensor

from qurl_megatron.model.delta_rule import (
    CHUNK,
    ChunkPlan,
    causal_conv,
    chunk_plan,
    gated_delta_rule,
    step,
)

# Shorter than a chunk, of whole chunks, of one token, empty, and longer than others.
LENGTHS = (CHUNK + 5, 1, 0, 2 * CHUNK, 7, 3 * CHUNK + 1)
BOUNDS = tuple(itertools.accumulate(LENGTHS, initial=0))
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 7


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys, values, decays and betas of the packed sequences."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BOUNDS[-1], *shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        normal(KEY_HEADS, KEY_DIM),
        normal(KEY_HEADS, KEY_DIM),
        normal(VALUE_HEADS, VALUE_DIM),
        -normal(VALUE_HEADS).exp(),
        normal(VALUE_HEADS).sigmoid(),
    ]


def in_chunks(
    tensors: list[Tensor], plan: ChunkPlan, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    query, key, value, decay, beta = tensors
    return gated_delta_rule(query, key, value, decay, beta, plan, state)


def recurrence(tensors: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rule as it is written, token by token; `state` has one for each sequence."""
    query, key, value, decay, beta = tensors
    query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    query, key = (t.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for t in (query, key))
    outputs, states = [], []
    for held, (start, stop) in zip(state, itertools.pairwise(BOUNDS), strict=True):
        for t in range(start, stop):
            held = decay[t].exp()[:, None, None] * held
            new = beta[t][:, None] * (value[t] - torch.einsum("hkv,hk->hv", held, key[t]))
            held = held + torch.einsum("hk,hv->hkv", key[t], new)
            outputs.append(torch.einsum("hkv,hk->hv", held, query[t]) / KEY_DIM**0.5)
        states.append(held)
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("begins", ["with zeros", "with states"])
def test_chunks_compute_the_recurrence_and_its_gradients(begins: str) -> None:
    plan = chunk_plan(BOUNDS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), VALUE_HEADS, KEY_DIM, VALUE_DIM)
    state = torch.randn(shape, generator=generator, dtype=torch.float64)
    if begins == "with zeros":
        state.zero_()
    weights = torch.randn(BOUNDS[-1], VALUE_HEADS, VALUE_DIM, generator=generator).double()
    results = []
    for chunked in (True, False):
        given = [*inputs(), state.clone()]
        for tensor in given:
            tensor.requires_grad_()
        *tensors, before = given
        if chunked:
            used = None if begins == "with zeros" else before
            outputs, last = in_chunks(tensors, plan, used)
        else:
            outputs, last = recurrence(tensors, before)
        ((outputs * weights).sum() + (last * state.cos()).sum()).backward()
        results.append([outputs, last, *(t.grad for t in tensors)])
    for own, expected in zip(*results, strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


def test_float32_and_bfloat16_inputs_are_computed_in_float32() -> None:
    plan = chunk_plan(BOUNDS, torch.device("cpu"))
    state = torch.zeros(len(LENGTHS), VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = inputs(dtype)
        outputs, last = in_chunks(rounded, plan)
        assert outputs.dtype == last.dtype == torch.float32
        expected, _ = recurrence([tensor.double() for tensor in rounded], state)
        torch.testing.assert_close(outputs.double(), expected, rtol=0, atol=1e-5)


def test_single_steps_continue_a_state() -> None:
    tensors = inputs(torch.float32)
    generator = torch.Generator().manual_seed(2)
    state = torch.randn(1, VALUE_HEADS, KEY_DIM, VALUE_DIM, generator=generator)
    plan = chunk_plan((0, 20), torch.device("cpu"))
    first = [tensor[:20] for tensor in tensors]
    expected, last = in_chunks(first, plan, state)
    for token in range(20):
        query, key, value, decay, beta = (tensor[token : token + 1] for tensor in tensors)
        output, state = step(query, key, value, decay, beta, state)
        torch.testing.assert_close(output[0], expected[token], rtol=0, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


def test_the_convolution_sees_no_other_sequence() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(BOUNDS[-1], 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    since = chunk_plan(BOUNDS, torch.device("cpu")).since
    expected = [
        torch.nn.functional.conv1d(
            torch.nn.functional.pad(tokens[start:stop].T, (3, 0)), weight[:, None], groups=3
        ).T
        for start, stop in itertools.pairwise(BOUNDS)
        if start < stop
    ]
    own = causal_conv(tokens, weight, since)
    torch.testing.assert_close(own, torch.cat(expected), rtol=0, atol=1e-14)
    one = causal_conv(tokens[:2], weight, since[:2])  # fewer tokens than the convolution sees
    torch.testing.assert_close(one, expected[0][:2], rtol=0, atol=1e-14)
