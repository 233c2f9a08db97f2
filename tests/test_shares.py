"""What the replicas of a minibatch get, and what comes back, in real processes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from batches import padded, random_rows, score
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
STEPS = 2
PARTS = 3  # minibatches: with two replicas, the last one has no sequence for one of them
ROWS = random_rows(6, 12, range(2, 90))
ROWS.loss_mask[-1] = False  # the last row has no token to train on
BEHAVIOUR_LOGPROBS = (-4 - ROWS.advantages.abs()) * ROWS.loss_mask
SEQUENCES = [row[:length].tolist() for row, length in zip(ROWS.tokens, ROWS.lengths, strict=True)]


@dataclasses.dataclass
class Dealt:
    """What a rank had, sent and got back."""

    sequences: list[list[list[int]]]  # tokens of each sequence of each share
    collected: list[Tensor]  # on global rank 0: the engine's log-probs that came back
    sums: list[Tensor]  # on global rank 0: for each token, their sum over its sequence
    computed: list[tuple[list[list[int]], int]]  # sequences and inputs of the micro batches of all
    splits_sequences: bool  # context parallel
    has_experts: bool  # whether inputs have the recorded experts; -1 for padding
    scores: list[Tensor]  # on global rank 0: of the minibatches' sequences
    padded_scores: Tensor  # [batch, time], of all rows scored as if every row were of full length
    with_pass: list[Any]  # updates with a proximal pass before each
    without_pass: list[Any]
    weights: list[bool]  # whether both ways end with the same weights, bit for bit


def experts_of(tokens: Tensor) -> Tensor:
    """Return experts of two layers, three a token, as a server could have recorded them."""
    return (tokens.view(-1, 1, 1) + torch.arange(6).view(2, 3)).to(torch.int16)


def tokens_of(batch: TrainBatch) -> list[list[int]]:
    return [each.tolist() for each in batch.tokens.split(batch.lengths.tolist())]


def beside_inputs(micro: Any) -> bool:
    """Return whether a micro batch has the experts of each input, and none elsewhere."""
    expected = experts_of(micro.inputs).long()
    expected[micro.index < 0] = -1
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
    config.objective.objective = "sequence_tis"
    whole = TrainBatch.empty()
    if dist.get_rank() == 0:
        whole = ROWS.ragged(advantages=ROWS.advantages, behaviour_logprobs=BEHAVIOUR_LOGPROBS)
        whole.routed_experts = experts_of(whole.tokens)

    learner = Learner(model, config.learner, config.optimizer)
    shares = [learner.share(minibatch) for minibatch in whole.split(PARTS)]
    scores, collected, sums, has_experts = [], [], [], []
    for share in shares:
        learner.score(share, ["proximal_logprobs"], temperature=1.0)
        scores += share.collect("proximal_logprobs")
        collected += share.collect("behaviour_logprobs")
        for micro in share.micro_batches:
            own = micro.rows.behaviour_logprobs
            assert own is not None
            micro.rows.values = micro.sum_over_sequences(own.where(micro.rows.loss_mask, 0))
        sums += share.collect("values")
        has_experts += [beside_inputs(micro) for micro in share.micro_batches]
    computed = [
        (tokens_of(micro.batch), int((micro.index >= 0).sum()))
        for micro in learner.share(whole).micro_batches
    ]
    padded_scores, _ = score(learner, ROWS.tokens, loss_mask=ROWS.loss_mask)

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
        sequences=[
            [each for micro in share.micro_batches for each in tokens_of(micro.batch)]
            for share in shares
        ],
        computed=computed,
        splits_sequences=config.learner.context_parallel_size > 1,
        collected=collected,
        sums=sums,
        has_experts=all(has_experts),
        scores=scores,
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
    size = len(SEQUENCES) // PARTS
    for part in range(PARTS):
        replicas: list[list[list[int]]] = []
        for rank in ranks:
            if rank.sequences[part] not in replicas:
                replicas.append(rank.sequences[part])
        of_all = [sequence for replica in replicas for sequence in replica]
        trained = SEQUENCES[part * size : (part + 1) * size]
        assert sorted(of_all) == sorted(each for each in trained if each != SEQUENCES[-1])
        if part == 0 and (len(ranks) == 2 or len(replicas) > 1):  # data parallel
            assert [len(replica) for replica in replicas] == [1, 1]


def test_sequences_of_a_micro_batch_compute_their_prompt_once(ranks: list[Dealt]) -> None:
    first, *others = ranks
    for sequences, computed in first.computed:
        inputs, prompts = 0, set()
        for sequence in sequences:
            scored = ROWS.loss_mask[SEQUENCES.index(sequence)].nonzero()
            prompt = range(int(scored[0]) - 1)  # its last token is not shared
            inputs += int(scored[-1]) - len(prompt)
            prompts |= {tuple(sequence[: place + 1]) for place in prompt}
        assert computed == inputs + len(prompts) or first.splits_sequences
    if not others:  # three sequences have one prompt, and two fit into a micro batch
        pairs = [[SEQUENCES.index(each) for each in sequences] for sequences, _ in first.computed]
        assert [1, 2] in pairs and [len(pair) for pair in pairs] == [2, 2, 1]


def test_what_comes_back_is_in_the_order_of_the_batch_and_only_on_rank_0(
    ranks: list[Dealt],
) -> None:
    first, *others = ranks
    for own, row, sequence in zip(first.collected, BEHAVIOUR_LOGPROBS, SEQUENCES, strict=True):
        assert torch.equal(own, row[: len(sequence)])
    assert all(rank.collected == rank.scores == [] for rank in others)


def test_a_sum_over_a_sequence_is_that_of_its_tokens_on_all_ranks(ranks: list[Dealt]) -> None:
    first, *_ = ranks
    rows = zip(first.sums, BEHAVIOUR_LOGPROBS.double(), ROWS.loss_mask, strict=True)
    for own, logprobs, mask in rows:
        total = (logprobs * mask).sum().float()
        assert torch.equal(own[mask[: len(own)]], total.expand(int(mask.sum())))


def test_inputs_have_the_experts_that_were_recorded(ranks: list[Dealt]) -> None:
    assert all(rank.has_experts for rank in ranks)


def test_scores_of_ragged_minibatches_are_those_of_padded_rows(ranks: list[Dealt]) -> None:
    first, *_ = ranks
    scores = padded(first.scores)
    expected = first.padded_scores[:, : scores.shape[1]]
    assert (expected != 0).sum() == ROWS.loss_mask.sum()
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_with_one_minibatch_the_updates_own_pass_is_the_proximal_one_bit_for_bit(
    ranks: list[Dealt],
) -> None:
    for rank in ranks:
        assert rank.without_pass == rank.with_pass
        assert rank.weights and all(rank.weights)
        first, second = rank.without_pass
        assert first.stats["kl_reference"] == 0 < second.stats["kl_reference"]
        assert first.stats["entropy"] > 0 and first.grad_norm > 0
