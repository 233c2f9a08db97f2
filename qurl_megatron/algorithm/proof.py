"""Check that rollouts are samples of the policy, before a run trains on them.

An environment variable or an option can make servers sample from another distribution than the
run asked for, or report log-probs of a distribution that they did not draw from. Nothing fails
then: the run trains on wrong ratios. So the learner scores the first samples of a server twice: as
it is (proximal), and as it computes when it computes as the servers do (predicted). Right rollouts
have four properties:

- The log-probs of sampled tokens are the predicted ones, up to the engine's rounding. If
  activations are quantized, this holds for means alone: they differ from proximal about as much as
  predicted ones do. In single tokens a value on the boundary of two codes tips either way.
- The mean of rho = proximal / behaviour is 1, whatever the quantization: it is a mean over tokens
  that were drawn from behaviour.
- A token's log-prob is on average minus the entropy of the distribution that it was drawn from,
  which the predicted one has too. This sees the temperature best.
- Completions of one prompt differ, as often as their own log-probs say.

Each server is judged by its own tokens, because right ones would hide a wrong one in a common mean.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite, log, sqrt

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import Completion, TrainBatch
from qurl_megatron.config.schema import FormatName
from qurl_megatron.device import SharedError

# Differences of log-probs, in nats. docs/method.md#proof has the measurements.
FACTOR = 1.5  # of the predicted mean difference
ENGINE = 0.05  # on top of it: an engine computes in BF16, in another order
ENGINE_WITH_EXPERTS = 0.15  # it then chooses other experts for a few tokens
SMALL = 0.02  # no mean closer to its expected value counts as wrong
ERRORS = 5.0  # standard errors beyond which chance is no explanation
LEAST = 100  # tokens; the standard error of fewer is itself a matter of chance
ENOUGH = 400  # tokens of a server; fewer tell some kinds of wrong ones from right ones by luck only
IMPOSSIBLE = 1e-6  # rollouts of a lower probability are taken for wrong
_LARGEST = 20.0  # of a difference of log-probs


class WrongRollouts(RuntimeError, SharedError):
    """Rollouts are not samples of the policy; the text says why, and what the cause may be."""


def evidence(rows: TrainBatch) -> dict[str, Tensor]:
    """Return sums over tokens that `check_mismatch` needs, to add up over micro batches and ranks.

    `rows` have behaviour, proximal and predicted log-probs, and the predicted entropy. Of
    each measurement there are its sum and the sum of its squares, in float64.
    """
    names = ("behaviour_logprobs", "proximal_logprobs", "predicted_logprobs", "entropy")
    scores = [getattr(rows, name) for name in names]
    behaviour, proximal, predicted, entropy = (
        torch.where(rows.loss_mask, each, 0.0).double() for each in scores
    )
    log_rho = (proximal - behaviour).clamp(-_LARGEST, _LARGEST)
    expected = (proximal - predicted).clamp(-_LARGEST, _LARGEST).abs()
    measurements = {
        "difference": log_rho.abs(),
        "predicted": expected,
        "excess": log_rho.abs() - FACTOR * expected,
        "residual": (predicted - behaviour).clamp(-_LARGEST, _LARGEST).abs(),
        "ratio": log_rho.expm1(),
        "surprise": behaviour + entropy,
    }
    sums = {"tokens": rows.loss_mask.sum().double()}
    for name, values in measurements.items():
        sums |= {name: values.sum(), f"{name}_squares": values.square().sum()}
    return sums


def added(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the total of each sum."""
    total: defaultdict[str, float] = defaultdict(float)
    for each in sums:
        for name, value in each.items():
            total[name] += value
    return dict(total)


def check_mismatch(
    set_name: str,
    format: FormatName,
    by_server: Mapping[str, Mapping[str, float]],
    *,
    quantizes_activations: bool,
    has_experts: bool,
) -> None:
    """Check the log-probs that servers report against the learner's: of each, and of all.

    Fewer tokens than `LEAST` are not judged, neither those of a server nor those of all.

    Args:
        set_name: rollout or evaluation.
        format: of the servers' weights.
        by_server: the `evidence` of each server's tokens, by its name.
        quantizes_activations: the servers do.
        has_experts: the model is a mixture of experts.

    Raises:
        WrongRollouts: the servers do not sample the policy, or report other log-probs.
    """
    why = partial(
        _why, set_name, format, quantizes_activations=quantizes_activations, has_experts=has_experts
    )
    of_each = [why(f"server {name}'s", sums) for name, sums in by_server.items()]
    of_all = why(f"the {set_name} servers'", added(by_server.values()))
    # Some are named; what is wrong with all is said of all.
    reasons = [of_all, *of_each] if all(of_each) else [*of_each, of_all]
    if reason := next(filter(None, reasons), None):
        raise WrongRollouts(reason)


def _why(
    set_name: str,
    format: FormatName,
    whose: str,
    sums: Mapping[str, float],
    *,
    quantizes_activations: bool,
    has_experts: bool,
) -> str | None:
    """Return why log-probs are not those of the policy; None if nothing is wrong with them."""
    if sums["tokens"] < LEAST:
        return None

    def mean(name: str) -> tuple[float, float]:
        """Return a mean and its standard error."""
        tokens = sums["tokens"]
        value = sums[name] / tokens
        return value, sqrt(max(sums[f"{name}_squares"] / tokens - value**2, 0.0) / tokens)

    explained = ENGINE_WITH_EXPERTS if has_experts else ENGINE
    difference, error = mean("residual")
    if quantizes_activations:
        explained += FACTOR * mean("predicted")[0]
        difference, error = mean("difference")[0], mean("excess")[1]
    ratio, ratio_error = mean("ratio")
    surprise, surprise_error = mean("surprise")
    if not (isfinite(difference) and difference <= explained + ERRORS * error):
        why = (
            f"they differ from what the learner expects of {format} by {difference:.2g} nats on "
            f"average, and {explained:.2g} is explained"
        )
        causes = (
            "the servers do not compute what the learner does: an option in "
            f"{set_name}.server.options, a variable in {set_name}.server.environment, or an "
            "architecture that one of them has wrong"
        )
    elif ratio > SMALL + ERRORS * ratio_error:
        why = f"the mean of proximal / behaviour is {1 + ratio:.3g}, and must be 1"
        causes = (
            f"a variable in {set_name}.server.environment or an option lets servers report "
            "log-probs of another distribution than they sample from"
        )
    elif abs(surprise) > SMALL + ERRORS * surprise_error:
        likely = "likelier" if surprise > 0 else "less likely"
        why = f"the sampled tokens are {likely} than they should be, by {abs(surprise):.2g} nats"
        causes = (
            f"an option in {set_name}.server.options or a variable in "
            f"{set_name}.server.environment changes the temperature or cuts the distribution"
        )
    else:
        return None
    return (
        f"{whose} log-probs are not those of the policy: {why} (measured on "
        f"{sums['tokens']:.0f} tokens). The likeliest cause: {causes}. "
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
            "servers' options and environment. rollout.accept_mismatch=true trains all the same"
        )
