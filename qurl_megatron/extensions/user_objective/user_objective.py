"""An objective of a user's own: `objective.objective=FILE.py:NAME` or MODULE:NAME.

    def NAME(current_logprobs, proximal_logprobs, behaviour_logprobs, advantages, ...) -> J

takes any of the tensors and settings of `policy_objective`, by name, and returns the J of each
token, which is maximized: a tensor of the tokens' shape, or J and a dict of statistics of the same
shape. Masks, loss weights and sums over tokens are applied afterwards. So nothing depends on which
tokens share a micro batch.

`sum_over_sequences` returns for each token the sum of a tensor over its sequence, wherever the
sequence's tokens are, and has a gradient. `check_objective` tests that a function mixes tokens in
no other way.
"""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import ObjectiveOutput, masked, penalized_loss
from qurl_megatron.config.schema import Config, ConfigError, ObjectiveConfig
from qurl_megatron.data.reward_functions import load_function
from qurl_megatron.data.rewards import one_line, why

LOAD_LIMIT_S = 60.0
PROGRAM = "from qurl_megatron.extensions.user_objective.user_objective import answer; answer()"
LOGPROBS = ("current_logprobs", "proximal_logprobs", "behaviour_logprobs")
TENSORS = (*LOGPROBS, "advantages", "rewards", "group_means")
SETTINGS = ("eps_low", "eps_high", "ratio_cap", "dual_clip", "kl_coefficient")
OTHERS = ("reference_logprobs", "loss_weights", "sum_over_sequences")


class _SumOverSequences(torch.autograd.Function):
    """A sum over sequences with a gradient: the same sum over the incoming gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sum_over: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.sum_over = sum_over
        return sum_over(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.sum_over(gradient), None


@dataclass(frozen=True)
class UserObjective:
    """An objective of the user's own: a function of named tensors that returns the J of tokens."""

    function: Callable[..., Any]
    takes_reference: bool  # and so applies the penalty itself
    takes_behaviour: bool

    def gains(
        self, rows: Mapping[str, Tensor | None], sum_over: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return J and the statistics of each token.

        `rows` and the results are [1, tokens]. Where a loss weight is 0, the function gets 0.

        Raises:
            TypeError: J or one of the statistics is not a tensor of the tokens' shape.
        """
        weights = rows["loss_weights"]
        assert weights is not None
        counted = weights > 0
        tensors = {n: v if v is None else masked(counted, v) for n, v in rows.items()}
        fixed = {n: v for n, v in tensors.items() if n != "current_logprobs" and v is not None}

        def sums(values: Tensor) -> Tensor:
            summed = _SumOverSequences.apply(masked(counted, values), sum_over)
            return masked(counted, summed)

        result = self.function(
            **{**tensors, **{n: v.detach() for n, v in fixed.items()}, "sum_over_sequences": sums}
        )
        gain, statistics = result if isinstance(result, tuple) else (result, {})
        for name, values in [("J", gain), *statistics.items()]:
            shape = tuple(getattr(values, "shape", ()))
            if not isinstance(values, Tensor) or shape != tuple(weights.shape):
                raise TypeError(
                    f"{name} is a {type(values).__name__} of shape {list(shape)}; expected a "
                    f"tensor of the tokens' shape {list(weights.shape)}: weights and sums are "
                    "applied afterwards"
                )
        return gain, statistics

    def __call__(
        self,
        current_logprobs: Tensor,
        batch: TrainBatch,
        loss_weights: Tensor,
        sum_over_sequences: Callable[[Tensor], Tensor],
        config: ObjectiveConfig,
        **more: Any,
    ) -> tuple[ObjectiveOutput, dict[str, Tensor]]:
        """Return loss and stats as `penalized_loss` does, and the statistics of each token.

        `more` has arguments of `penalized_loss`.
        """
        assert batch.rewards is not None and batch.group_means is not None
        gain, statistics = self.gains(
            {
                "current_logprobs": current_logprobs,
                "proximal_logprobs": batch.proximal_logprobs,
                "behaviour_logprobs": batch.behaviour_logprobs,
                "reference_logprobs": batch.reference_logprobs,
                "advantages": batch.advantages,
                "rewards": sum_over_sequences(batch.rewards),
                "group_means": sum_over_sequences(batch.group_means),
                "loss_weights": loss_weights,
            },
            sum_over_sequences,
        )
        output = penalized_loss(
            gain,
            current_logprobs,
            loss_weights,
            kl_coefficient=0.0 if self.takes_reference else config.kl_coefficient,
            entropy_coefficient=config.entropy_coefficient,
            **more,
        )
        return output, statistics


def user_objective(config: ObjectiveConfig) -> UserObjective:
    """Return the run's own objective.

    Raises:
        ConfigError: it cannot be used; the text says why.
    """
    function = load_function(config.objective)
    if not callable(function):
        raise ConfigError(f"a {type(function).__name__}, which cannot be called")
    signature = inspect.signature(function)
    known = (*TENSORS, *OTHERS, *SETTINGS)
    for name, parameter in signature.parameters.items():
        is_open = parameter.kind is inspect.Parameter.VAR_KEYWORD
        if name not in known and parameter.default is inspect.Parameter.empty and not is_open:
            raise ConfigError(f"its parameters are {signature}; there are {', '.join(known)}")
    taken = [name for name in known if name in signature.parameters]
    if "current_logprobs" not in taken:
        raise ConfigError(f"its parameters are {signature}; it needs current_logprobs")
    if "reference_logprobs" in taken and not config.kl_coefficient:
        raise ConfigError(
            "it takes reference_logprobs, and no reference is kept; set objective.kl_coefficient"
        )
    if config.dual_clip is not None and "dual_clip" not in taken:
        raise ConfigError(
            f"objective.dual_clip={config.dual_clip:g}: it does not take dual_clip; set it to none"
        )
    settings = {name: getattr(config, name) for name in SETTINGS}

    def call(**tensors: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        offered = {**settings, **tensors}
        return function(**{name: offered[name] for name in taken})  # type: ignore[no-any-return]

    return UserObjective(call, "reference_logprobs" in taken, "behaviour_logprobs" in taken)


def check_objective(config: Config) -> None:
    """Check in a process of its own that the objective can be loaded, and try it on a few tokens.

    Raises:
        ConfigError: it cannot be used; the text says why.
    """
    field = f"objective.objective={config.objective.objective}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=pickle.dumps((config.objective, config.rollout.max_staleness)),
            capture_output=True,
            timeout=LOAD_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{field}: not loaded within {LOAD_LIMIT_S:g} s") from None
    reason = done.stdout.decode(errors="replace").rpartition("\0")[2].strip()
    if reason or done.returncode:
        raise ConfigError(f"{field}: {reason or f'its process ended with {done.returncode}'}")


def answer() -> None:
    """Be the process of `check_objective`: print why the objective cannot be used.

    A zero byte comes first, because the objective's own file may print too.
    """
    config, max_staleness = pickle.load(sys.stdin.buffer)
    try:
        objective = user_objective(config)
        if max_staleness and not objective.takes_behaviour:
            raise ConfigError(
                f"rollout.max_staleness={max_staleness}: it does not take behaviour_logprobs, so "
                "nothing corrects for older weights"
            )
        _try(objective)
        print("\0", end="")
    except ConfigError as error:
        print(f"\0{one_line(str(error))}", end="")
    except (Exception, SystemExit) as error:
        print(f"\0{why(error)}", end="")


def _try(objective: UserObjective) -> None:
    """Try an objective on seven tokens of three sequences.

    Raises:
        ConfigError: J is not finite, has no gradient or the wrong sign, or depends on other tokens
            or on the loss weights.
    """
    of_sequence = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    rows = {
        "proximal_logprobs": torch.tensor([-0.5, -1.0, -2.0, -0.3, -1.5, -0.7, -0.9]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, 0.8, 0.8]),
        "rewards": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.9, 0.9]),
        "group_means": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        "loss_weights": torch.full((7,), 1 / 7),
    }
    shifts = torch.tensor([0.1, -0.2, 0.05, 0.15, -0.1, 0.02, -0.03])
    rows["behaviour_logprobs"] = rows["proximal_logprobs"] - shifts
    rows["reference_logprobs"] = rows["proximal_logprobs"] + shifts.flip(0)
    rows["current_logprobs"] = rows["proximal_logprobs"] + shifts.roll(2) / 2

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(3).index_add(0, of_sequence, values[0])[of_sequence][None]

    summed: list[Tensor] = []

    def recording(values: Tensor) -> Tensor:
        summed.append(sums(values))
        return summed[-1]

    def gains(
        given: dict[str, Tensor], sum_over: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return objective.gains({n: v[None] for n, v in given.items()}, sum_over)

    whole, statistics = gains(rows, recording)
    for name, values in [("J", whole), *statistics.items()]:
        if not values.isfinite().all():
            raise ConfigError(f"{name} is not finite on a few tokens: {values.tolist()}")
    # Each token alone, with the sums of the whole: through them only may other tokens count.
    for token in range(7):
        part = {name: values[token : token + 1] for name, values in rows.items()}
        recorded = iter(summed)
        alone, _ = gains(part, lambda values: next(recorded)[:, token : token + 1])  # noqa: B023
        if not torch.allclose(alone[0, 0], whole[0, token], rtol=1e-4, atol=1e-6):
            raise ConfigError(
                "the J of a token depends on others that share its micro batch; take "
                "sum_over_sequences for what belongs to a sequence"
            )
    twice, _ = gains({**rows, "loss_weights": 2 * rows["loss_weights"]}, sums)
    if not torch.allclose(twice, whole, rtol=1e-4, atol=1e-6):
        raise ConfigError("J depends on loss_weights, which are applied to it afterwards")
    # On-policy, every objective must raise the tokens that were better than expected.
    current = rows["proximal_logprobs"].clone().requires_grad_()
    same = {**rows, "current_logprobs": current, "behaviour_logprobs": rows["proximal_logprobs"]}
    begun, _ = gains({**same, "reference_logprobs": rows["proximal_logprobs"]}, sums)
    if not begun.requires_grad:
        raise ConfigError("J has no gradient in current_logprobs")
    (gradient,) = torch.autograd.grad(begun.sum(), current)
    if not gradient.isfinite().all():
        raise ConfigError(f"the gradient of J is not finite on a few tokens: {gradient.tolist()}")
    if not (gradient * rows["advantages"]).sum() > 0:
        raise ConfigError(
            "it lowers the probability of tokens with a positive advantage; return what is to be "
            "maximized, and not a loss"
        )
