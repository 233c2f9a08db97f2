"""Objectives of a user's own: the examples of the documentation by hand, and what is refused."""

import io
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import PolicyLoss
from qurl_megatron.config.schema import Config, ConfigError, ObjectiveConfig
from qurl_megatron.extensions.user_objective.user_objective import (
    answer,
    check_objective,
    user_objective,
)

DOCS = Path(__file__).parents[3] / "docs"
LENGTHS = [3, 2, 1]  # the last is padding: its token does not count


def example() -> str:
    page = (DOCS / "method.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    return source


def own(tmp_path: Path, source: str, name: str, **settings: float) -> ObjectiveConfig:
    (tmp_path / "mine.py").write_text(source)
    return ObjectiveConfig(f"{tmp_path}/mine.py:{name}", eps_high=0.28, **settings)  # type: ignore


def sums(values: Tensor) -> Tensor:
    numbers = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    return torch.zeros(3).index_add(0, numbers, values[0])[numbers][None]


def gradient_and_stats(
    config: ObjectiveConfig, rho: list[float], ratio: list[float], advantages: list[float]
) -> tuple[list[float], dict[str, float]]:
    """Return the gradient of J in current_logprobs with weights of 1, and the own statistics."""
    nan = [math.nan]
    behaviour = torch.tensor([[-1.0] * 5 + nan])
    proximal = behaviour + torch.tensor([rho + [1.0]]).log()
    current = (proximal + torch.tensor([ratio + [1.0]]).log()).requires_grad_()
    mask = torch.tensor([[True] * 5 + [False]])
    rows = TrainBatch(
        torch.tensor(LENGTHS),
        torch.zeros(1, 6),
        mask,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([advantages + nan]),
        rewards=torch.tensor([[0.0, 0.0, 3.0, 0.0, -1.0, 9.0]]),
        group_means=torch.tensor([[0.0, 0.0, 1.0, 0.0, 1.0, 9.0]]),
        proximal_logprobs=proximal.detach(),
        reference_logprobs=proximal.detach() if config.kl_coefficient else None,
        entropy=torch.zeros(1, 6),
    )
    loss = PolicyLoss(config, user=user_objective(config))
    value, stats = loss(current, torch.zeros(1, 6), rows, mask.float(), sums)
    value.backward()
    assert current.grad is not None
    of_own = {name: float(each) for name, each in stats.items() if name.startswith("user/")}
    return (-current.grad[0]).tolist(), of_own


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Have objectives tried in this process, and not in one that would import torch first."""

    def run(*_: Any, input: bytes, **__: Any) -> Any:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(input)))
        answer()
        return SimpleNamespace(returncode=0, stdout=capsys.readouterr().out.encode())

    monkeypatch.setattr(subprocess, "run", run)


def test_icepop_of_the_documentation_by_hand(tmp_path: Path) -> None:
    config = own(tmp_path, example(), "icepop")
    found, stats = gradient_and_stats(
        config,
        rho=[2.0, 0.4, 6.0, 0.5, 4.9],
        ratio=[1.1, 1.0, 1.0, 1.5, 1.5],  # 1.5 is clipped where the advantage is positive
        advantages=[1.0, 1.0, 1.0, 2.0, -2.0],
    )
    # rho * R * A of the kept tokens; the second and third are masked, the fourth is clipped.
    assert found == pytest.approx([2.2, 0, 0, 0, -14.7, 0], rel=1e-5)
    assert stats == {"user/masked": 2}
    check_objective(Config(objective=config))  # in a process of its own


@pytest.mark.usefixtures("tried_here")
def test_seq_mask_tis_of_the_documentation_by_hand(tmp_path: Path) -> None:
    config = own(tmp_path, example(), "seq_mask_tis")
    found, stats = gradient_and_stats(
        config,
        rho=[2.0, 0.5, 1.0, 1.01, 1.01],  # geometric means 1 and 1.01: the second is masked
        ratio=[1.0, 1.1, 0.7, 1.0, 1.0],  # 0.7 is clipped where the advantage is negative
        advantages=[3.0, 3.0, -3.0, 1.0, 1.0],
    )
    assert found == pytest.approx([6.0, 1.65, 0, 0, 0, 0], rel=1e-5)
    assert stats == {"user/masked": 2}
    check_objective(Config(objective=config))


@pytest.mark.usefixtures("tried_here")
def test_triage_of_the_documentation_by_hand(tmp_path: Path) -> None:
    """A token is gated where its advantage is negative and the server samples it more often."""
    config = own(tmp_path, example(), "triage")
    found, stats = gradient_and_stats(
        config,
        rho=[0.5, 0.5, 1.0, 2.0, 0.9],
        ratio=[1.0, 1.1, 1.0, 1.0, 1.0],
        advantages=[1.0, -1.0, -3.0, -2.0, -2.0],
    )
    assert found == pytest.approx([1, 0, -3, -2, 0, 0], rel=1e-5)
    assert stats == {"user/gated": 2}
    check_objective(Config(objective=config))


@pytest.mark.usefixtures("tried_here")
def test_a_function_gets_the_reward_of_each_completion_and_the_mean_of_its_group(
    tmp_path: Path,
) -> None:
    source = HEAD + "rewards, group_means):" + BODY + "ratio * (rewards - group_means)"
    config = own(tmp_path, source, "f")
    found, _ = gradient_and_stats(config, [1.0] * 5, [1.0] * 5, [0.0] * 5)
    assert found == pytest.approx([2, 2, 2, -2, -2, 0])
    check_objective(Config(objective=config))


HEAD = "import torch\ndef f(current_logprobs, proximal_logprobs, advantages, "
GSPO = (
    HEAD
    + """sum_over_sequences):
    log_ratio = current_logprobs - proximal_logprobs
    tokens = sum_over_sequences(torch.ones_like(log_ratio))
    return (sum_over_sequences(log_ratio) / tokens).exp() * advantages
"""
)


@pytest.mark.usefixtures("tried_here")
def test_a_sum_over_a_sequence_has_a_gradient(tmp_path: Path) -> None:
    """GSPO's ratio: exp(mean log R) A, so each of n tokens gets n * (A / n) * exp(mean)."""
    found, _ = gradient_and_stats(
        own(tmp_path, GSPO, "f"),
        rho=[1.0] * 5,
        ratio=[1.1, 1.1, 1.1, 2.0, 0.5],
        advantages=[3.0, 3.0, 3.0, -1.0, -1.0],
    )
    assert found == pytest.approx([3.3, 3.3, 3.3, -1.0, -1.0, 0], rel=1e-5)
    check_objective(Config(objective=own(tmp_path, GSPO, "f")))


def test_the_penalty_is_added_unless_the_function_takes_the_reference(tmp_path: Path) -> None:
    """At current / reference = 2 the gradient of k3 is 1 - 1 / 2."""
    takes = HEAD.removesuffix(", ") + "{}): return current_logprobs * advantages"
    for reference, expected in (("", [2.75, -1.25]), (", reference_logprobs", [3.0, -1.0])):
        config = own(tmp_path, takes.format(reference), "f", kl_coefficient=0.5)
        ratio = [2.0] * 5
        found, _ = gradient_and_stats(config, [1.0] * 5, ratio, [3.0, 3.0, 3.0, -1.0, -1.0])
        assert found == pytest.approx([expected[0]] * 3 + [expected[1]] * 2 + [0])


BODY = "\n    ratio = (current_logprobs - proximal_logprobs).exp()\n    return "
REFUSED: dict[str, tuple[str, str]] = {
    "a loss": (HEAD + "**more):" + BODY + "-ratio * advantages", "and not a loss"),
    "a sum": (HEAD + "**more):" + BODY + "(ratio * advantages).sum()", "of the tokens' shape"),
    "a sum behind a statistic of that name": (
        HEAD + "**more):" + BODY + "(ratio * advantages).sum(), {'J': ratio * advantages}",
        "J is a Tensor of shape",
    ),
    "a mean of tokens": (
        HEAD + "**more):" + BODY + "ratio * (advantages - advantages.mean())",
        "depends on others that share its micro batch",
    ),
    "a neighbour": (
        HEAD + "**more):" + BODY + "ratio.cumsum(-1) * advantages",
        "depends on others that share its micro batch",
    ),
    "weighted twice": (
        HEAD + "loss_weights):" + BODY + "loss_weights * ratio * advantages",
        "J depends on loss_weights",
    ),
    "no gradient": (HEAD + "**more):" + BODY + "ratio.detach() * advantages", "has no gradient"),
    "not finite": (HEAD + "**more):" + BODY + "ratio / 0", "J is not finite"),
    "raises": (HEAD + "**more):" + BODY + "{}['x']", "KeyError: 'x'"),
    "a text": (HEAD + "**more): return 'J'", "J is a str of shape"),
    "another parameter": (HEAD + "old_logprobs): pass", "its parameters are .*old_logprobs"),
    "no such name": ("g = 1", "mine.py has no function f"),
    "no function": ("f = 1", "a int, which cannot be called"),
    "a reference that is not kept": (
        HEAD + "reference_logprobs): pass",
        "set objective.kl_coefficient",
    ),
}


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_objective_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    source, message = REFUSED[case]
    config = own(tmp_path, source, "f")
    with pytest.raises(ConfigError, match=f"objective.objective=/.*mine.py:f: .*{message}") as no:
        check_objective(Config(objective=config))
    assert "\n" not in str(no.value)


@pytest.mark.usefixtures("tried_here")
def test_settings_that_an_objective_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dual_clip=3: it does not take dual_clip"):
        check_objective(Config(objective=own(tmp_path, GSPO, "f", dual_clip=3.0)))
    config = Config(objective=own(tmp_path, GSPO, "f"))
    config.rollout.max_staleness = 1
    with pytest.raises(ConfigError, match="does not take behaviour_logprobs"):
        check_objective(config)
