"""The critic against transformers and torch, in layouts that differ from the policy's."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from batches import padded, random_rows, score
from distributed import run_ranks
from qurl_megatron.algorithm.advantages import whiten
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import Config, CriticConfig, LearnerConfig, OptimizerConfig
from qurl_megatron.extensions.ppo.values import generalized_advantages
from tiny import build_tiny_model

# The policy's tensor, pipeline and data parallel sizes; the critic's tensor and pipeline parallel
# sizes; whether the policy's embeddings are tied. The critic's are never tied.
CASES: dict[str, tuple[tuple[int, int, int], tuple[int | None, int | None], bool]] = {
    "policy TP1, critic TP1": ((1, 1, 1), (None, None), False),
    "policy TP2, critic DP2": ((2, 1, 1), (1, 1), True),
    "policy DP2, critic TP2": ((1, 1, 2), (2, 1), False),
    "policy TP2, critic PP2": ((2, 1, 1), (1, 2), True),
    "policy PP2, critic PP2": ((1, 2, 1), (None, None), True),
    "policy TP2xPP2, critic TP2xDP2": ((2, 2, 1), (2, 1), False),
}
LEARNER: dict[str, Any] = {"dtype": "float32", "micro_batch_size": 2}
STEPS = 2
CRITIC = CriticConfig(
    optimizer=OptimizerConfig(
        learning_rate=1e-2,
        weight_decay=0.1,
        clip_grad=0.5,
        epsilon=1e-5,  # the gradient of a key bias is rounding noise; do not amplify it
        minibatches_per_step=2,
    ),
    value_clip=0.05,  # small enough to clip from the second minibatch on
    discount=0.9,
    gae_lambda=0.8,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Build two models: with tied embeddings, and without."""
    return {
        tied: build_tiny_model(
            tmp_path_factory.mktemp("model"), tied=tied, num_hidden_layers=2, vocab_size=131
        )
        for tied in (True, False)
    }


# Token 0 is padding, whose embedding transformers does not train.
ROWS = random_rows(8, 13, range(2, 131))
IS_LAST = torch.arange(13) == ROWS.lengths[:, None] - 1
REWARDS = ROWS.advantages * IS_LAST


def take_steps(
    model: Path, policy_layout: tuple[Any, ...], critic_layout: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Train a critic; return its steps, and the policy's scores before, between and after them."""
    from qurl_megatron.extensions.ppo.critic import Critic
    from qurl_megatron.learner.learner import Learner

    tensor_parallel_size, pipeline_parallel_size = critic_layout
    config = Config(
        model=str(model),
        learner=LearnerConfig(*policy_layout, **LEARNER),
        critic=dataclasses.replace(
            CRITIC,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        ),
    )
    learner = Learner(model, config.learner, config.optimizer)
    scores = [score(learner, ROWS.tokens)]
    critic = Critic(config)
    metrics, batches = [], []
    for _ in range(STEPS):
        step = ROWS.ragged(rewards=REWARDS) if dist.get_rank() == 0 else TrainBatch.empty()
        metrics.append(critic.step(step))
        batches.append(step)
        scores.append(score(learner, ROWS.tokens))
    critic.close()
    scores.append(score(learner, ROWS.tokens))
    learner.close()
    return {"metrics": metrics, "batches": batches, "scores": scores}


@pytest.fixture(scope="module")
def references(models: dict[bool, Path]) -> dict[bool, list[dict[str, Any]]]:
    return {tied: reference_steps(model) for tied, model in models.items()}


def reference_steps(model: Path) -> list[dict[str, Any]]:
    """Take the same steps with transformers, torch's AdamW and the formulas written out."""
    from transformers import AutoModel

    torch.manual_seed(0)
    body = AutoModel.from_pretrained(model, dtype=torch.float32)
    head = torch.zeros(body.config.hidden_size, requires_grad=True)
    parameters = [*body.parameters(), head]
    settings = CRITIC.optimizer
    decayed = [p for p in body.parameters() if p.dim() > 1] + [head]
    plain = [p for p in body.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        {"params": plain, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )

    def values_of(rows: slice) -> Tensor:
        hidden = body(ROWS.tokens[rows]).last_hidden_state
        before = torch.nn.functional.pad((hidden @ head)[:, :-1], (1, 0))
        return before * ROWS.loss_mask[rows]

    steps = []
    for _ in range(STEPS):
        with torch.no_grad():
            first_values = values_of(slice(None))
        flat = ROWS.ragged(rewards=REWARDS, values=first_values)
        assert flat.rewards is not None and flat.values is not None
        advantages, flat_returns = generalized_advantages(
            flat.rewards, flat.values, flat.loss_mask, flat.lengths, discount=0.9, gae_lambda=0.8
        )
        returns = padded(flat_returns.split(flat.lengths.tolist()))
        losses = []
        for rows in (slice(0, 4), slice(4, 8)):
            mask, values = ROWS.loss_mask[rows], values_of(rows)
            clipped = first_values[rows] + (values - first_values[rows]).clamp(-0.05, 0.05)
            errors = torch.maximum((values - returns[rows]) ** 2, (clipped - returns[rows]) ** 2)
            loss = errors[mask].mean() / 2
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
            adam.step()
            losses.append(loss.item())
        unexplained = (returns - first_values)[ROWS.loss_mask].var()
        steps.append(
            {
                "values": flat.values,
                "returns": flat_returns,
                "advantages": whiten(advantages, flat.loss_mask),
                "loss": sum(losses) / 2,
                "explained": float(1 - unexplained / returns[ROWS.loss_mask].var()),
            }
        )
    return steps


@pytest.mark.parametrize("case", CASES)
def test_a_critic_trains_as_torch_does_and_does_not_change_its_policy(
    case: str, models: dict[bool, Path], references: dict[bool, list[dict[str, Any]]]
) -> None:
    policy_layout, critic_layout, tied = CASES[case]
    reference, world_size = references[tied], math.prod(policy_layout)
    ranks = run_ranks(take_steps, world_size, models[tied], policy_layout, critic_layout)
    for rank in ranks:
        for metrics, step in zip(rank["metrics"], reference, strict=True):
            assert metrics["value_loss"] == pytest.approx(step["loss"], rel=1e-4)
            assert metrics["value_explained_variance"] == pytest.approx(step["explained"], abs=1e-4)
        first, *others = rank["scores"]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for batch, step in zip(ranks[0]["batches"], reference, strict=True):
        for name in ("values", "returns", "advantages"):
            torch.testing.assert_close(getattr(batch, name), step[name], atol=1e-4, rtol=1e-4)
    assert ranks[0]["metrics"][0]["value_explained_variance"] == 0.0  # all values start at 0
    assert ranks[0]["metrics"][-1]["value_clip_fraction"] > 0
    assert reference[1]["explained"] > 0.2, "the reference learns nothing"
