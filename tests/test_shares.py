"""What the replicas of a minibatch get, and what comes back, in real processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from batches import padded, ragged, score
from distributed import run_ranks
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import Config, LearnerConfig, OptimizerConfig
from tiny import build_tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP2": {"data_parallel_size": 2, "tokens_per_micro_batch": 24},
    "TP2xDP2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "PP2xCP2": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
}
ROWS, TIME, STEPS = 6, 12, 2
PARTS = 3  # minibatches: with two replicas, the last one has no sequence for one of them


@dataclasses.dataclass
class Padded:
    """Rows [batch, time] of different lengths; the last has no token to train on."""

    tokens: Tensor
    loss_mask: Tensor
    lengths: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor


def make_rows() -> Padded:
    generator = torch.Generator().manual_seed(3)
    shape, time = (ROWS, TIME), torch.arange(TIME)
    lengths = torch.randint(6, TIME + 1, (ROWS,), generator=generator)
    mask = (time >= 3) & (time < lengths[:, None])
    mask[-1] = False
    return Padded(
        tokens=torch.randint(2, 90, shape, generator=generator),
        loss_mask=mask,
        lengths=lengths,
        behaviour_logprobs=-4 - torch.rand(shape, generator=generator),
        advantages=torch.randn(shape, generator=generator),
    )


@dataclasses.dataclass
class Dealt:
    """What a rank had, sent and got back."""

    numbers: list[list[int]]  # of each share
    lengths: list[list[int]]
    collected: Tensor  # on global rank 0: the tokens that came back
    routed: Tensor  # on global rank 0: the recorded experts that came back
    lies_beside_inputs: bool  # whether micro batches have each input's experts, -1 for padding
    scores: Tensor  # [batch, time], of the minibatches' sequences
    padded_scores: Tensor  # the same, of all rows scored as if every row were of full length
    with_pass: list[Any]  # updates with a proximal pass before each
    without_pass: list[Any]
    weights: list[bool]  # whether both ways end with the same weights, bit for bit


def routed_experts(num_tokens: int) -> Tensor:
    """Return experts of two layers, three a token, as a server could have recorded them."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 128, (num_tokens, 2, 3), generator=generator, dtype=torch.int16)


def beside_inputs(micro: Any, experts: Tensor) -> bool:
    """Return whether a micro batch has the experts of each input; `experts` are the replica's."""
    expected = torch.full((len(micro.index), 2, 3), -1)
    is_real = micro.index >= 0
    expected[is_real] = experts[micro.index[is_real] - 1].long()  # the input precedes its target
    return torch.equal(micro.routed_experts, expected) and micro.rows.routed_experts is None


def deal_and_train(model: Path, layout: dict[str, Any]) -> Dealt:
    from qurl_megatron import device
    from qurl_megatron.algorithm.objective import PolicyLoss, minibatches
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    config = Config(
        learner=LearnerConfig(**{"dtype": "float32", "micro_batch_size": 2, **layout}),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    config.objective.kl_coefficient = 0.1
    rows = make_rows()
    whole = ragged(**vars(rows)) if dist.get_rank() == 0 else TrainBatch.empty()
    if dist.get_rank() == 0:
        whole.routed_experts = routed_experts(len(whole.tokens))

    learner = Learner(model, config.learner, config.optimizer)
    shares = [learner.share(minibatch) for minibatch in whole.split(PARTS)]
    scores, tokens, routed, lies_beside_inputs = [], [], [], []
    for share in shares:
        learner.score(share, ["proximal_logprobs"], temperature=1.0)
        scores += share.collect(share.scores("proximal_logprobs"))
        tokens += share.collect(share.batch.tokens.float().split(share.batch.lengths.tolist()))
        experts = share.batch.routed_experts
        assert experts is not None
        routed += share.collect(experts.split(share.batch.lengths.tolist()))
        lies_beside_inputs += [beside_inputs(micro, experts) for micro in share.micro_batches]
    padded_scores, _ = score(learner, rows.tokens, loss_mask=rows.loss_mask)

    def train(*, proximal_pass: bool) -> tuple[list[Any], list[Tensor]]:
        learner = Learner(model, config.learner, config.optimizer)
        learner.keep_reference()
        updates = []
        for _ in range(STEPS):
            (share,) = [learner.share(each) for each in minibatches(config, whole)]
            if proximal_pass:
                learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
            with learner.as_reference():
                learner.score(share, ["reference_logprobs"], temperature=1.0)
            updates.append(learner.update(share, PolicyLoss(config.objective), temperature=1.0))
        weights = [parameter.detach().clone() for _, _, parameter in learner.shards()]
        learner.close()
        return updates, weights

    learner.close()
    with_pass, expected = train(proximal_pass=True)
    without_pass, weights = train(proximal_pass=False)
    return Dealt(
        numbers=[share.numbers for share in shares],
        lengths=[share.batch.lengths.tolist() for share in shares],
        collected=torch.cat(tokens) if tokens else torch.zeros(0),
        routed=torch.cat(routed) if routed else torch.zeros(0),
        lies_beside_inputs=all(lies_beside_inputs),
        scores=padded(scores) if scores else torch.zeros(0),
        padded_scores=padded_scores,
        with_pass=with_pass,
        without_pass=without_pass,
        weights=[torch.equal(*pair) for pair in zip(weights, expected, strict=True)],
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, model: Path) -> list[Dealt]:
    layout = LAYOUTS[request.param]
    return run_ranks(deal_and_train, LearnerConfig(**layout).world_size, model, layout)


def test_a_sequence_is_on_the_ranks_of_one_replica_and_on_no_others(ranks: list[Dealt]) -> None:
    by_minibatch = [{tuple(rank.numbers[part]) for rank in ranks} for part in range(PARTS)]
    rows = ROWS // PARTS
    for part, replicas in enumerate(by_minibatch):
        assert sorted(number for numbers in replicas for number in numbers) == list(range(rows))
        lengths = make_rows().lengths[part * rows : (part + 1) * rows].tolist()
        for rank in ranks:
            assert rank.lengths[part] == [lengths[number] for number in rank.numbers[part]]
    if len(ranks) == 2 or len(by_minibatch[0]) > 1:  # data parallel
        assert {len(numbers) for numbers in by_minibatch[0]} == {1}


def test_what_comes_back_is_in_the_order_of_the_batch_and_only_on_rank_0(
    ranks: list[Dealt],
) -> None:
    rows = make_rows()
    first, *others = ranks
    is_real = torch.arange(TIME) < rows.lengths[:, None]
    assert torch.equal(first.collected, rows.tokens[is_real].float())
    assert all(len(rank.collected) == len(rank.scores) == 0 for rank in others)
    assert torch.equal(first.routed, routed_experts(len(first.collected)))


def test_micro_batches_have_the_experts_that_were_recorded_for_each_input(
    ranks: list[Dealt],
) -> None:
    assert all(rank.lies_beside_inputs for rank in ranks)


def test_scores_of_ragged_minibatches_are_those_of_padded_rows(ranks: list[Dealt]) -> None:
    first, *_ = ranks
    expected = first.padded_scores[:, : first.scores.shape[1]]
    assert (expected != 0).sum() == make_rows().loss_mask.sum()
    torch.testing.assert_close(first.scores, expected, rtol=0, atol=1e-5)


def test_with_one_minibatch_the_updates_own_pass_is_the_proximal_one_bit_for_bit(
    ranks: list[Dealt],
) -> None:
    for rank in ranks:
        assert rank.without_pass == rank.with_pass
        assert rank.weights and all(rank.weights)
        first, second = rank.without_pass
        assert first.stats["current_proximal_abs_diff"] == 0
        assert first.stats["kl_reference"] == 0 < second.stats["kl_reference"]
        assert first.stats["entropy"] > 0 and first.grad_norm > 0
