"""The learning rate of each optimizer step, by Megatron's scheduler."""

import math
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from qurl_megatron.config.schema import OptimizerConfig


def make_scheduler(optimizer: Any, config: OptimizerConfig, steps: int) -> OptimizerParamScheduler:
    """Return the scheduler of Megatron's `optimizer`, for a run of `steps`.

    It must step before each update, so its first rate is that of the first update. The last
    update's rate is one part of the decay above the smallest: none is wasted at 0.
    """
    updates = max(steps * config.minibatches_per_step, config.warmup_steps)
    falls = config.schedule != "constant"
    longest = updates - config.warmup_steps  # of a decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=updates + 1,
        lr_decay_style="WSD" if falls else "constant",
        wsd_decay_steps=min(math.ceil(config.decay_fraction * updates), longest),
        lr_wsd_decay_style=config.schedule if falls else None,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
