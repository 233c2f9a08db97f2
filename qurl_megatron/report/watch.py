"""Warnings while a run trains: conditions on its last steps, each told once.

A condition is raised when it held at each of the last `WINDOW` steps, and over when it held at none
of them; then it can be raised again. A metric that is not finite is raised at once.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

from qurl_megatron.config.schema import Config
from qurl_megatron.report.metrics import StepMetrics

WINDOW = 5  # steps
CUT_OFF_LIMIT = 0.2  # share of completions
FAILURE_LIMIT = 0.01  # share of verifier calls
EQUAL_REWARDS_LIMIT = 0.9  # share of prompts
COLLAPSED_ENTROPY = 0.1  # of that of the first steps
KL_GROWTH_LIMIT = 10.0  # times that of the first steps
HARMLESS_KL = 1e-3  # nats; growth below it is not worth a warning
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


class Watch:
    """The conditions of a run, updated at each step in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: list[StepMetrics] = []  # the first `WINDOW` steps of the run
        self._recent: deque[dict[str, str]] = deque(maxlen=WINDOW)
        self._raised: dict[str, str] = {}

    @property
    def raised(self) -> list[str]:
        """The warning of each condition that is raised and not over."""
        return list(self._raised.values())

    def update(self, step: StepMetrics) -> list[str]:
        """Return a line for each condition that this step raises or ends."""
        holding = self._holding(step)
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

    def _holding(self, step: StepMetrics) -> dict[str, str]:
        """Return the sentence of each condition that holds at this step, by its name."""
        holding: dict[str, str] = {}
        rollout = self._config.rollout.at(step.step)
        completions = rollout.prompts_per_step * rollout.completions_per_prompt
        if wrong := not_finite(step):
            holding[NOT_FINITE] = (
                f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite: stop the "
                "run, and resume from a checkpoint before this step with a lower "
                "optimizer.learning_rate"
            )
        if reason := self._no_signal(step):
            holding["no reward signal"] = f"no reward signal for {WINDOW} steps: {reason}"
        if step.response_truncated_fraction > CUT_OFF_LIMIT:
            holding["cut-off completions"] = (
                f"{step.response_truncated_fraction:.0%} of completions are cut off, so the "
                "reward favours short answers; raise rollout.max_response_length"
            )
        if step.verifier_failures > FAILURE_LIMIT * completions:
            holding["verifier failures"] = (
                f"{step.verifier_failures} verifier calls of this step failed and count as "
                "wrong; look at the data and at reward"
            )
        if len(self._first) == WINDOW:
            entropy = fmean(first.entropy for first in self._first)
            if step.entropy < COLLAPSED_ENTROPY * entropy:
                holding["entropy collapse"] = (
                    f"entropy has collapsed to {step.entropy:.2g} nats, from {entropy:.2g} in the "
                    "first steps; lower optimizer.learning_rate or raise objective.eps_high"
                )
            kl = fmean(first.kl_behaviour_proximal_k3 for first in self._first)
            if step.kl_behaviour_proximal_k3 > max(KL_GROWTH_LIMIT * kl, HARMLESS_KL):
                is_quantized = self._config.quantization.format != "bf16"
                compare = ", or see with quantization.format=bf16 whether quantization is the cause"
                holding["growing KL"] = (
                    f"KL(behaviour, proximal) has grown to {step.kl_behaviour_proximal_k3:.1e}, "
                    f"from {kl:.1e} in the first steps; lower optimizer.learning_rate"
                    f"{compare if is_quantized else ''}"
                )
        return holding

    def _no_signal(self, step: StepMetrics) -> str:
        """Return why the step's rewards teach next to nothing; empty if they teach something."""
        advice = (
            "choose problems of medium difficulty, raise rollout.completions_per_prompt, or set "
            "rollout.dynamic_sampling_tries"
        )
        if len(step.reward_counts) == 1:
            return (
                f"every completion scores {step.reward_counts[0][0]:g}; look at the answers in "
                f"samples.jsonl and at the verifier, or {advice}"
            )
        if self._config.advantage_estimator == "gae":  # a critic compares prompts too
            return ""
        if step.equal_reward_fraction == 1:
            return f"all groups equal, the rewards of no prompt differ; {advice}"
        if step.equal_reward_fraction > EQUAL_REWARDS_LIMIT:
            return f"the rewards of {step.equal_reward_fraction:.0%} of prompts are equal; {advice}"
        return ""


def not_finite(step: StepMetrics) -> list[str]:
    """Return the names of the metrics of a step that should be finite and are not."""
    values = {name: getattr(step, name) for name in FINITE}
    return [
        name for name, value in values.items() if value is not None and not math.isfinite(value)
    ]
