"""Advice on a run: fixed rules on its metrics, each stated with the sentence it produces."""

from __future__ import annotations

import math

from qurl_megatron.report.record import RunRecord
from qurl_megatron.report.watch import CUT_OFF_LIMIT, FAILURE_LIMIT, FINITE, KL_GROWTH_LIMIT


def advice(run: RunRecord) -> list[str]:
    """Return the sentences of the rules that apply, or one sentence if none does.

    "Late" values are means over the last tenth of the steps. If a metric is not finite, means say
    nothing, and only that is told.
    """
    if not_finite := _not_finite(run):
        return [not_finite]
    kl, truncated = "kl_behaviour_proximal_k3", "tis_truncated_fraction"
    growth = run.late(kl) / run.early(kl) if run.early(kl) > 0 else 1.0
    late_flips, late_failures = run.late("code_flip_fraction"), run.late("verifier_failures")
    completions = run.config.rollout.prompts_per_step * run.config.rollout.completions_per_prompt
    late_cut = run.late("response_truncated_fraction")
    is_quantized = run.config.quantization.format != "bf16"
    has_gradient = run.late("grad_norm") > 0 and run.late("learning_rate") > 0
    sentences = []
    if not has_gradient:
        lacking = "learning rate" if run.late("grad_norm") > 0 else "gradient"
        remedy = (
            "Raise optimizer.learning_rate."
            if lacking == "learning rate"
            else "The rewards of each prompt are equal, so nothing is learned: choose problems of "
            "medium difficulty, or check the verifier."
        )
        sentences.append(f"The {lacking} is 0. {remedy} (Rule: 0 in the last tenth of the steps.)")
    if growth > KL_GROWTH_LIMIT and run.late(truncated) > 0.01:
        ask = (
            " A run with quantization.format=bf16 shows whether quantization is the cause; if it "
            "is, keep the layers that `qurl mismatch` names in BF16 (quantization.keep)."
        )
        sentences.append(
            f"KL(behaviour, proximal) grew {growth:.0f}-fold, and {run.late(truncated):.1%} of "
            "tokens have a ratio proximal / behaviour above C. Lower optimizer.learning_rate."
            f"{ask if is_quantized else ''} (Rule: more than tenfold, and more than 1%.)"
        )
    if run.late(kl) > 5e-3 and run.config.objective.objective == "naive":
        sentences.append(
            f"KL(behaviour, proximal) is {run.late(kl):.1e}, and the naive objective does not "
            "correct for it. Set objective.objective=tis or acr. (Rule: above 5e-3 with the naive "
            "objective.)"
        )
    if is_quantized and has_gradient and late_flips < 1e-4:
        sentences.append(
            f"Each publish changes {late_flips:.4%} of the quantized codes. A small learning rate "
            "does that, and small updates add up until a code changes. Raise "
            "optimizer.learning_rate only if the reward stalls too. (Rule: below 0.01%, with a "
            "gradient.)"
        )
    if late_cut > CUT_OFF_LIMIT:
        sentences.append(
            f"{late_cut:.0%} of completions are truncated, so the reward favours short answers. "
            "Raise rollout.max_response_length. (Rule: more than 20%.)"
        )
    if late_failures > FAILURE_LIMIT * completions:
        sentences.append(
            f"{late_failures / completions:.1%} of verifier calls fail, and count as wrong. Check "
            "the data. (Rule: more than 1%.)"
        )
    return sentences or [
        f"No sign that {'quantized' if is_quantized else 'BF16'} rollouts harm this run: "
        f"KL(behaviour, proximal) went from {run.early(kl):.1e} to {run.late(kl):.1e}, and "
        f"{run.late(truncated):.2%} of tokens have a ratio proximal / behaviour above C. (Rule: "
        "at most tenfold, or at most 1%.)"
    ]


def _not_finite(run: RunRecord) -> str:
    """Return a sentence on the first step with a metric that is not finite; empty if all are."""
    for step in run.steps:
        wrong = [name for name in FINITE if not math.isfinite(step.get(name) or 0.0)]
        if wrong:
            return (
                f"{', '.join(wrong)} stopped being finite at step {step['step']}. Resume from a "
                "checkpoint before it, with a lower optimizer.learning_rate. (Rule: any value "
                "that is not finite.)"
            )
    return ""
