"""What rollouts must show before a run trains on them; what they cannot be ends the run.

Servers may sample otherwise than they were asked to, for a variable of their environment or an
option, and report log-probs of another distribution than they drew from. Nothing fails then: the
run trains on wrong ratios. Two properties of right rollouts show it:

- The log-probs of sampled tokens are the learner's, but for rounding and quantization.
- Completions of one prompt differ, as often as their own log-probs say.
"""

from collections.abc import Iterable, Sequence
from math import log

from qurl_megatron.algorithm.batch import Completion
from qurl_megatron.config.schema import FormatName
from qurl_megatron.device import SharedError

# KL(behaviour || proximal), k3, in nats: some ten to a hundred times the largest that was measured
# with right rollouts. docs/method.md#proof has the measurements.
LARGEST_KL: dict[FormatName, float] = {
    "bf16": 5e-3,
    "int8": 5e-3,
    "fp8": 4e-2,
    "fp8-tensor": 4e-2,
    "fp8-block": 4e-2,
    "int4": 2e-1,
}
LARGEST_KL_OF_EXPERTS = 4e-2  # or more: a router chooses other experts for a few tokens
IMPOSSIBLE = 1e-6  # probability of what is taken for wrong


class WrongRollouts(RuntimeError, SharedError):
    """Rollouts are not samples of the policy; the text says why, and what the cause may be."""


def check_mismatch(
    set_name: str, format: FormatName, has_experts: bool, kl: float, *, shares_base: bool = False
) -> None:
    """Check what servers of a format say of their samples against what the learner computes.

    Args:
        set_name: rollout or evaluation.
        format: of the servers' weights.
        has_experts: the model is a mixture of experts.
        kl: KL(behaviour || proximal), k3, in nats per token.
        shares_base: the learner multiplies the codes of the servers, beneath adapters. Of INT4,
            which quantizes no activations, nothing is then left to explain.

    Raises:
        WrongRollouts: the format does not explain the difference.
    """
    explained = LARGEST_KL["bf16" if shares_base and format == "int4" else format]
    limit = max(explained, LARGEST_KL_OF_EXPERTS if has_experts else 0.0)
    if not kl <= limit:  # NaN neither
        raise WrongRollouts(
            f"the {set_name} servers' log-probs are not the learner's: KL(behaviour, proximal) is "
            f"{kl:.1e}, and {format} explains {limit:.1e} at most. Likely causes, "
            f"the likeliest first: an option in {set_name}.server.options or a variable in "
            f"{set_name}.server.environment changes how servers sample or what they report; the "
            "servers compute the model otherwise than the learner, as they may a new architecture; "
            "the format is too coarse for the model (qurl mismatch shows its layers). "
            "rollout.accept_mismatch=true trains all the same"
        )


def check_differ(groups: Iterable[Sequence[Completion]]) -> None:
    """Check that completions of one prompt differ as often as their own log-probs say.

    That all completions of a group equal the first has a probability, by the log-probs of the
    first. The check fails if the product over the groups where it happened is below
    `IMPOSSIBLE`, however one chooses such groups among all.

    Raises:
        WrongRollouts: so many equal completions cannot be samples.
    """
    logprob, num_groups, num_equal = 0.0, 0, 0
    for first, *others in filter(len, groups):
        if not others:
            continue
        num_groups += 1
        tokens = [sequence.token_ids for sequence in first.sequences()]
        if all([each.token_ids for each in other.sequences()] == tokens for other in others):
            num_equal += 1
            own = sum(sum(sequence.behaviour_logprobs) for sequence in first.sequences())
            logprob += len(others) * own
    if logprob < log(IMPOSSIBLE) - num_groups * log(2):
        raise WrongRollouts(
            f"all answers to a prompt are the same, for {num_equal} of {num_groups} prompts, which "
            f"by their own log-probs has a probability of 1e{logprob / log(10):.0f}: the servers "
            "do not draw each answer anew. Look for a fixed seed or greedy decoding in the "
            "servers' options and environment"
        )
