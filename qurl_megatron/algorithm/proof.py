"""Check that rollouts are samples of the policy, before a run trains on them.

An environment variable or an option can make servers sample from another distribution than the
run asked for, or report log-probs of a distribution that they did not draw from. Nothing fails
then: the run trains on wrong ratios. Right rollouts have two properties:

- The log-probs of sampled tokens are the learner's, except for rounding and quantization.
- Completions of one prompt differ, as often as their own log-probs say.
"""

from collections.abc import Iterable, Sequence
from math import log

from qurl_megatron.algorithm.batch import Completion
from qurl_megatron.config.schema import FormatName
from qurl_megatron.device import SharedError

# KL(behaviour || proximal), k3, in nats: about ten to a hundred times the largest value measured
# with right rollouts. docs/method.md#proof has the measurements.
LARGEST_KL: dict[FormatName, float] = {
    "bf16": 5e-3,
    "int8": 5e-3,
    "fp8": 4e-2,
    "fp8-tensor": 4e-2,
    "fp8-block": 4e-2,
    "int4": 2e-1,
}
LARGEST_KL_OF_EXPERTS = 4e-2  # at least: engines choose other experts for a few tokens
IMPOSSIBLE = 1e-6  # rollouts of a lower probability are taken for wrong


class WrongRollouts(RuntimeError, SharedError):
    """Rollouts are not samples of the policy; the text says why, and what the cause may be."""


def check_mismatch(
    set_name: str, format: FormatName, has_experts: bool, kl: float, *, shares_base: bool = False
) -> None:
    """Check the log-probs that servers report against the learner's.

    Args:
        set_name: rollout or evaluation.
        format: of the servers' weights.
        has_experts: the model is a mixture of experts.
        kl: KL(behaviour || proximal), k3, in nats per token.
        shares_base: beneath adapters, the learner multiplies the same codes as the servers. INT4
            quantizes no activations, so it then explains no difference.

    Raises:
        WrongRollouts: the format does not explain the difference.
    """
    explained = LARGEST_KL["bf16" if shares_base and format == "int4" else format]
    limit = max(explained, LARGEST_KL_OF_EXPERTS if has_experts else 0.0)
    if not kl <= limit:  # true for NaN too
        raise WrongRollouts(
            f"the {set_name} servers' log-probs are not the learner's: KL(behaviour, proximal) is "
            f"{kl:.1e}, and {format} explains {limit:.1e} at most. Likely causes, "
            f"the likeliest first: an option in {set_name}.server.options or a variable in "
            f"{set_name}.server.environment changes how servers sample or what they report; the "
            "servers do not compute what the learner does, which a new architecture may cause; "
            "the format is too coarse for the model (qurl mismatch shows its layers). "
            "rollout.accept_mismatch=true trains all the same"
        )


def check_differ(groups: Iterable[Sequence[Completion]]) -> None:
    """Check that completions of one prompt differ as often as their own log-probs say.

    The log-probs of a group's first completion give the probability that all others equal it. The
    check fails if the product of these probabilities, over the groups where it happened, is below
    `IMPOSSIBLE` divided by the number of ways to choose such groups.

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
    # There are 2^num_groups ways to choose groups.
    if logprob < log(IMPOSSIBLE) - num_groups * log(2):
        raise WrongRollouts(
            f"all answers to a prompt are the same, for {num_equal} of {num_groups} prompts, which "
            f"by their own log-probs has a probability of 1e{logprob / log(10):.0f}: the servers "
            "do not draw each answer anew. Look for a fixed seed or greedy decoding in the "
            "servers' options and environment"
        )
