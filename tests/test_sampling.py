"""The batch of a step: its groups, and the rewards and advantages of their completions."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import minibatches
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Config, ScoringConfig, StageConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data import rewards
from qurl_megatron.data.scoring import Scorer
from qurl_megatron.loop.sampling import NothingToTrainOn
from samplers import sampler_of, scores_of

PROMPTS = [Prompt(f"{n}", f"question {n}", "yes", [10 + n]) for n in range(12)]


@dataclasses.dataclass
class ScriptedClient:
    """A rollout client that answers from a script and records what it is asked."""

    texts: dict[str, list[str]]  # prompt id -> text of each completion
    asked: list[str] = dataclasses.field(default_factory=list)  # prompt ids, in order
    settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of each
    is_deterministic: bool = False

    def sampling(self, **settings: Any) -> dict[str, Any]:
        """Return the settings as they are."""
        return settings

    async def group(self, prompt: Prompt, settings: dict[str, Any]) -> list[Completion]:
        """Return completions of 3, 4, ... tokens; both say "no" where the script has no texts.

        One that says "and" was cut off, and one that says "fail" comes without a reward. A
        deterministic client has equal ones.
        """
        self.asked.append(prompt.id)
        self.settings.append(settings)
        if self.is_deterministic:
            return [Completion([50] * 9, [-1.0] * 9, "no", False, [1] * 9)] * 9
        return [
            Completion(
                *([50] * length, [-1.0] * length, text, text == "and", [1] * length),
                score=Score(0.0, {}, "lost") if text == "fail" else None,
            )
            for length, text in enumerate(self.texts.get(prompt.id, ["no", "no"]), start=3)
        ]


def score_exactly(prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
    """Return 1 for each answer that is the right one, at once."""
    return scores_of(float(each.text == prompt.answer) for each in completions)


def two_prompt_config() -> Config:
    config = Config(reward="exact")
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 2, 2
    config.rollout.max_completion_length = 4
    return config


def sample_step(
    tries: int, texts: dict[str, list[str]], soft_tokens: int = 0
) -> tuple[TrainBatch, dict[str, Any], list[str]]:
    """Sample one step of two prompts; return batch, summary, and the ids of prompts asked for."""
    config = two_prompt_config()
    config.rollout.dynamic_sampling_tries = tries
    config.rollout.soft_overlong_tokens = soft_tokens
    client = ScriptedClient(texts)
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        batch, summary = sampler.sample(step=1, version=1)
    return batch, summary, client.asked


def advantage_signs(batch: TrainBatch) -> list[float]:
    assert batch.advantages is not None
    sequences = batch.advantages.split(batch.lengths.tolist())
    return [float(torch.sign(advantages.sum())) for advantages in sequences]


def test_without_dynamic_sampling_zero_variance_groups_stay_in_the_batch() -> None:
    batch, summary, asked = sample_step(0, {})
    assert len(asked) == 2 and summary["groups_replaced"] == 0
    assert summary["equal_reward_fraction"] == 1 and summary["reward_counts"] == [(0.0, 4)]
    assert advantage_signs(batch) == [0, 0, 0, 0]


def test_prompts_of_equal_rewards_are_retired_unless_their_scores_failed() -> None:
    config = with_overrides(two_prompt_config(), ["rollout.retire_after=1"])
    client = ScriptedClient({prompt.id: ["yes", "no"] for prompt in PROMPTS[::2]})
    client.texts["5"] = ["no", "fail"]

    def fail(prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        scores: Future[list[Score]] = Future()
        is_lost = prompt.id in ("1", "3")
        failed, scored = [Score(0.0, {}, "failed")], score_exactly(prompt, completions).result()
        scores.set_result([*failed, *scored[1:]] if is_lost else scored)
        return scores

    with sampler_of(config, client, fail, PROMPTS) as sampler:
        retired = [sampler.sample(step, version=1)[1]["prompts_retired"] for step in range(1, 7)]
        assert retired[-1] == 3 and retired == sorted(retired)  # 7, 9 and 11
        asked, first = set(client.asked), len(client.asked)
        assert asked == {prompt.id for prompt in PROMPTS}
        for step in range(7, 12):  # an epoch of nine
            sampler.sample(step, version=1)
    assert {*client.asked[first : first + 9]} == asked - {"7", "9", "11"}


def test_of_several_rewards_the_first_decides_what_is_retired_and_their_sum_what_is_replaced() -> (
    None
):
    """Always solved is always solved, however long the answers are; but lengths can be learned."""
    words = ["rollout.retire_after=1", "rollout.dynamic_sampling_tries=1"]
    words += ["reward=[exact, own.py:brief]", "scoring.weights=[1, 0.001]"]
    config = with_overrides(two_prompt_config(), [*words, "scoring.by_source.short=own.py:short"])

    def score(prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        right = score_exactly(prompt, completions).result()
        lengths = [Score(float(-len(each.token_ids)), {}, "") for each in completions]
        scores: Future[list[Score]] = Future()
        of_question = rewards.of_question(config, prompt.asked)
        pairs = zip(right, lengths, strict=True)
        scores.set_result([rewards.weighted_sum(of_question, each) for each in pairs])
        return scores

    client = ScriptedClient({prompt.id: ["yes", "no"] for prompt in PROMPTS[::2]})
    short = dataclasses.replace(PROMPTS[1], columns={"data_source": "short"})
    with sampler_of(config, client, score, [short, *PROMPTS[::2], *PROMPTS[3::2]]) as sampler:
        steps = [sampler.sample(step, version=1)[1] for step in range(1, 7)]
    assert steps[-1]["prompts_retired"] == 6 and not any(each["groups_replaced"] for each in steps)


def test_retired_prompts_get_another_chance_when_what_decides_their_rewards_changes() -> None:
    """By a stage, or by a resume with other settings, and by no other resume."""
    config = with_overrides(two_prompt_config(), ["rollout.retire_after=1"])
    staged = with_overrides(config, [])
    staged.rollout.stages = {6: StageConfig(8, 2)}
    texts = {prompt.id: ["yes", "no"] for prompt in PROMPTS[::2]}

    def run(
        config: Config, steps: range, saved: dict[str, Any] | None = None
    ) -> tuple[list[int], list[str], dict[str, Any]]:
        """Return how many are retired after each step, the prompts asked for, and the state."""
        client = ScriptedClient(texts)
        with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
            if saved:
                sampler.restore(saved, steps[0] - 1)
            done = [sampler.sample(step, version=1)[1] for step in steps]
            return [each["prompts_retired"] for each in done], client.asked, sampler.state()

    retired, _, saved = run(config, range(1, 6))
    last, rest = retired[-1], range(6, 13)  # the second epoch begins at step 7
    assert last > 0
    of_stage, first, at_stage = run(staged, range(1, 6))
    assert of_stage == [*retired[:-1], 0]
    whole = run(staged, range(1, 13))
    resumed, asked, state = run(staged, rest, json.loads(json.dumps(at_stage)))
    assert (of_stage + resumed, first + asked, state) == whole
    assert resumed[0] < last and len(set(asked[2:])) == 12 - resumed[0]
    resumed, asked, _ = run(config, rest, json.loads(json.dumps(saved)))
    assert resumed[0] >= last and len(set(asked[2:])) == 12 - resumed[0]
    for change in (
        "rollout.max_completion_length=8",
        "rollout.temperature=0.5",
        "reward=gsm8k",
        "scoring.wrong=-1",
    ):
        resumed, asked, _ = run(with_overrides(config, [change]), rest, saved)
        assert resumed[0] < last and len(set(asked[2:])) == 12 - resumed[0], change


@pytest.mark.parametrize("baseline", ["", "_baseline"])
def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step(baseline: str) -> None:
    """As verl's `masked_whiten`: of 3, 4, 3, 4 tokens with rewards of 1, 0, 0 and 0."""
    config = two_prompt_config()
    config.objective.advantage_estimator = f"reinforce_plus_plus{baseline}"  # type: ignore
    _, _, [first, _] = sample_step(0, {})
    client = ScriptedClient({first: ["yes", "no"]})
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        batch, _ = sampler.sample(step=1, version=1)
    rewards = torch.tensor([0.5, -0.5, 0, 0] if baseline else [1.0, 0, 0, 0])
    of_tokens = rewards.repeat_interleave(torch.tensor([3, 4, 3, 4]))
    expected = (of_tokens - of_tokens.mean()) / of_tokens.std()
    assert batch.advantages is not None and not batch.advantages[~batch.loss_mask].any()
    torch.testing.assert_close(batch.advantages[batch.loss_mask], expected)


def test_batch_of_ppo_has_rewards_and_no_advantages_before_the_critic() -> None:
    config = two_prompt_config()
    config.objective.advantage_estimator = "gae"
    client = ScriptedClient({prompt.id: ["yes", "no"] for prompt in PROMPTS})
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        batch, _ = sampler.sample(step=1, version=1)
    assert batch.advantages is None
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [*[0, 0, 0, 1], *[0, 0, 0, 0, 0]] * 2


def test_what_was_cut_off_weighs_nothing_and_counts_in_the_baseline_of_its_group() -> None:
    config = with_overrides(two_prompt_config(), ["objective.aggregation=token_mean"])
    config.rollout.mask_truncated = True
    client = ScriptedClient({prompt.id: ["yes", "and"] for prompt in PROMPTS})
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        batch, _ = sampler.sample(step=1, version=1)
    (minibatch,) = minibatches(config, batch)
    assert minibatch.loss_weights is not None
    weights = minibatch.loss_weights.split(batch.lengths.tolist())
    assert [each.sum().item() for each in weights] == pytest.approx([1 / 2, 0, 1 / 2, 0])
    assert advantage_signs(batch) == [1, -1, 1, -1]  # better than what was cut off


def test_a_step_of_which_everything_was_cut_off_is_sampled_again_and_then_ends_the_run() -> None:
    config = two_prompt_config()
    config.rollout.mask_truncated = True
    client = ScriptedClient({prompt.id: ["and", "and"] for prompt in PROMPTS})
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        message = "in try 3 of 3; all were cut off, .* raise rollout.max_completion_length=4"
        with pytest.raises(NothingToTrainOn, match=message):
            sampler.sample(step=1, version=1)
    assert len(client.asked) == 3 * 2


@pytest.mark.parametrize("tries", [1, 3])
def test_zero_variance_groups_are_replaced_at_most_as_often_as_configured(tries: int) -> None:
    _, _, [first, second] = sample_step(0, {})
    batch, summary, asked = sample_step(tries, {first: ["yes", "no"]})
    assert asked[:2] == [first, second]
    assert len(asked) == len(set(asked)) == 2 + tries  # only the second is replaced
    assert summary["groups_replaced"] == tries
    last = asked[-1]
    starts = batch.lengths.cumsum(0) - batch.lengths
    assert batch.tokens[starts].tolist() == [10 + int(id_) for id_ in (first, first, last, last)]
    assert summary["reward_mean"] == pytest.approx(1 / (4 + 2 * tries))  # over all completions


def test_replacement_with_unequal_rewards_ends_dynamic_sampling() -> None:
    _, _, [first, second] = sample_step(0, {})
    _, _, [*_, third] = sample_step(1, {first: ["yes", "no"]})
    batch, summary, asked = sample_step(5, {first: ["yes", "no"], third: ["no", "yes"]})
    assert asked == [first, second, third] and summary["groups_replaced"] == 1
    assert summary["equal_reward_fraction"] == 0  # of the batch
    assert summary["reward_counts"] == [(0.0, 4), (1.0, 2)]  # of all that was sampled
    assert advantage_signs(batch) == [1, -1, -1, 1]


def test_length_penalty_lowers_advantages_and_not_the_reported_reward() -> None:
    right = {prompt.id: ["yes", "yes"] for prompt in PROMPTS}  # of 3 and of 4 tokens
    batch, summary, _ = sample_step(0, right, soft_tokens=2)
    assert summary["reward_mean"] == 1
    assert advantage_signs(batch) == [1, -1, 1, -1]


def test_the_length_penalty_is_that_of_the_steps_stage() -> None:
    config = two_prompt_config()
    config.rollout.soft_overlong_tokens = 2
    config.rollout.stages = {2: StageConfig(8, 2)}
    client = ScriptedClient({prompt.id: ["yes", "yes"] for prompt in PROMPTS})
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        of_four, _ = sampler.sample(step=1, version=1)
        of_eight, _ = sampler.sample(step=2, version=1)
    assert advantage_signs(of_four) == [1, -1, 1, -1]
    assert advantage_signs(of_eight) == [0, 0, 0, 0]


def test_equal_answers_end_a_run_unless_it_accepts_them() -> None:
    config = two_prompt_config()
    config.rollout.completions_per_prompt, config.rollout.max_completion_length = 9, 12
    client = ScriptedClient({}, is_deterministic=True)
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        with pytest.raises(WrongRollouts, match="are the same, .*accept_mismatch=true trains"):
            sampler.sample(step=1, version=1)
    config.rollout.accept_mismatch = True
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        batch, _ = sampler.sample(step=1, version=1)
    assert len(batch) == 18


def test_failed_verifiers_are_counted_and_one_is_described() -> None:
    right, wrong = "\\boxed{42}", "\\boxed{41}"
    too_slow, too_deep = "\\boxed{9^{9^{9^9}}}", "9" * 100_000
    prompt = Prompt("0", "question", "42", [10])
    config = Config(reward="math", scoring=ScoringConfig(wrong=-1))
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 1, 4
    client = ScriptedClient({"0": [right, too_slow, too_deep, wrong]})
    with (
        Scorer(config, workers=1) as scorer,
        sampler_of(config, client, scorer.submit, [prompt]) as sampler,
    ):
        batch, summary = sampler.sample(step=1, version=1)
    assert (summary["verifier_failures"], summary["verifier_timeouts"]) == (2, 1)
    assert summary["verifier_failure"] == (
        f"timed out after 3 s of CPU time; question 'question', end of the completion {too_slow!r}"
    )
    assert summary["reward_mean"] == (1 - 3) / 4
    assert summary["reward_parts"] == {"accuracy": 1 / 4}
    assert advantage_signs(batch) == [1, -1, -1, -1]


def test_a_server_that_waits_for_weights_gets_them_while_groups_are_awaited() -> None:
    class SlowClient(ScriptedClient):
        async def group(self, prompt: Prompt, settings: dict[str, Any]) -> list[Completion]:
            while not admitted:
                await asyncio.sleep(0.01)
            return await super().group(prompt, settings)

    admitted: list[bool] = []
    client = SlowClient({})
    with sampler_of(
        two_prompt_config(),
        client,
        score_exactly,
        PROMPTS,
        servers_join=lambda: not admitted,
        admit=lambda: admitted.append(True),
    ) as sampler:
        batch, _ = sampler.sample(step=1, version=1)
    assert admitted == [True]
    assert len(batch) == 4 and len(client.asked) == 2


def test_closing_cancels_what_is_sampled_ahead() -> None:
    class EndlessClient(ScriptedClient):
        async def group(self, prompt: Prompt, settings: dict[str, Any]) -> list[Completion]:
            if len(self.asked) == 2:  # those of the first step are answered
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(prompt.id)
            return await super().group(prompt, settings)

    ended: list[str] = []
    config = two_prompt_config()
    config.rollout.max_staleness = 1
    with sampler_of(config, EndlessClient({}), score_exactly, PROMPTS) as sampler:
        sampler.sample(step=1, version=1)
        sampler.close()
        assert len(ended) == 2


def sample_stages(
    stages: dict[int, StageConfig],
) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    """Sample steps 1 to 5; return settings and id of each prompt, and the sampler's last state."""
    config = two_prompt_config()
    config.rollout.stages = stages
    client = ScriptedClient({prompt.id: ["yes"] * 2 for prompt in PROMPTS})
    with sampler_of(config, client, score_exactly, PROMPTS) as sampler:
        for step in range(1, 6):
            sampler.sample(step, version=1)
        return client.settings, client.asked, sampler.state()


def test_stages_change_the_size_of_samples_and_not_the_order_of_prompts() -> None:
    settings, asked, state = sample_stages({3: StageConfig(8, 4), 4: StageConfig(16, 3)})
    sizes = [(each["max_completion_length"], each["completions_per_prompt"]) for each in settings]
    assert sizes[::2] == sizes[1::2] == [(4, 2), (4, 2), (8, 4), (16, 3), (16, 3)]
    _, asked_without, state_without = sample_stages({})
    assert (asked, state) == (asked_without, state_without)


def test_lags_count_from_the_version_that_is_trained_against() -> None:
    prompt = PROMPTS[0]
    completions = [
        Completion([50, 51, 52], [-1.0] * 3, "", False, [3, 3, 5]),
        Completion([50], [-1.0], "", False, [4]),
    ]
    batch = pack([RolloutGroup(prompt, completions, [0.0, 1.0])], version=6)
    assert batch.token_staleness is not None and batch.token_staleness.dtype == torch.int32
    assert batch.token_staleness[batch.loss_mask].tolist() == [3, 3, 1, 2]
    assert not batch.token_staleness[~batch.loss_mask].any()


def test_a_batch_has_the_means_of_groups_only_where_an_objective_reads_them() -> None:
    completions = [Completion([5] * n, [-1.0] * n, "", False, [1] * n) for n in (1, 2)]
    groups = [
        RolloutGroup(Prompt("", "", "", [4]), completions, each)
        for each in ([0.0, 1.0], [3.0, 3.0])
    ]
    means = pack(groups, has_group_means=True).group_means
    assert means is not None
    assert means.tolist() == [0, 0.5, 0, 0, 0.5, 0, 3, 0, 0, 3]
    assert pack(groups).group_means is None


SEQUENCES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=8)


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_a_ragged_batch_has_the_sequences_of_padded_rows(
    sizes: list[tuple[int, int]], random: Any
) -> None:
    """Packing, choosing and splitting sequences is what it is for rows [batch, time]."""
    groups = []
    for prompt, sampled in sizes:
        tokens = [random.randrange(2, 99) for _ in range(prompt + sampled)]
        logprobs = [-random.random() for _ in range(sampled)]
        completion = Completion(tokens[prompt:], logprobs, "", False, [3] * sampled)
        groups.append(RolloutGroup(Prompt("", "", "", tokens[:prompt]), [completion], [1.0]))
    batch = pack(groups, [[float(number)] for number in range(len(groups))], version=5)
    rows: dict[str, list[list[Any]]] = {
        "tokens": [group.prompt.token_ids + group.completions[0].token_ids for group in groups],
        "loss_mask": [[False] * prompt + [True] * sampled for prompt, sampled in sizes],
        "behaviour_logprobs": [
            [0.0] * len(group.prompt.token_ids) + group.completions[0].behaviour_logprobs
            for group in groups
        ],
        "rewards": [[0.0] * (prompt + sampled - 1) + [1.0] for prompt, sampled in sizes],
        "advantages": [
            [0.0] * prompt + [float(number)] * sampled
            for number, (prompt, sampled) in enumerate(sizes)
        ],
        "token_staleness": [[0] * prompt + [2] * sampled for prompt, sampled in sizes],
    }

    def check(part: TrainBatch, numbers: Sequence[int]) -> None:
        assert len(part) == len(numbers)
        assert part.lengths.tolist() == [sum(sizes[number]) for number in numbers]
        for name, values in rows.items():
            expected = [value for number in numbers for value in values[number]]
            assert getattr(part, name).tolist() == pytest.approx(expected, rel=1e-6)
        assert part.values is None

    check(batch, range(len(sizes)))
    chosen = random.sample(range(len(sizes)), random.randrange(len(sizes) + 1))
    check(batch.select(chosen), chosen)
    parts = random.randrange(1, len(sizes) + 1)
    bounds = [number * len(sizes) // parts for number in range(parts + 1)]
    for part, (first, after) in zip(batch.split(parts), pairwise(bounds), strict=True):
        check(part, range(first, after))


def test_experts_that_were_recorded_lie_beside_the_tokens_they_read() -> None:
    """Two layers, one expert each; the last token of a sequence was read by no pass."""
    prompt = Prompt("a", "", "", [5, 6])
    completions = [
        Completion([7] * length, [-1.0] * length, "", False, [1] * length, experts)
        for length in (1, 2)
        for experts in [torch.arange(2 * (length + 1), dtype=torch.int16).view(-1, 2, 1)]
    ]
    batch = pack([RolloutGroup(prompt, completions, [0.0, 1.0])])
    assert batch.routed_experts is not None and batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts.view(-1, 2).tolist() == [
        *([0, 1], [2, 3], [-1, -1]),
        *([0, 1], [2, 3], [4, 5], [-1, -1]),
    ]
    second = batch.select([1]).routed_experts
    assert second is not None and torch.equal(second, batch.routed_experts[3:])
    unknown = [completions[0], dataclasses.replace(completions[1], routed_experts=None)]
    assert pack([RolloutGroup(prompt, unknown, [0.0, 1.0])]).routed_experts is None
