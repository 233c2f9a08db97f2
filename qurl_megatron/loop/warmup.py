"""A short supervised phase before RL: train on right answers until the model gives some itself.

RL needs a few rewards to start from, and a model with random weights gets none. The quickstart
therefore begins with this phase, on the same learner and servers as RL.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import token_weights
from qurl_megatron.config.schema import Config
from qurl_megatron.loop.assemble import Run


def warm_up(config: Config, run: Run) -> None:
    """Train on answers until the accuracy reaches the target, for at most `max_steps` steps.

    Collective. The accuracy is measured on problems set aside for this. RL then starts with a fresh
    optimizer.
    """
    learner, evaluator = run.learner, run.evaluator
    assert evaluator is not None  # `validate` refuses a warm-up without evaluation
    warmup = config.warmup
    learner.reset_optimizer(
        dataclasses.replace(config.optimizer, learning_rate=warmup.learning_rate)
    )
    for step in range(1, warmup.max_steps + 1):
        batch = run.sampler.answers()
        batch.loss_weights = token_weights(batch.loss_mask, batch.lengths, "token_mean")
        update = learner.update(
            learner.share(batch.only("loss_weights")),
            negative_log_likelihood,
            temperature=config.rollout.temperature,
        )
        if step % warmup.check_every_steps == 0:
            accuracy = evaluator.warmup_accuracy()
            run.log.say(f"warm-up step {step}  loss {update.loss:.3f}  accuracy {accuracy:.1%}")
            if accuracy >= warmup.target_accuracy:
                break
    learner.reset_optimizer(config.optimizer)


def negative_log_likelihood(
    current_logprobs: Tensor, entropy: Tensor, batch: TrainBatch, loss_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of supervised training; all tensors are `[1, tokens]` float32."""
    return -(loss_weights * current_logprobs).sum(), {}
