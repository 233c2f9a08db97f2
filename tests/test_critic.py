"""The critic against transformers and torch, in layouts that are not its policy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from qurl_megatron.algorithm.advantages import generalized_advantages, whiten
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import Config, CriticConfig, LearnerConfig, OptimizerConfig
from tiny import build_tiny_model

LAYOUTS = {  # the policy's tensor, pipeline and data parallel sizes; the critic's first two
    "TP1": ((1, 1, 1), (None, None)),
    "beside TP2, DP2": ((2, 1, 1), (1, 1)),
    "beside DP2, TP2": ((1, 1, 2), (2, 1)),
    "beside TP2, PP2": ((2, 1, 1), (1, 2)),
    "as its policy, PP2": ((1, 2, 1), (None, None)),
    "beside TP2xPP2, TP2xDP2": ((2, 2, 1), (2, 1)),
}
STEPS = 3
CRITIC = CriticConfig(
    optimizer=OptimizerConfig(
        learning_rate=1e-2,
        weight_decay=0.1,
        clip_grad=0.5,
        epsilon=1e-5,  # a key bias has a gradient of 0 but for rounding
        minibatches_per_step=2,
    ),
    value_clip=0.05,  # small enough to matter from the second minibatch on
    discount=0.9,
    gae_lambda=0.8,
)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return build_tiny_model(
        directory, tied=request.param == "tied", num_hidden_layers=2, vocab_size=131
    )


def make_batch() -> TrainBatch:
    """Eight rows of different lengths after prompts of different lengths, rewarded at the end."""
    generator = torch.Generator().manual_seed(1)
    shape = (8, 13)
    time = torch.arange(shape[1])
    prompt = torch.randint(1, 5, (shape[0], 1), generator=generator)
    length = torch.randint(6, shape[1] + 1, (shape[0], 1), generator=generator)
    rewards = torch.randn(shape, generator=generator) * (time == length - 1)
    return TrainBatch(
        tokens=torch.randint(2, 131, shape, generator=generator),  # transformers freezes padding
        loss_mask=(time >= prompt) & (time < length),
        behaviour_logprobs=torch.zeros(shape),
        rewards=rewards,
        advantages=torch.zeros(shape),
    )


def steps_of(model: Path, layout: tuple[Any, Any]) -> dict[str, Any]:
    """What a critic does in some steps, and what its policy scores before, between and after."""
    import dataclasses

    from qurl_megatron.learner.critic import Critic
    from qurl_megatron.learner.learner import Learner

    of_policy, (tensor_parallel_size, pipeline_parallel_size) = layout
    config = Config(
        model=str(model),
        learner=LearnerConfig(*of_policy, dtype="float32", micro_batch_size=2),
        critic=dataclasses.replace(
            CRITIC,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        ),
    )
    batch = make_batch()
    learner = Learner(model, config.learner, config.optimizer)
    scores = [learner.logprobs_and_entropy(batch.tokens, temperature=1.0)]
    critic = Critic(config)
    metrics, batches = [], []
    for _ in range(STEPS):
        batch = make_batch()
        metrics.append(critic.step(batch))
        batches.append(batch)
        scores.append(learner.logprobs_and_entropy(batch.tokens, temperature=1.0))
    critic.close()
    scores.append(learner.logprobs_and_entropy(batch.tokens, temperature=1.0))
    learner.close()
    return {"metrics": metrics, "batches": batches, "scores": scores}


@pytest.fixture(scope="module")
def reference(model: Path) -> list[dict[str, Any]]:
    """The same steps by transformers, torch's AdamW and the formulas written out."""
    from transformers import AutoModel

    torch.manual_seed(0)
    body = AutoModel.from_pretrained(model, dtype=torch.float32)
    head = torch.zeros(body.config.hidden_size, requires_grad=True)
    parameters = [*body.parameters(), head]
    settings = CRITIC.optimizer
    decayed = [p for p in body.parameters() if p.dim() > 1] + [head]
    plain = [p for p in body.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )

    def values_of(batch: TrainBatch) -> Tensor:
        hidden = body(batch.tokens).last_hidden_state
        before = torch.nn.functional.pad((hidden @ head)[:, :-1], (1, 0))
        return before * batch.loss_mask

    steps = []
    for _ in range(STEPS):
        batch = make_batch()
        with torch.no_grad():
            old = values_of(batch)
        advantages, returns = generalized_advantages(
            batch.rewards, old, batch.loss_mask, discount=0.9, gae_lambda=0.8
        )
        losses = []
        for rows in (slice(0, 4), slice(4, 8)):
            part, mask = batch.rows(rows), batch.loss_mask[rows]
            values = values_of(part)
            kept = old[rows] + (values - old[rows]).clamp(-0.05, 0.05)
            errors = torch.maximum((values - returns[rows]) ** 2, (kept - returns[rows]) ** 2)
            loss = errors[mask].mean() / 2
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
            adam.step()
            losses.append(loss.item())
        spread = ((returns - old)[batch.loss_mask].var(), returns[batch.loss_mask].var())
        steps.append(
            {
                "values": old,
                "returns": returns,
                "advantages": whiten(advantages, batch.loss_mask),
                "loss": sum(losses) / 2,
                "explained": float(1 - spread[0] / spread[1]),
            }
        )
    return steps


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_critic_learns_as_torch_does_and_leaves_its_policy_alone(
    model: Path, reference: list[dict[str, Any]], layout: tuple[Any, Any]
) -> None:
    tensor, pipeline, data = layout[0]
    ranks = run_ranks(steps_of, tensor * pipeline * data, model, layout)
    for rank in ranks:
        for batch, metrics, step in zip(rank["batches"], rank["metrics"], reference, strict=True):
            for name in ("values", "returns", "advantages"):
                torch.testing.assert_close(getattr(batch, name), step[name], atol=1e-4, rtol=1e-4)
            assert metrics.value_loss == pytest.approx(step["loss"], rel=1e-4)
            assert metrics.value_explained_variance == pytest.approx(step["explained"], abs=1e-4)
        first, *others = rank["scores"]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert ranks[0]["metrics"][0].value_explained_variance == 0.0  # all values are 0 at first
    assert ranks[0]["metrics"][-1].value_clip_fraction > 0
    assert reference[1]["explained"] > 0.2, "it learnt, so the comparison means something"
