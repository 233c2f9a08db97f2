"""The learning rate of each optimizer step, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from qurl_megatron.config.schema import OptimizerConfig
from qurl_megatron.learner.schedule import make_scheduler


def rates(steps: int, *, done: int = 0, **fields: Any) -> list[float]:
    """Return the learning rate of each update of a run that resumes after `done` of them."""
    config = OptimizerConfig(learning_rate=1.0, **fields)
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = make_scheduler(optimizer, config, steps)
    scheduler.step(increment=done)
    seen = []
    for _ in range(done, steps * config.minibatches_per_step):
        scheduler.step(increment=1)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_it_is_constant_after_the_warmup_by_default() -> None:
    assert rates(3, minibatches_per_step=2, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    for schedule in ("constant", "linear"):
        assert rates(2, warmup_steps=4, schedule=schedule) == [0.25, 0.5]  # a run may be shorter


def test_it_falls_to_the_end_of_the_run_and_wastes_no_update_at_the_end() -> None:
    assert rates(4, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    cosine = [(1 + math.cos(math.pi * part)) / 2 for part in (0, 0.25, 0.5, 0.75)]
    assert rates(4, schedule="cosine") == pytest.approx(cosine)
    least = rates(4, schedule="linear", min_learning_rate=0.2)
    assert least == pytest.approx([1, 0.8, 0.6, 0.4])
    assert rates(5, schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1, 1, 2 / 3, 1 / 3])


def test_it_may_fall_in_a_part_of_the_run_only() -> None:
    fields: dict[str, Any] = {"schedule": "linear", "decay_fraction": 0.5, "warmup_steps": 2}
    assert rates(8, **fields) == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_that_resumes_has_the_same_rates(schedule: Any) -> None:
    assert rates(9, done=5, schedule=schedule) == rates(9, schedule=schedule)[5:]
