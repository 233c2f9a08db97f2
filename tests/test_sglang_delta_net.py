"""Torch in place of SGLang's kernels of linear attention, against its definition."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, normalize, silu

from qurl_megatron.sglang_plugin import delta_net

SLOTS = 12
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 12
CHANNELS, WIDTH = 10, 4
LENGTHS = [1, 130, 64, 3, 65]
USED = [7, 2, 9, 4, 11]  # the sequences' slots


def recurrence(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of one sequence, token by token in float64, and the states before each.

    Args:
        inputs: queries and keys [tokens, key heads, channels], values [tokens, value heads,
            channels], decays and shares to write [tokens, value heads].
        state: [value heads, value channels, key channels].
    """
    query, key, value, decay, beta = (tensor.double() for tensor in inputs)
    query, key = (
        normalize(t, dim=-1).repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1)
        for t in (query, key)
    )
    state, states, outputs = state.double(), [state.double()], []
    for token in range(len(query)):
        state = state * decay[token].exp()[:, None, None]
        known = torch.einsum("hvk,hk->hv", state, key[token])
        written = beta[token][:, None] * (value[token] - known)
        state = state + torch.einsum("hv,hk->hvk", written, key[token])
        states.append(state)
        outputs.append(torch.einsum("hvk,hk->hv", state, query[token]) * KEY_DIM**-0.5)
    return torch.stack(outputs), states


def random_inputs(tokens: int) -> list[Tensor]:
    """Return queries, keys, values, decays and shares to write, as `recurrence` takes them."""
    return [
        torch.randn(tokens, KEY_HEADS, KEY_DIM),
        torch.randn(tokens, KEY_HEADS, KEY_DIM),
        torch.randn(tokens, VALUE_HEADS, VALUE_DIM),
        -torch.rand(tokens, VALUE_HEADS) * torch.tensor([0.01, 0.1, 1, 5, 0.5, 2]),
        torch.rand(tokens, VALUE_HEADS),
    ]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def extend(inputs: list[Tensor], lengths: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [tokens, heads, channels], and the states before each chunk."""
    out, _, before = delta_net.extend(
        *(tensor[None] for tensor in inputs),
        initial_state=states,
        initial_state_indices=torch.tensor(USED, dtype=torch.int32),
        cu_seqlens=bounds_of(lengths),
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], before[0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_prompts_go_on_from_their_slots_as_the_recurrence_does_and_leave_others() -> None:
    states = torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    given, inputs = states.clone(), random_inputs(sum(LENGTHS))
    out, before = extend(inputs, LENGTHS, states)
    parts = zip(*(tensor.split(LENGTHS) for tensor in inputs), strict=True)
    expected, all_states = zip(
        *(recurrence(list(part), given[slot]) for part, slot in zip(parts, USED, strict=True)),
        strict=True,
    )
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=1e-5)
    last = torch.stack([each[-1] for each in all_states])
    torch.testing.assert_close(states[USED].double(), last, rtol=0, atol=1e-5)
    chunks = torch.stack([state for each in all_states for state in each[:-1:64]])
    torch.testing.assert_close(before.double(), chunks, rtol=0, atol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in USED]
    assert torch.equal(states[others], given[others])


def test_decoding_token_by_token_is_extending_at_once() -> None:
    tokens, heads = 5, len(USED)
    A_log, dt_bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    a, b = torch.randn(2, heads, tokens, VALUE_HEADS).bfloat16()
    mixed = torch.randn(heads, tokens, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
    at_once = torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    one_by_one = at_once.clone()

    keys = KEY_HEADS * KEY_DIM
    query, key, value = mixed.flatten(0, 1).split([keys, keys, VALUE_HEADS * VALUE_DIM], dim=-1)
    decay, beta = delta_net.gates(A_log, a.flatten(0, 1), b.flatten(0, 1), dt_bias)
    inputs = [
        query.unflatten(-1, (-1, KEY_DIM)),
        key.unflatten(-1, (-1, KEY_DIM)),
        value.unflatten(-1, (-1, VALUE_DIM)),
        decay[0],
        beta[0],
    ]
    expected, _ = extend(inputs, [tokens] * heads, at_once)

    outputs = []
    for token in range(tokens):
        out = torch.empty(heads, 1, VALUE_HEADS, VALUE_DIM)
        delta_net.decode(
            mixed[:, token],
            a[:, token],
            b[:, token],
            A_log,
            dt_bias,
            initial_state=one_by_one,
            out=out,
            ssm_state_indices=torch.tensor(USED, dtype=torch.int32),
        )
        outputs.append(out)
    computed = torch.cat(outputs, dim=1).flatten(0, 1)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=1e-5)


def test_convolutions_see_what_the_slots_have_of_earlier_tokens() -> None:
    weight = torch.randn(CHANNELS, WIDTH)
    pool = torch.randn(SLOTS, CHANNELS, WIDTH - 1)
    given, x = pool.clone(), torch.randn(CHANNELS, sum(LENGTHS))
    goes_on = torch.tensor([True, False, True, True, False])
    slots = torch.tensor(USED, dtype=torch.int32)
    out = delta_net.convolve_prompts(
        x, weight, None, pool, bounds_of(LENGTHS), slots, goes_on, activation="silu"
    )
    expected, last = [], []
    for part, slot, is_later in zip(x.split(LENGTHS, dim=1), USED, goes_on, strict=True):
        before = given[slot] if is_later else torch.zeros_like(given[slot])
        window = torch.cat([before, part], dim=1)
        expected.append(silu(conv1d(window[None], weight[:, None], groups=CHANNELS)[0]))
        last.append(window[:, 1 - WIDTH :])
    torch.testing.assert_close(out, torch.cat(expected, dim=1), rtol=0, atol=1e-5)
    assert torch.equal(pool[USED], torch.stack(last))
    others = [slot for slot in range(SLOTS) if slot not in USED]
    assert torch.equal(pool[others], given[others])

    token = torch.randn(len(USED), CHANNELS)
    again = pool.clone()
    alone = delta_net.convolve_tokens(token, pool, weight, None, "silu", conv_state_indices=slots)
    as_prompts = delta_net.convolve_prompts(
        token.T, weight, None, again, bounds_of([1] * len(USED)), slots, torch.ones(5).bool()
    )
    torch.testing.assert_close(alone, as_prompts.T, rtol=0, atol=1e-5)
    assert torch.equal(pool, again)


def test_gates_norms_and_projections_are_their_definitions() -> None:
    a, b = torch.randn(2, 3, VALUE_HEADS)
    A_log, dt_bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    decay, beta = delta_net.gates(A_log, a, b, dt_bias)
    torch.testing.assert_close(decay[0], -A_log.exp() * (1 + (a + dt_bias).exp()).log())
    torch.testing.assert_close(beta[0], 1 / (1 + (-b).exp()))

    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    gated = delta_net.gated_norm(x, weight, None, gate, 1e-6, norm_before_gate=True)
    torch.testing.assert_close(gated, normed * gate / (1 + (-gate).exp()))
    heads = gate.unflatten(1, (2, 4))
    torch.testing.assert_close(delta_net.gated_attention(x, heads), x / (1 + (-gate).exp()))

    routed, shared = torch.randn(2, 3, 8)
    total = routed.clone()
    delta_net.add_shared_expert(x, weight, shared, total)
    share = 1 / (1 + (-x @ weight).exp())
    torch.testing.assert_close(total, routed + share[:, None] * shared)

    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    qkvz, ba = torch.randn(3, 2 * keys + 2 * values), torch.randn(3, 2 * VALUE_HEADS)
    mixed, z, b, a = delta_net.split_projections(
        qkvz, ba, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    assert torch.equal(torch.cat([mixed, z.flatten(1)], dim=1), qkvz)
    assert torch.equal(torch.cat([b, a], dim=1), ba)
    assert z.shape == (3, VALUE_HEADS, VALUE_DIM) and b.shape == a.shape == (3, VALUE_HEADS)


def test_slots_that_are_kept_are_copied_in_every_layer() -> None:
    conv, states = torch.randn(2, SLOTS, CHANNELS, 3), torch.randn(2, SLOTS, 2, 4, 3)
    given = conv.clone(), states.clone()
    mask, target = torch.tensor([True, False, True]), torch.tensor([1, 3, 5])
    delta_net.keep_states(conv, states, torch.tensor([7, 2, 9], dtype=torch.int32), mask, target, 3)
    for pool, before in zip((conv, states), given, strict=True):
        before[:, [1, 5]] = before[:, [7, 9]]
        assert torch.equal(pool, before)
