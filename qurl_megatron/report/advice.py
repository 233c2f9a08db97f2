"""Advice on a run: fixed rules on its metrics, each stated with the sentence it produces."""

from __future__ import annotations

from qurl_megatron.report.record import RunRecord


def advice(run: RunRecord) -> list[str]:
    """Return the sentences of the rules that apply, or one sentence if none does.

    "Late" values are means over the last tenth of the steps.
    """
    kl, truncated = "kl_behaviour_proximal_k3", "tis_truncated_fraction"
    growth = run.late(kl) / run.early(kl) if run.early(kl) > 0 else 1.0
    late_flips, late_failures = run.late("code_flip_fraction"), run.late("verifier_failures")
    completions = run.config.rollout.prompts_per_step * run.config.rollout.completions_per_prompt
    late_cut = run.late("response_truncated_fraction")
    is_quantized = run.config.quantization.format != "bf16"
    sentences = []
    if growth > 10 and run.late(truncated) > 0.01:
        sentences.append(
            f"KL(behaviour, proximal) grew {growth:.0f}-fold, and {run.late(truncated):.1%} of "
            "tokens have a ratio proximal / behaviour above C. Lower the learning rate, or use fp8 "
            "rollouts. (Rule: more than tenfold, and more than 1%.)"
        )
    if run.late(kl) > 5e-3 and run.config.objective.objective == "naive":
        sentences.append(
            f"KL(behaviour, proximal) is {run.late(kl):.1e}, and the naive objective does not "
            "correct for it. Set objective.objective=acr, or use fp8 rollouts. (Rule: above 5e-3 "
            "with the naive objective.)"
        )
    if is_quantized and late_flips < 1e-4:
        sentences.append(
            f"Each publish changes only {late_flips:.2%} of the quantized codes, so the rollout "
            "policy hardly follows the learner. Raise quantization.uaq.scale. (Rule: below 0.01%.)"
        )
    if late_cut > 0.2:
        sentences.append(
            f"{late_cut:.0%} of completions are truncated, so the reward favours short answers. "
            "Raise rollout.max_response_length. (Rule: more than 20%.)"
        )
    if late_failures > 0.01 * completions:
        sentences.append(
            f"{late_failures / completions:.1%} of verifier calls fail and score 0. Check the "
            "data. (Rule: more than 1%.)"
        )
    return sentences or [
        f"No sign that {'quantized' if is_quantized else 'BF16'} rollouts harm this run: "
        f"KL(behaviour, proximal) went from {run.early(kl):.1e} to {run.late(kl):.1e}, and "
        f"{run.late(truncated):.2%} of tokens have a ratio proximal / behaviour above C. (Rule: "
        "at most tenfold, or at most 1%.)"
    ]
