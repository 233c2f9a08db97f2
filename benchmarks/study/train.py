"""Train all seeds of one arm, with the project's quantizer, UAQ, advantages and objective."""

import functools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from benchmarks.study.policy import (
    STATES,
    SYMBOLS,
    Engine,
    Parameters,
    logprob_table,
    new_parameters,
)
from benchmarks.study.tasks import Chain
from qurl_megatron.algorithm.advantages import group_advantages
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import (
    add_up,
    mismatch_sums,
    policy_objective,
    rollout_statistics,
    token_weights,
)
from qurl_megatron.config.schema import ObjectiveConfig, OptimizerConfig, UaqConfig
from qurl_megatron.quantization import uaq

PROMPTS, COMPLETIONS = 16, 8  # per step and seed

Gap = Literal["none", "fp8", "int8", "int4", "int4x2"]
ENGINES: dict[Gap, Engine | None] = {
    "none": None,
    "fp8": Engine("fp8"),
    "int8": Engine("int8"),
    "int4": Engine("int4"),
    "int4x2": Engine("int4", error=2.0),
}
GAP_NAMES: dict[Gap, str] = {
    "none": "no gap", "fp8": "FP8", "int8": "INT8", "int4": "INT4", "int4x2": "2 x INT4",
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One setting, trained with many seeds. All arms of a length begin with the same policies."""

    objective: str = "acr"
    gap: Gap = "int4"
    staleness: int = 0  # training steps between the sampling policy and the proximal one
    minibatches: int = 1
    learning_rate: float = 1e-3
    length: int = 32  # symbols per answer of a chain
    uaq_scale: float = 1.0
    weight_rate: float = 1.0  # factor on the learning rate of the weights that UAQ divides by s
    norm_rate: float = 1.0  # factor on the learning rate of the norms that UAQ multiplies by s
    top_p: float = 1.0  # symbols are drawn from the likeliest ones, up to this probability


@dataclass
class Outcome:
    """What an arm measured. Lists have one entry per seed."""

    before: list[float]  # score of the full-precision policy before training
    after: list[float]
    after_quantized: list[float]  # score of the engine's copy after training
    after_nucleus: list[float]  # score of the full-precision policy, drawn with the arm's top_p
    stats: dict[str, float] = field(default_factory=dict)  # means over steps, seeds and tokens
    seconds: float = 0.0


def run(arm: Arm, seeds: int, steps: int) -> Outcome:
    """Train `seeds` policies for `steps` steps and return what was measured."""
    began = time.monotonic()
    task = Chain(arm.length)
    engine = ENGINES[arm.gap]
    begun = scaled(start(arm.length, seeds), arm.uaq_scale)
    parameters = {name: parameter.clone().requires_grad_() for name, parameter in begun.items()}
    settings = OptimizerConfig(learning_rate=arm.learning_rate)
    optimizer = make_optimizer(parameters, settings, arm)
    objective = ObjectiveConfig()
    generator = torch.Generator().manual_seed(2)  # the same numbers in every arm
    # The engines' last tables, and the symbols that each may draw.
    behind: deque[tuple[Tensor, Tensor]] = deque(maxlen=arm.staleness + 1)

    def score(of: Engine | None, top_p: float = 1.0) -> Tensor:
        with torch.no_grad():
            table = logprob_table(parameters, of)
            return task.score(over(table, nucleus(table, top_p)))

    before = score(None)
    totals: dict[str, float] = {}
    for _ in range(steps):
        with torch.no_grad():
            table = logprob_table(parameters, engine)
            kept = nucleus(table, arm.top_p)
            behind.append((over(table, kept), kept))
            behaviour_table, kept = behind[0]
            proximal_table = over(logprob_table(parameters), kept)
        rollouts = task.sample(behaviour_table, PROMPTS, COMPLETIONS, generator)
        advantages = advantages_of(rollouts.rewards)
        rows = PROMPTS * COMPLETIONS // arm.minibatches
        for first in range(0, PROMPTS * COMPLETIONS, rows):
            minibatch = slice(first, first + rows)
            states, symbols = rollouts.states[:, minibatch], rollouts.symbols[:, minibatch]
            behaviour = taken(behaviour_table, states, symbols)
            proximal = taken(proximal_table, states, symbols)
            mask = torch.ones_like(behaviour, dtype=torch.bool)
            lengths = torch.full((seeds * rows,), mask.shape[-1])
            batch = TrainBatch(lengths, tokens=symbols.flatten(), loss_mask=mask.flatten())
            weights = token_weights(batch, objective.aggregation)
            loss, stats = policy_objective(
                taken(over(logprob_table(parameters), kept), states, symbols),
                proximal,
                behaviour,
                advantages[:, minibatch, None].expand_as(mask),
                # The weights sum to 1 over all seeds, but should for each seed.
                seeds * weights.view_as(mask),
                objective=arm.objective,
                eps_low=objective.eps_low,
                eps_high=objective.eps_high,
                ratio_cap=objective.ratio_cap,
                sum_over_sequences=lambda each: each.sum(-1, keepdim=True).expand_as(each),
            )
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(parameters, settings.clip_grad)
            optimizer.step()
            sums = mismatch_sums(proximal, behaviour, mask, objective.ratio_cap)
            sums |= {name: stats[name] for name in ("clipped", "acr_widened")}
            totals = add_up([totals, {name: value.item() for name, value in sums.items()}])
    return Outcome(
        before=before.tolist(),
        after=score(None).tolist(),
        after_quantized=score(engine).tolist(),
        after_nucleus=score(None, arm.top_p).tolist(),
        stats={
            **rollout_statistics(totals),
            **{name: totals[name] / totals["tokens"] for name in ("clipped", "acr_widened")},
        },
        seconds=time.monotonic() - began,
    )


def nucleus(table: Tensor, top_p: float) -> Tensor:
    """Return where the likeliest symbols are, up to `top_p` in all: bool, of the table's shape."""
    probabilities, order = table.exp().sort(dim=-1, descending=True)
    kept = probabilities.cumsum(-1) - probabilities <= top_p
    kept |= top_p == 1  # rounded, the sum may be more
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def over(table: Tensor, kept: Tensor) -> Tensor:
    """Return the log-probs over the kept symbols; the table itself if all are kept."""
    return table if kept.all() else table.masked_fill(~kept, -torch.inf).log_softmax(-1)


@functools.cache
def start(length: int, seeds: int) -> Parameters:
    """Return the policies that training begins with, which are not to be changed.

    They were shown right steps until they score at least 30 %, each seed for itself.
    """
    parameters, task = new_parameters(seeds, torch.Generator().manual_seed(0)), Chain(length)
    states = torch.arange(STATES)
    right = (states // SYMBOLS + states % SYMBOLS) % SYMBOLS
    learned = {name: parameter.clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    optimizer = torch.optim.Adam(parameters.values(), lr=3e-3)
    is_done = torch.zeros(len(learned["lm_head.weight"]), dtype=torch.bool)
    while not is_done.all():
        table = logprob_table(parameters)
        reached = (task.score(table.detach()) >= 0.3) & ~is_done
        for name, parameter in parameters.items():
            learned[name][reached] = parameter.detach()[reached]
        is_done |= reached
        optimizer.zero_grad()
        (-table[:, states, right].mean(-1).sum()).backward()
        optimizer.step()
    return learned


def scaled(parameters: Parameters, uaq_scale: float) -> Parameters:
    transform = uaq.transform(UaqConfig(scale=uaq_scale), is_hybrid=False)
    return {name: transform(name, parameter) for name, parameter in parameters.items()}


def make_optimizer(
    parameters: Parameters, settings: OptimizerConfig, arm: Arm
) -> torch.optim.Optimizer:
    """Return the learner's Adam. It is element-wise, so seeds do not meet in it.

    The arm's factors on the learning rate apply to the weights and norms that UAQ would scale.
    """
    divide = uaq.transform(UaqConfig(scale=2.0), is_hybrid=False)
    rates = {0.5: arm.weight_rate, 1.0: 1.0, 2.0: arm.norm_rate}
    groups = [
        {
            "params": [parameter],
            "lr": settings.learning_rate * rates[divide(name, torch.ones(1)).item()],
        }
        for name, parameter in parameters.items()
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


@torch.no_grad()
def clip_gradients(parameters: Parameters, largest: float) -> None:
    """Scale each seed's gradients down to a norm of at most `largest`."""
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    squares = sum(gradient.flatten(1).square().sum(1) for gradient in gradients)
    factor = (largest / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient *= factor.view(-1, *[1] * (gradient.dim() - 1))


def advantages_of(rewards: Tensor) -> Tensor:
    """Return GRPO's advantages `[seeds, rows]` of `rewards` `[seeds, rows]`."""
    groups = rewards.view(-1, COMPLETIONS).tolist()
    return torch.tensor(group_advantages(groups, "grpo")).view_as(rewards)


def taken(table: Tensor, states: Tensor, symbols: Tensor) -> Tensor:
    """Return the log-probs of what was sampled: `[seeds, rows, time]`."""
    places = (states * SYMBOLS + symbols).flatten(1)
    return table.flatten(1).gather(1, places).view_as(states)
