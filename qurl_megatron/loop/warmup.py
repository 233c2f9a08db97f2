"""A short supervised phase before RL: train on right answers until the model gives some itself.

RL needs a few rewards to start from, and a model with random weights gets none. The quickstart
therefore begins with this phase, on the same learner and servers as RL.
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
    """Train on answers until `accuracy()` reaches the target, for at most `max_steps` steps.

    Collective, like `next_batch` and `accuracy`. RL then starts with a fresh optimizer.
    """
    warmup = config.warmup
    learner.reset_optimizer(
        dataclasses.replace(config.optimizer, learning_rate=warmup.learning_rate)
    )
    for step in range(1, warmup.max_steps + 1):
        batch = next_batch()
        batch.loss_weights = token_weights(batch.loss_mask, batch.lengths, "token_mean")
        update = learner.update(
            learner.share(batch.only("loss_weights")),
            negative_log_likelihood,
            temperature=config.rollout.temperature,
        )
        if step % warmup.check_every_steps == 0:
            current_accuracy = accuracy()
            say(f"warm-up step {step}  loss {update.loss:.3f}  accuracy {current_accuracy:.1%}")
            if current_accuracy >= warmup.target_accuracy:
                break
    learner.reset_optimizer(config.optimizer)


def negative_log_likelihood(
    current_logprobs: Tensor, entropy: Tensor, batch: TrainBatch, loss_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of supervised training; all tensors are `[1, tokens]` float32."""
    return -(loss_weights * current_logprobs).sum(), {}
