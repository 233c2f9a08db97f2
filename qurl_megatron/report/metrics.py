"""What a run writes: `StepMetrics`, `Evaluation` and `Sample` at steps, `RunSummary` at the end.

In the docstrings below, behaviour is the policy on the rollout servers (usually quantized), which
sampled the tokens; proximal is the learner before any update of the step; current is the learner
during the updates. Logarithms are natural. ACR is the adaptive clipping range (QuRL Eq. 9), TIS is
truncated importance sampling (QuRL Eq. 5), and C is their cap on the ratio proximal / behaviour
(`objective.ratio_cap`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from annotated_types import Predicate
from pydantic import FiniteFloat, PositiveInt

MAX_REWARDS = 20  # of `StepMetrics.reward_counts`
SHOWN_CHARACTERS = 4096  # of a prompt or a completion; the middle of a longer one is left out
SHOWN_TOKENS = 512  # with their ratios; likewise
PHASES = ("rollout", "proximal", "critic", "update", "publish")  # of a step, each with its time

OF_EVALUATION = ("held_out_accuracy", "held_out_standard_error", "evaluation")
"""Metrics of steps that are evaluated only."""

FAILURES = "scores that failed"
"""What `Evaluation.failures` are shown as."""

KINDS = ("highest reward", "lowest reward", "cut off", "largest ratio")
"""Why a completion was chosen."""


def has_mean_and_error(average: dict[str, float]) -> bool:
    """Return whether there is a `mean`, and a `standard_error` that is not negative."""
    return "mean" in average and average.get("standard_error", -1.0) >= 0


Averages = dict[str, Annotated[dict[str, float], Predicate(has_mean_and_error)]]
"""`Avg@1`, and `Avg@k sampled` if answers were sampled -> `mean` and `standard_error`."""


def measures(k: int) -> list[str]:
    """Return the names of what is measured with `k` sampled answers."""
    return ["Avg@1", *([f"Avg@{k} sampled"] if k else [])]


def mean_and_error(average: dict[str, float]) -> str:
    """Return an average of answers, as a percentage, with its standard error."""
    return accuracy_and_error(average["mean"], average["standard_error"])


def accuracy_and_error(accuracy: float, standard_error: float | None) -> str:
    """Return an accuracy as a percentage, with its standard error if that is known.

    Older runs have not recorded one.
    """
    error = "" if standard_error is None else f" \N{PLUS-MINUS SIGN} {standard_error:.1%}"
    return f"{accuracy:.1%}{error}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of the policy, served in BF16, at one point of a run."""

    held_out_accuracy: float | None = None
    """Fraction of the held-out problems whose greedy answer is right. None: none held out."""

    files: dict[str, Averages] = dataclasses.field(default_factory=dict)
    """Averages on each entry of `evaluation.data`, by its name. Empty: no such data."""

    held_out_standard_error: float | None = None
    """Standard error of `held_out_accuracy` over the held-out problems. None: none held out."""

    failures: str = ""
    """How many answers count as wrong because scoring them failed, and why. Empty: none."""

    def score(self, best_by: str = "") -> tuple[float | None, float | None]:
        """Return the number that checkpoints are compared by, and its standard error.

        It is the average of the file `best_by` over sampled answers, or over greedy ones if none
        were sampled. Without such a file it is the held-out accuracy, and without held-out problems
        the mean of all files. None: it was not measured.
        """
        chosen = [file for name, file in self.files.items() if best_by in ("", name)]
        if not chosen or (self.held_out_accuracy is not None and not best_by):
            return self.held_out_accuracy, self.held_out_standard_error
        last = [[*averages.values()][-1] for averages in chosen]
        error = math.hypot(*(average["standard_error"] for average in last)) / len(last)
        return fmean(average["mean"] for average in last), error

    def lines(self) -> list[tuple[str, str]]:
        """Return the name and the formatted value of each score, for printing."""
        scores = []
        if self.held_out_accuracy is not None:
            accuracy = accuracy_and_error(self.held_out_accuracy, self.held_out_standard_error)
            scores.append(("held-out accuracy", accuracy))
        for name, averages in self.files.items():
            for measure, average in averages.items():
                scores.append((f"{name} {measure}", mean_and_error(average)))
        if self.failures:
            scores.append((FAILURES, self.failures))
        return scores


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    "Trained tokens" are the completion tokens of the step's batch, less what
    `rollout.mask_truncated` leaves out. "Sampled" tokens and completions also include those of
    groups that dynamic sampling replaced.
    """

    step: PositiveInt
    """Number of the step, from 1."""

    weight_version: int
    """Version of the weights on the rollout servers after this step's update."""

    reward_mean: float
    """Mean reward over sampled completions, on the scale of `scoring.wrong` to `scoring.right`,
    without the penalty for overlong completions."""

    completion_length_mean: float
    """Mean length of sampled completions, in tokens; of an agent's episodes, in sampled tokens."""

    completion_truncated_fraction: float
    """Fraction of sampled completions that were cut off at `rollout.max_completion_length`; of an
    agent's episodes, the share that `rollout.max_turns` or `rollout.max_episode_tokens` ended."""

    verifier_failures: int
    """Number of sampled completions whose verifier or reward function failed: it raised, took too
    long, or its process died. They get `scoring.wrong`."""

    groups_replaced: int
    """Number of zero-variance groups (all rewards equal) that dynamic sampling replaced."""

    kl_behaviour_proximal: float
    """Train-inference mismatch: KL(behaviour || proximal) as the mean of log(behaviour / proximal)
    over trained tokens (the k1 estimate), in nats. It can be negative."""

    kl_behaviour_proximal_k3: float
    """The same divergence by the k3 estimate: mean of rho - 1 - log(rho), rho = proximal /
    behaviour, over trained tokens, in nats. It is never negative and varies less than k1."""

    logprob_abs_diff: float
    """Mean of |log(proximal / behaviour)| over trained tokens, in nats."""

    ratio_proximal_behaviour_max: float
    """Largest ratio proximal / behaviour of any trained token (QuRL Fig. 3b), at most e^20."""

    tis_truncated_fraction: float
    """Fraction of trained tokens with proximal / behaviour above C, whose weight TIS and ACR
    truncate (QuRL Eq. 5). It is measured with every objective."""

    acr_widened_fraction: float
    """Fraction of trained tokens that ACR's wider upper bound keeps and TIS would have clipped
    (QuRL Eq. 9), over all minibatches. 0 with other objectives."""

    clip_fraction: float
    """Fraction of trained tokens whose gradient the clip at 1 - `eps_low` or above 1 removed, over
    all minibatches; with cispo, whose ratio was capped."""

    kl_reference: float
    """k3 estimate of KL(current || reference), at most 10 per token, mean over trained tokens and
    minibatches, in nats. 0 without a reference policy."""

    entropy: float
    """Entropy of the proximal policy's token distribution, mean over trained tokens, in nats. With
    `rollout.top_p` it covers only the tokens that could be sampled."""

    loss: float
    """Policy loss, mean over minibatches."""

    grad_norm: float
    """Gradient norm of the policy before gradient clipping, mean over minibatches."""

    learning_rate: float
    """Learning rate of the policy at the step's last minibatch."""

    weight_update_norm: float
    """Normalized weight update (QuRL Eq. 13) since the last publish: squared norm of the change
    over squared norm before it, over the quantized weights (a sample of evenly spaced rows). With
    adapters: over these, which are rounded to BF16. 0 if none is quantized."""

    weight_quant_error: float
    """Normalized weight quantization error (QuRL Eq. 14): squared norm of Q(w) - w over squared
    norm of w, over the same rows. 0 if none is quantized."""

    code_flip_fraction: float
    """Fraction of quantized codes that changed since the last publish, over the same rows. 0 if no
    weight is quantized."""

    time_rollout_s: float
    """Seconds to sample and score the completions."""

    time_proximal_s: float
    """Seconds to send the batch to the ranks and to compute the proximal log-probs, and those of
    the reference policy if there is one. The update's own pass computes the first minibatch's
    proximal log-probs."""

    time_critic_s: float
    """Seconds for the critic's values and its updates; about 0 without a critic."""

    time_update_s: float
    """Seconds for the policy's updates over all minibatches."""

    time_publish_s: float
    """Seconds to publish to the rollout servers: pause, quantize, send, verify, resume."""

    publish_bytes: int
    """Bytes of weights that a publish sends to a rollout server: of what changed, of all tensors,
    or of both where servers needed different ones. A compressed delta counts as it is sent. If
    servers get different numbers, the largest counts. 0 if weights are written into the servers'
    parameters."""

    rollout_tokens_per_s: float
    """Sampled tokens divided by `time_rollout_s`; with `rollout.max_staleness` by the time of the
    whole step, because the servers sample all the time."""

    token_staleness_mean: float = 0.0
    """Mean staleness of trained tokens: the number of weight versions published between a token's
    sampling and the training on it. 0 in synchronous rollout."""

    token_staleness_max: int = 0
    """Largest staleness of any trained token, at most `rollout.max_staleness`."""

    stale_token_fraction: float = 0.0
    """Fraction of trained tokens with a staleness above 0."""

    by_staleness: dict[str, dict[str, float]] | None = None
    """Statistics of trained tokens by staleness: 0, 1, 2, 3-4 and 5+ weight versions. At 0 the
    train-inference mismatch comes from quantization and the engine alone; what a larger staleness
    adds is the policy's drift. Each one that occurs has its `token_fraction` of trained tokens, and
    `kl_behaviour_proximal`, `kl_behaviour_proximal_k3`, `logprob_abs_diff`,
    `ratio_proximal_behaviour_max`, `tis_truncated_fraction`, `clip_fraction` and
    `acr_widened_fraction` over them. None: synchronous rollout."""

    servers_serving: int = 0
    """Number of rollout servers that hold the weights of this step's publish. Fewer than
    `rollout.servers` while lost ones are started again."""

    value_loss: float | None = None
    """Loss of PPO's critic, mean over minibatches. None: no critic."""

    value_clip_fraction: float | None = None
    """Fraction of trained tokens whose value gradient the clip removed, over all minibatches. None:
    no critic."""

    value_explained_variance: float | None = None
    """1 - Var(return - value) / Var(return) over trained tokens, with the values before the update.
    1 is perfect, 0 no better than a constant. None: no critic."""

    time_waited_s: float = 0.0
    """Seconds of `time_rollout_s` in which training waited for answers and their scores."""

    time_evaluation_s: float = 0.0
    """Seconds of the evaluation after this step; about 0 without one."""

    time_proof_s: float = 0.0
    """Seconds in which new servers were compared with the learner; about 0 without any."""

    time_scoring_s: float = 0.0
    """Seconds of `time_waited_s` in which all answers were there and only scores were missing."""

    groups_in_flight: int = 0
    """Number of groups asked for and not trained yet, finished or not, when the step's batch was
    complete: at most `rollout.max_staleness` x `rollout.prompts_per_step`."""

    groups_dropped: int = 0
    """Number of groups dropped because a token was older than `rollout.max_staleness` updates, or
    because they were sampled with the settings of another stage. Their prompts were sampled
    again."""

    prompts_retired: int = 0
    """Number of prompts that the next epoch would leave out, by `rollout.retire_after`."""

    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean of each named part of the scores, over the sampled completions that have it. Built-in
    verifiers give `accuracy`, the fraction of right completions; a reward function of your own
    gives the numbers beside its "reward"."""

    objective_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean over trained tokens of each statistic that an objective of your own returns. With one,
    `clip_fraction`, `dual_clip_fraction` and `acr_widened_fraction` are 0."""

    verifier_timeouts: int = 0
    """Number of `verifier_failures` that took too long."""

    verifier_failure: str = ""
    """One of the `verifier_failures`: its reason, its question and the end of the completion.
    Empty: there is none."""

    held_out_accuracy: float | None = None
    """`Evaluation.held_out_accuracy` after this step. None: not evaluated at this step, or no
    held-out problems."""

    held_out_standard_error: float | None = None
    """Standard error of `held_out_accuracy`. None: as for the accuracy."""

    evaluation: dict[str, Averages] | None = None
    """`Evaluation.files` after this step. None: not evaluated at this step."""

    dual_clip_fraction: float = 0.0
    """Fraction of trained tokens whose gradient `objective.dual_clip` removed, over all
    minibatches. 0 without it."""

    logprob_diff_positive: float | None = None
    """Mean of log(proximal / behaviour) over trained tokens with a positive advantage, in nats.
    Below 0, the servers sample them more often than the learner would. null: there is none."""

    logprob_diff_negative: float | None = None
    """The same over trained tokens with a negative advantage. null: there is none."""

    equal_reward_fraction: float = 0.0
    """Fraction of the step's prompts whose completions all have the same reward. They give GRPO no
    gradient. With dynamic sampling, it is what the replacements leave."""

    reward_counts: list[tuple[FiniteFloat, PositiveInt]] = dataclasses.field(default_factory=list)
    """Distribution of the rewards of sampled completions, without the penalty for overlong
    completions: pairs of a reward and the number of completions with it, from the lowest reward.
    More than 20 different rewards are rounded to 20 evenly spaced ones."""

    memory_bytes: int = 0
    """Memory of learner rank 0, in bytes: with a GPU the most that its allocator has reserved since
    the start, without one the resident size of the process."""

    publish_full_bytes: int = 0
    """Bytes of all tensors that a rollout server holds: what a full publish carries."""

    routing_changed_fraction: float | None = None
    """Mixture of experts: fraction of tokens and layers for which the learner would choose other
    experts than the engine did, before any update of the step, over prompts and completions. null
    without `rollout.routing`."""

    update_shown_fraction: float | None = None
    """How much of the way that the float32 masters have moved since the run's start shows in the
    BF16 values made of them (`optimizer.rounding`): the length of its projection, estimated from up
    to 4096 values of each parameter and learner rank, each of which stands for as many as the
    parameter has of them. 1 is all of it, up to noise. null while nothing has moved."""

    turns_mean: float | None = None
    """Agents: mean number of turns of an episode. null without `rollout.agent`."""

    observed_length_mean: float | None = None
    """Agents: mean number of tokens of an episode, after its prompt, that the policy read and did
    not sample. null without `rollout.agent`."""

    branches_mean: float | None = None
    """Agents: mean number of sequences of an episode. Above 1, agents have rewritten histories.
    null without `rollout.agent`."""

    episode_ends: dict[str, int] | None = None
    """Agents: number of sampled episodes by what ended them. answered: the agent gave its reward.
    turns: `rollout.max_turns`. tokens: `rollout.max_episode_tokens`. deadline: one of the agent's
    time limits. error: the agent raised, or its process died. null without `rollout.agent`."""

    episodes_failed: int = 0
    """Number of sampled episodes that ended by a deadline or an error. They are left out of their
    group's mean and of the loss, and of every other metric of episodes but `episode_ends`."""

    episode_failure: str = ""
    """One of the `episodes_failed`: what went wrong. Empty: there is none."""

    prefix_cached_by_turn: dict[str, float] | None = None
    """Agents: fraction of a turn's context whose keys and values its server still had, by the
    number of the turn: 1, 2, 3 and 4+. null without `rollout.agent`."""


@dataclasses.dataclass(frozen=True)
class WeightMetrics:
    """One line of weights.jsonl: a publish."""

    weight_version: int
    """The version that it published."""

    weights: dict[str, dict[str, float]]
    """Measures of each quantized weight, by its name."""


def count_rewards(rewards: Sequence[float]) -> list[tuple[float, int]]:
    """Return `StepMetrics.reward_counts` of the rewards of a step; rewards are finite."""
    if len(set(rewards)) > MAX_REWARDS:
        low, high = min(rewards), max(rewards)
        width = (high - low) / (MAX_REWARDS - 1)
        rewards = [low + round((reward - low) / width) * width for reward in rewards]
    return sorted(Counter(rewards).items())


@dataclasses.dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl."""

    step: int
    """Step that trained it."""

    kind: str
    """Why it was chosen, of `KINDS`. Highest and lowest reward are first those of the prompt
    whose rewards differ most. The largest ratio is that of a single token, in either direction."""

    prompt: str
    """The question, at most `SHOWN_CHARACTERS` of it."""

    text: str
    """The completion, at most `SHOWN_CHARACTERS` of it."""

    reward: float
    """Reward it was trained with, after the penalty for overlong completions."""

    parts: dict[str, float]
    """Named parts of the reward, from a verifier that gives them."""

    length: int
    """Number of tokens; of an agent's episode, those after the prompt of its last sequence."""

    truncated: bool
    """Whether it was cut off at `rollout.max_completion_length`; of an agent's episode, whether
    `rollout.max_turns` or `rollout.max_episode_tokens` ended it."""

    weight_versions: list[int]
    """Versions of the weights that sampled its tokens, ascending."""

    tokens: list[str]
    """Text of each token; of more than `SHOWN_TOKENS`, the first and the last."""

    ratios: list[float | None]
    """Ratio proximal / behaviour of each token in `tokens`. null: an agent's policy read it and did
    not sample it."""

    end: str = ""
    """What ended an agent's episode, as in `StepMetrics.episode_ends`. Empty: an answer."""


def shorten(text: str) -> str:
    """Return a text without the middle, if it is longer than `SHOWN_CHARACTERS`."""
    omitted = len(text) - SHOWN_CHARACTERS
    half = SHOWN_CHARACTERS // 2
    if omitted <= 0:
        return text
    return f"{text[:half]} [... {omitted} characters left out ...] {text[-half:]}"


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """summary.json: the results of a complete run."""

    held_out_accuracy_before: float | None
    """`Evaluation.held_out_accuracy` before the first RL step."""

    held_out_accuracy_after: float | None
    """`Evaluation.held_out_accuracy` after the last step."""

    evaluation_before: dict[str, Averages]
    """`Evaluation.files` before the first RL step."""

    evaluation_after: dict[str, Averages]
    """`Evaluation.files` after the last step."""

    steps: int
    """Number of RL steps."""

    time_s: float
    """Seconds of RL, over all attempts of the run, without start-up."""

    weight_version: int
    """Version of the weights on the rollout servers after the last step."""

    time_publish_s_mean: float
    """Mean of `StepMetrics.time_publish_s` over the steps."""

    publish_bytes: int
    """`StepMetrics.publish_bytes` of the last step."""

    publish_full_bytes: int = 0
    """`StepMetrics.publish_full_bytes` of the last step."""

    held_out_standard_error_before: float | None = None
    """Standard error of `held_out_accuracy_before`."""

    held_out_standard_error_after: float | None = None
    """Standard error of `held_out_accuracy_after`."""

    reached: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics above their values in `stop_above` at the last step."""
