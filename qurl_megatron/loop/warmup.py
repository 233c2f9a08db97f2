"""A short supervised phase: the learner is shown answers until it finds some by itself.

RL needs rewards to start from. A model fresh from random weights has none, so the quickstart runs
this first, through the same learner and the same servers as RL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import token_weights
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.learner import Learner


def warm_up(
    config: Config,
    learner: Learner,
    next_batch: Callable[[], TrainBatch],
    accuracy: Callable[[], float],
    say: Callable[[str], None],
) -> None:
    """Train on answers until `accuracy()` reaches the target or `max_steps` are made.

    Collective, as `next_batch` and `accuracy` are. The optimizer starts afresh afterwards, with
    the run's own settings.
    """
    warmup = config.warmup
    learner.reset_optimizer(
        dataclasses.replace(config.optimizer, learning_rate=warmup.learning_rate)
    )
    for step in range(1, warmup.max_steps + 1):
        batch = next_batch()
        update = learner.update(
            batch,
            token_weights(batch.loss_mask, "token_mean"),
            negative_log_likelihood,
            temperature=config.rollout.temperature,
        )
        if step % warmup.check_every_steps == 0:
            reached = accuracy()
            say(f"warm-up step {step}  loss {update.loss:.3f}  accuracy {reached:.1%}")
            if reached >= warmup.target_accuracy:
                break
    learner.reset_optimizer(config.optimizer)


def negative_log_likelihood(
    current_logprobs: Tensor, entropy: Tensor, batch: TrainBatch, loss_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of supervised training; all tensors `[batch, time]`, padding weighs 0."""
    return -(loss_weights * current_logprobs).sum(), {}
