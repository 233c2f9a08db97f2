"""Log-probs over sharded tokens and vocabulary against torch in float64; the memory they take."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from operations import RecordedOperations

TOKENS, HIDDEN, VOCABULARY = 96, 8, 513
# Of how many tokens and rows the logits are held at once; the last rows of 513 are fewer than 100.
TILES = {
    "one token": (1, VOCABULARY),
    "some tokens": (8, VOCABULARY),
    "some tokens and rows": (8, 100),
    "all tokens": (TOKENS, VOCABULARY),
}
TEMPERATURE = 0.7
MASK = torch.arange(TOKENS) % 5 != 3
MASK[:30] = False  # a whole chunk of the first rank
LARGEST_MASK = 40
# With sampling masks; with a loss that uses the entropy too.
OPTIONS = ((), ("entropy",), ("masks",), ("masks", "entropy"))
CASES = [
    (tile, options)
    for tile, (_, rows) in TILES.items()
    for options in OPTIONS
    if rows == VOCABULARY or "masks" not in options
]


@dataclass
class Scores:
    """One rank's results and gradients, and the elements of the largest tensor on the way."""

    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor  # of this rank's rows
    largest_tensor: int


def sampling_masks() -> Tensor:
    """Return [tokens, largest mask] rows with each target; some masks lie on one rank alone."""
    *_, targets, _ = problem(torch.float32)
    generator = torch.Generator().manual_seed(3)
    distances = torch.stack(
        [torch.randperm(VOCABULARY - 1, generator=generator) for _ in range(TOKENS)]
    )
    distances[::2] = torch.arange(VOCABULARY - 1)  # close to the target
    masks = (targets[:, None] + 1 + distances[:, :LARGEST_MASK]) % VOCABULARY
    sizes = torch.randint(1, LARGEST_MASK, (TOKENS, 1), generator=generator)
    masks[torch.arange(LARGEST_MASK) >= sizes] = -1
    masks[:, 0] = targets
    return masks.int()


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, targets, and gradients [2, tokens]: of log-probs, entropies."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = 2 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    gradients = torch.randn(2, TOKENS, generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, gradients


def score_in_chunks() -> dict[tuple[Any, ...], Scores]:
    from qurl_megatron import device

    device.initialize_distributed()
    scores: dict[tuple[Any, ...], Scores] = {
        (tile, torch.bfloat16): score(sizes, torch.bfloat16) for tile, sizes in TILES.items()
    }
    for tile, options in CASES:
        scores[tile, torch.float32, *options] = score(TILES[tile], torch.float32, *options)
    torch.distributed.destroy_process_group()
    return scores


def go_back(logprobs: Tensor, entropy: Tensor, gradients: Tensor, options: Sequence[str]) -> None:
    loss = (gradients[0] * logprobs).sum()
    if "entropy" in options:
        loss = loss + (gradients[1] * entropy).sum()
    loss.backward()


def score(tile: tuple[int, int], dtype: torch.dtype, *options: str) -> Scores:
    import torch.distributed as dist

    from qurl_megatron.learner.logprobs import logprobs_and_entropy

    group = dist.group.WORLD
    assert group is not None
    hidden, weight, targets, gradients = problem(dtype)
    num_rows = -(-len(weight) // dist.get_world_size())
    first_row = num_rows * dist.get_rank()
    num_tokens = TOKENS // dist.get_world_size()
    hidden = hidden[num_tokens * dist.get_rank() :][:num_tokens].clone().requires_grad_()
    own_rows = weight[first_row : first_row + num_rows].clone().requires_grad_()
    with RecordedOperations() as operations:
        logprobs, entropy = logprobs_and_entropy(
            hidden,
            own_rows,
            targets,
            MASK.nonzero().view(-1),
            sampling_masks() if "masks" in options else None,
            temperature=TEMPERATURE,
            first_row=first_row,
            group=group,
            tile=tile,
        )
        go_back(logprobs, entropy, gradients, options)
    assert hidden.grad is not None and own_rows.grad is not None
    results = logprobs.detach(), entropy.detach()
    return Scores(*results, hidden.grad, own_rows.grad, operations.largest)


@functools.cache
def scores_by_rank(world_size: int) -> list[dict[tuple[Any, ...], Scores]]:
    return run_ranks(score_in_chunks, world_size)


def exact_scores(dtype: torch.dtype, *options: str) -> Scores:
    """Score the same values in float64 with torch's log_softmax and autograd."""
    hidden, weight, targets, gradients = problem(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.t() / TEMPERATURE
    if "masks" in options:
        masks = sampling_masks()
        kept = torch.zeros(TOKENS, VOCABULARY + 1, dtype=torch.bool)
        kept.scatter_(1, torch.where(masks < 0, VOCABULARY, masks).long(), True)
        logits = logits.masked_fill(~kept[:, :VOCABULARY], -1e9)
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None]).squeeze(1) * MASK
    entropy = -(distribution.exp() * distribution).sum(-1) * MASK
    go_back(logprobs, entropy, gradients, options)
    assert hidden.grad is not None and weight.grad is not None
    return Scores(logprobs.detach(), entropy.detach(), hidden.grad, weight.grad, 0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("tile", "options"), CASES)
def test_scores_and_gradients_over_sharded_tokens_and_vocabulary_are_exact(
    world_size: int, tile: str, options: tuple[str, ...]
) -> None:
    ranks = [scores[tile, torch.float32, *options] for scores in scores_by_rank(world_size)]
    expected = exact_scores(torch.float32, *options)
    for rank in ranks:
        for name in ("logprobs", "entropy"):
            torch.testing.assert_close(
                getattr(rank, name).double(), getattr(expected, name), rtol=1e-5, atol=1e-5
            )
            assert not getattr(rank, name)[~MASK].any()
    for name in ("grad_hidden", "grad_weight"):  # each rank has its part of both
        gathered = torch.cat([getattr(rank, name) for rank in ranks])
        torch.testing.assert_close(gathered.double(), getattr(expected, name), rtol=1e-5, atol=2e-5)


def test_a_log_prob_over_a_mask_is_that_of_a_softmax_of_its_logits() -> None:
    from qurl_megatron.learner.logprobs import logprobs_and_entropy

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    weight = torch.tensor([[1.0], [2.0], [4.0], [8.0]]).log().requires_grad_()
    targets, masks = torch.tensor([2, 1]), torch.tensor([[0, 2, -1], [1, -1, -1]]).int()
    logprobs, entropy = logprobs_and_entropy(
        torch.ones(2, 1),
        weight,
        targets,
        torch.arange(2),
        masks,
        temperature=1.0,
        first_row=0,
        group=group,  # type: ignore[arg-type]
        tile=(2, 4),
    )
    # Of 1 and 4 the second, at 4 / 5; then the only one. The rows have the weights 1, 2, 4 and 8.
    torch.testing.assert_close(logprobs, torch.tensor([0.8, 1.0]).log())
    of_five = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    torch.testing.assert_close(entropy, torch.tensor([of_five, 0.0]))
    logprobs.sum().backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, torch.tensor([[-0.2], [0.0], [0.2], [0.0]]))
    # -p (log p + H) of 0.2 and 0.8; a single candidate has an entropy of 0, whatever its logit.
    weight.grad = None
    entropy.sum().backward()
    first, third = (-p * (math.log(p) + of_five) for p in (0.2, 0.8))
    torch.testing.assert_close(weight.grad, torch.tensor([[first], [0.0], [third], [0.0]]))


def test_chunked_scores_never_hold_all_logits() -> None:
    (scores,) = scores_by_rank(1)
    assert scores["all tokens", torch.float32].largest_tensor >= MASK.sum() * VOCABULARY
    # The largest tensor is the weight's gradient.
    assert scores["some tokens", torch.float32].largest_tensor <= VOCABULARY * HIDDEN


def test_bfloat16_gradients_of_many_small_tiles_add_up() -> None:
    (scores,) = scores_by_rank(1)
    exact = exact_scores(torch.bfloat16)
    for tile in TILES:
        for name in ("grad_hidden", "grad_weight"):
            gradient, right = (getattr(s, name) for s in (scores[tile, torch.bfloat16], exact))
            assert 1e-4 < (gradient.double() - right).norm() / right.norm() < 1e-2, tile


def test_a_frozen_output_layer_has_no_gradient_and_costs_no_product() -> None:
    from qurl_megatron.learner.logprobs import logprobs_and_entropy

    hidden, weight, targets, gradients = problem(torch.float32)
    hidden.requires_grad_()
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    found: dict[bool, tuple[int, Tensor]] = {}
    for trained in (True, False):
        hidden.grad = None
        logprobs, _ = logprobs_and_entropy(
            hidden,
            weight.requires_grad_(trained),
            targets,
            torch.arange(TOKENS),
            temperature=TEMPERATURE,
            first_row=0,
            group=group,  # type: ignore[arg-type]
            tile=(TOKENS, 100),
        )
        with RecordedOperations() as operations:
            logprobs.backward(gradients[0])
        assert hidden.grad is not None
        found[trained] = operations.counts[torch.ops.aten.addmm_], hidden.grad
    assert found[True][0] == 2 * found[False][0] > 0
    assert torch.equal(found[True][1], found[False][1])


def test_bfloat16_logits_are_never_rounded_to_bfloat16() -> None:
    """On a GPU: fake tensors claim to be on one; they have shapes and dtypes, but no values."""
    from torch._subclasses import FakeTensorMode

    from qurl_megatron.learner.logprobs import _factor, _logits

    with FakeTensorMode():
        hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda")
        with RecordedOperations() as operations:
            logits = _logits(_factor(hidden), _factor(weight), TEMPERATURE)
        assert logits.dtype == torch.float32 and logits.shape == (TOKENS, VOCABULARY)
    assert torch.ops.aten.mm.dtype in operations.found
    assert torch.ops.aten._to_copy.default not in operations.found

    (scores,) = scores_by_rank(1)  # on a CPU
    expected = exact_scores(torch.bfloat16).logprobs
    for tile in TILES:
        logprobs = scores[tile, torch.bfloat16].logprobs.double()
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
