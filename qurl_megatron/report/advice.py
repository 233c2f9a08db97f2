"""What a run's metrics say about it: rules, told as warnings while it trains and in its report.

While a run trains, a rule is told once, when it held at each of the last `WINDOW` steps. It is over
when it held at none of them; then it can be told again. A metric that is not finite is told at
once. The report applies the rules to means over the last tenth of the steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from statistics import fmean

from qurl_megatron.config.schema import Config
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.report.record import RunRecord

WINDOW = 5  # steps
FINITE = (  # metrics that must be finite
    "reward_mean",
    "kl_behaviour_proximal",
    "kl_behaviour_proximal_k3",
    "kl_reference",
    "entropy",
    "loss",
    "grad_norm",
    "value_loss",
)
NOT_FINITE = "not finite"
KL = "kl_behaviour_proximal_k3"
HARMLESS_KL = 1e-3  # nats; growth below it is not worth a warning

Values = Callable[[str], float]
"""The value of a metric, by its name; NaN if it is not known."""


def rules(
    config: Config, first: Values, now: Values, rewards: set[float]
) -> Iterator[tuple[str, str]]:
    """Yield the name and the sentence of each rule that holds, but for metrics that are not finite.

    Args:
        first: metrics of the first steps.
        now: metrics of the steps in question.
        rewards: every reward that a completion of these steps has.
    """
    rollout = config.rollout.at(int(now("step")))
    completions = rollout.prompts_per_step * rollout.completions_per_prompt
    if reason := _no_signal(config, now, rewards):
        yield "no reward signal", f"no reward signal: {reason}"
    elif now("grad_norm") == 0:
        yield (
            "no gradient",
            "the gradient is 0: the rewards of each prompt are equal, so nothing is learned; "
            "choose problems of medium difficulty, or check the verifier (rule: 0)",
        )
    elif now("learning_rate") == 0:
        yield "no learning rate", "the learning rate is 0; raise optimizer.learning_rate (rule: 0)"
    if now("response_truncated_fraction") > 0.2:
        yield (
            "cut-off completions",
            f"{now('response_truncated_fraction'):.0%} of completions are cut off, so the reward "
            "favours short answers; raise rollout.max_response_length (rule: more than 20%)",
        )
    if now("verifier_failures") > 0.01 * completions:
        yield (
            "verifier failures",
            f"{now('verifier_failures') / completions:.1%} of verifier calls fail and count as "
            "wrong; look at the data and at reward (rule: more than 1%)",
        )
    if now("entropy") < 0.1 * first("entropy"):
        yield (
            "entropy collapse",
            f"entropy has collapsed to {now('entropy'):.2g} nats, from {first('entropy'):.2g} in "
            "the first steps; lower optimizer.learning_rate or raise objective.eps_high (rule: "
            "less than a tenth)",
        )
    if now(KL) > 10 * first(KL) and now(KL) > HARMLESS_KL:
        compare = (
            ". A run with quantization.format=bf16 shows whether quantization is the cause; if it "
            "is, keep the layers that `qurl mismatch` names in BF16 (quantization.keep)"
        )
        yield (
            "growing KL",
            f"KL(behaviour, proximal) has grown to {now(KL):.1e}, from {first(KL):.1e} in the "
            f"first steps, and {now('tis_truncated_fraction'):.1%} of tokens have a ratio proximal "
            "/ behaviour above C; lower optimizer.learning_rate"
            f"{compare if config.quantization.format != 'bf16' else ''} (rule: more than tenfold, "
            f"and above {HARMLESS_KL:g})",
        )


def _no_signal(config: Config, now: Values, rewards: set[float]) -> str:
    """Return why the rewards teach next to nothing; empty if they teach something."""
    remedy = (
        "choose problems of medium difficulty, raise rollout.completions_per_prompt, or set "
        "rollout.dynamic_sampling_tries (rule: the rewards of more than 90% of prompts are equal)"
    )
    if len(rewards) == 1:
        return (
            f"every completion scores {min(rewards):g}; look at the answers in samples.jsonl and "
            f"at the verifier, or {remedy}"
        )
    # A critic compares prompts too.
    if config.advantage_estimator == "grpo" and now("equal_reward_fraction") > 0.9:
        return f"the rewards of {now('equal_reward_fraction'):.0%} of prompts are equal; {remedy}"
    return ""


def not_finite(now: Callable[[str], float | None]) -> str:
    """Return a sentence on the metrics that should be finite and are not; empty if all are."""
    wrong = [name for name in FINITE if not math.isfinite(now(name) or 0.0)]
    if not wrong:
        return ""
    return (
        f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite: stop the run, and "
        "resume from a checkpoint before this step with a lower optimizer.learning_rate"
    )


class Watch:
    """The rules that hold in a run, updated at each step in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: list[StepMetrics] = []  # the first `WINDOW` steps of the run
        self._recent: deque[dict[str, str]] = deque(maxlen=WINDOW)
        self._raised: dict[str, str] = {}

    @property
    def raised(self) -> list[str]:
        """The warning of each rule that was told and is not over."""
        return list(self._raised.values())

    def update(self, step: StepMetrics) -> list[str]:
        """Return a line for each rule that this step makes worth telling, or ends."""
        now = vars(step).__getitem__
        holding = dict(rules(self._config, self._early, now, dict(step.reward_counts).keys()))
        if sentence := not_finite(now):
            holding[NOT_FINITE] = sentence
        if len(self._first) < WINDOW:
            self._first.append(step)
        self._recent.append(holding)
        lines = []
        for name, sentence in holding.items():
            lasts = len(self._recent) == WINDOW and all(name in held for held in self._recent)
            if name not in self._raised and (lasts or name == NOT_FINITE):
                self._raised[name] = f"warning at step {step.step}: {sentence}"
                lines.append(self._raised[name])
        for name in list(self._raised):
            if not any(name in held for held in self._recent):
                del self._raised[name]
                lines.append(f"over at step {step.step}, after {WINDOW} steps without: {name}")
        return lines

    def _early(self, metric: str) -> float:
        """Return the mean of a metric over the first steps; NaN before there are enough."""
        values = [getattr(step, metric) for step in self._first]
        return fmean(values) if len(values) == WINDOW else math.nan


def advice(run: RunRecord) -> list[str]:
    """Return a sentence for each rule that holds at the end of a run, or one if none does.

    If a metric is not finite, means say nothing, and only that is told.
    """
    for step in run.steps:
        if sentence := not_finite(step.get):
            return [f"At step {step['step']}, {sentence}."]
    rewards = {reward for step in run.late_steps for reward, _ in step.get("reward_counts") or []}
    found = dict(rules(run.config, run.early, run.late, rewards))
    is_quantized = run.config.quantization.format != "bf16"
    if run.late(KL) > 5e-3 and run.config.objective.objective == "naive":
        found["naive objective"] = (
            f"KL(behaviour, proximal) is {run.late(KL):.1e}, and the naive objective does not "
            "correct for it; set objective.objective=tis or acr (rule: above 5e-3)"
        )
    has_gradient = run.late("grad_norm") > 0 and run.late("learning_rate") > 0
    if is_quantized and has_gradient and run.late("code_flip_fraction") < 1e-4:
        found["few changed codes"] = (
            f"each publish changes {run.late('code_flip_fraction'):.4%} of the quantized codes. A "
            "small learning rate does that, and small updates add up until a code changes; raise "
            "optimizer.learning_rate only if the reward stalls too (rule: below 0.01%)"
        )
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in found.values()] or [
        f"No sign that {'quantized' if is_quantized else 'BF16'} rollouts harm this run: "
        f"KL(behaviour, proximal) went from {run.early(KL):.1e} to {run.late(KL):.1e}, and "
        f"{run.late('tis_truncated_fraction'):.2%} of tokens have a ratio proximal / behaviour "
        "above C (rule: at most tenfold, or at most 1e-3)."
    ]
