"""What a run's metrics say about it: rules, told as warnings while it trains and in its report.

A rule is told once, when it held at each of the last `WINDOW` steps. It is over when it held at
none of them; then it can be told again. A metric that is not finite is told at once. The report has
the warnings that are not over at the end of the run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from qurl_megatron.config.schema import Config
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


def rules(
    config: Config, first: list[dict[str, Any]], step: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the name and the sentence of each rule that holds at a step.

    If a metric is not finite, the others say nothing, and only that is told.

    Args:
        first: the first `WINDOW` steps of the run; empty before they are done.
        step: the metrics of the step, by name.
    """
    now = defaultdict(lambda: math.nan, step)
    if wrong := [name for name in FINITE if not math.isfinite(step.get(name) or 0.0)]:
        yield (
            NOT_FINITE,
            f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite: stop the run, "
            "and resume from a checkpoint before this step with a lower optimizer.learning_rate",
        )
        return
    is_quantized = config.quantization.format != "bf16"
    kl, flips = now[KL], now["code_flip_fraction"]
    cut_off = now["response_truncated_fraction"]
    if reason := _no_signal(config, now):
        yield "no reward signal", f"no reward signal: {reason}"
    elif now["grad_norm"] == 0:
        yield (
            "no gradient",
            "the gradient is 0: the rewards of each prompt are equal, so nothing is learned; "
            "choose problems of medium difficulty, or check the verifier (rule: 0)",
        )
    elif now["learning_rate"] == 0:
        yield "no learning rate", "the learning rate is 0; raise optimizer.learning_rate (rule: 0)"
    elif is_quantized and flips < 1e-4:
        yield (
            "few changed codes",
            f"each publish changes {flips:.4%} of the quantized codes. A small "
            "learning rate does that, and small updates add up until a code changes; raise "
            "optimizer.learning_rate only if the reward stalls too (rule: below 0.01%)",
        )
    if cut_off > 0.2:
        yield (
            "cut-off completions",
            f"{cut_off:.0%} of completions are cut off, so the reward "
            "favours short answers; raise rollout.max_response_length (rule: more than 20%)",
        )
    rollout = config.rollout.at(step["step"])
    failed = now["verifier_failures"] / (rollout.prompts_per_step * rollout.completions_per_prompt)
    if failed > 0.01:
        yield (
            "verifier failures",
            f"{failed:.1%} of verifier calls fail and count as wrong; look at the data and at "
            "reward (rule: more than 1%)",
        )
    if first and now["entropy"] < 0.1 * (entropy := fmean(each["entropy"] for each in first)):
        yield (
            "entropy collapse",
            f"entropy has collapsed to {now['entropy']:.2g} nats, from {entropy:.2g} in the first "
            "steps; lower optimizer.learning_rate or raise objective.eps_high (rule: less than a "
            "tenth)",
        )
    if first and kl > 1e-3 and kl > 10 * (early := fmean(each[KL] for each in first)):
        compare = (
            ". A run with quantization.format=bf16 shows whether quantization is the cause; if it "
            "is, keep the layers that `qurl mismatch` names in BF16 (quantization.keep)"
        )
        yield (
            "growing KL",
            f"KL(behaviour, proximal) has grown to {kl:.1e}, from {early:.1e} in the first "
            f"steps, and {now['tis_truncated_fraction']:.1%} of tokens have a ratio proximal / "
            "behaviour above C; lower optimizer.learning_rate"
            f"{compare if is_quantized else ''} (rule: more than tenfold, "
            "and above 1e-3)",
        )
    if kl > 5e-3 and config.objective.objective == "naive":
        yield (
            "naive objective",
            f"KL(behaviour, proximal) is {kl:.1e}, and the naive objective does not correct "
            "for it; set objective.objective=tis or acr (rule: above 5e-3)",
        )


def _no_signal(config: Config, now: dict[str, Any]) -> str:
    """Return why the rewards teach next to nothing; empty if they teach something."""
    remedy = (
        "choose problems of medium difficulty, raise rollout.completions_per_prompt, or set "
        "rollout.dynamic_sampling_tries (rule: the rewards of more than 90% of prompts are equal)"
    )
    rewards = [reward for reward, _ in now.get("reward_counts") or []]
    if len(rewards) == 1:
        return (
            f"every completion scores {rewards[0]:g}; look at the answers in samples.jsonl and at "
            f"the verifier, or {remedy}"
        )
    # A critic compares prompts too.
    if config.advantage_estimator == "grpo" and now["equal_reward_fraction"] > 0.9:
        return f"the rewards of {now['equal_reward_fraction']:.0%} of prompts are equal; {remedy}"
    return ""


class Watch:
    """The rules that hold in a run, updated at each step in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: list[dict[str, Any]] = []
        self._recent: deque[dict[str, str]] = deque(maxlen=WINDOW)
        self._raised: dict[str, str] = {}

    @property
    def raised(self) -> list[str]:
        """The warning of each rule that was told and is not over."""
        return list(self._raised.values())

    def update(self, step: dict[str, Any]) -> list[str]:
        """Return a line for each rule that a step makes worth telling, or ends.

        `step` has the metrics of the step, by name.
        """
        first = self._first if len(self._first) == WINDOW else []
        holding = dict(rules(self._config, first, step))
        if not first:
            self._first.append(step)
        self._recent.append(holding)
        lines = []
        for name, sentence in holding.items():
            lasts = len(self._recent) == WINDOW and all(name in held for held in self._recent)
            if name not in self._raised and (lasts or name == NOT_FINITE):
                self._raised[name] = f"warning at step {step['step']}: {sentence}"
                lines.append(self._raised[name])
        for name in list(self._raised):
            if not any(name in held for held in self._recent):
                del self._raised[name]
                lines.append(f"over at step {step['step']}, after {WINDOW} steps without: {name}")
        return lines


def advice(run: RunRecord) -> list[str]:
    """Return the warnings that are not over at the end of a run, or that there are none."""
    watch = Watch(run.config)
    for step in run.steps:
        watch.update(step)
    kind = "quantized" if run.config.quantization.format != "bf16" else "BF16"
    return [f"{line[0].upper()}{line[1:]}." for line in watch.raised] or [
        f"No sign that {kind} rollouts harm this run: no warning stands at its last step. "
        f"KL(behaviour, proximal) went from {run.early(KL):.1e} to {run.late(KL):.1e}, and "
        f"{run.late('tis_truncated_fraction'):.2%} of tokens have a ratio proximal / behaviour "
        "above C."
    ]
