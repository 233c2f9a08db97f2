"""Episodes of several turns as training data: which tokens are trained on, and with what."""

import dataclasses
import types
from random import Random
from typing import Any, get_args

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qurl_megatron.algorithm.batch import (
    Completion,
    Episode,
    Prompt,
    RolloutGroup,
    SamplingMasks,
    TurnTokens,
    pack,
)
from qurl_megatron.algorithm.objective import PolicyLoss, token_weights
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Objective, ObjectiveConfig, RolloutConfig
from qurl_megatron.extensions.agents.client import AgentClient
from qurl_megatron.extensions.agents.episodes import describe
from qurl_megatron.loop.sampling import _penalize_length, _summarize, make_samples

PROMPT = Prompt("0", "question", "answer", [90, 91, 92])


def sequence(random: Random, spans: list[tuple[int, int]], **episode: Any) -> Completion:
    """Return a sequence that samples and then observes as many tokens as each span says."""
    sampled: list[bool] = []
    for number, (acted, observed) in enumerate(spans):
        sampled += [True] * acted + [False] * (observed if number < len(spans) - 1 else 0)
    count = sum(sampled)
    prompt = [random.randrange(90) for _ in range(random.randrange(1, 5))]
    return Completion(
        [random.randrange(90) for _ in sampled],
        [-random.random() for _ in range(count)],
        "",
        False,
        sorted(random.randrange(3, 6) for _ in range(count)),
        episode=Episode(prompt, sampled, **episode),
    )


SPANS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)


@given(st.lists(st.lists(SPANS, min_size=1, max_size=3), min_size=1, max_size=4), st.randoms())
def test_a_batch_has_every_branch_with_its_own_prompt_and_trains_on_sampled_tokens_only(
    episodes: list[list[list[tuple[int, int]]]], random: Random
) -> None:
    completions = []
    for branches in episodes:
        *others, last = [sequence(random, spans) for spans in branches]
        assert last.episode is not None
        completions.append(
            dataclasses.replace(last, episode=dataclasses.replace(last.episode, branches=others))
        )
    rewards = [float(number) for number in range(len(completions))]
    advantages = [-1.0 - reward for reward in rewards]
    batch = pack([RolloutGroup(PROMPT, completions, rewards)], [advantages], version=7)
    assert batch.behaviour_logprobs is not None and batch.token_staleness is not None
    assert batch.rewards is not None and batch.advantages is not None
    rows = [(each, number) for number, c in enumerate(completions) for each in c.sequences()]
    assert len(batch) == len(rows) == sum(map(len, episodes))
    for number, (each, of_episode) in enumerate(rows):
        assert each.episode is not None
        part, before = batch.select([number]), len(each.episode.prompt_ids)
        assert part.tokens.tolist() == each.episode.prompt_ids + each.token_ids
        mask = part.loss_mask
        assert mask.tolist() == [False] * before + each.episode.sampled
        for values, expected in (
            (part.behaviour_logprobs, torch.tensor(each.behaviour_logprobs)),
            (part.token_staleness, 7 - torch.tensor(each.token_versions)),
            (part.advantages, torch.tensor(advantages[of_episode])),
        ):
            assert isinstance(values, Tensor)
            assert torch.equal(values[mask], expected.to(values.dtype).expand(int(mask.sum())))
            assert not values[~mask].any()
        assert part.rewards is not None
        assert part.rewards.tolist() == [0.0] * (len(part.tokens) - 1) + [rewards[of_episode]]


class Letters:
    """A tokenizer with a token for each letter, or for two."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("ab" if token == 0 else chr(96 + token) for token in ids)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
)
def test_a_turn_ends_with_the_token_that_completes_a_text(ids: list[int], stops: list[str]) -> None:
    count = len(ids)
    masks = SamplingMasks(torch.arange(count, dtype=torch.int32) + 1, torch.arange(99).int())
    turn = Completion(
        ids,
        [-float(number) for number in range(count)],
        "",
        True,
        list(range(count)),
        torch.arange(5 + count - 1)[:, None, None].to(torch.int16),
        masks,
    )
    client: Any = types.SimpleNamespace(_tokenizer=Letters())
    ended = AgentClient.until(client, turn, stops, context=5)
    texts = [Letters().decode(ids[:length], True) for length in range(1, count + 1)]
    lengths = [n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)]
    if not lengths:
        assert ended is turn
        return
    length = lengths[0]
    assert (ended.token_ids, ended.text) == (ids[:length], texts[length - 1])
    assert ended.behaviour_logprobs == turn.behaviour_logprobs[:length] and not ended.truncated
    assert ended.token_versions == list(range(length))
    assert ended.routed_experts is not None and len(ended.routed_experts) == 5 + length - 1
    assert ended.sampling_masks is not None
    assert len(ended.sampling_masks.sizes) == length
    assert len(ended.sampling_masks.token_ids) == int(ended.sampling_masks.sizes.sum())


@given(
    st.lists(st.lists(SPANS, min_size=1, max_size=3), min_size=2, max_size=6),
    st.integers(1, 3),
    st.randoms(),
)
def test_an_episode_counts_once_however_many_branches_it_has(
    episodes: list[list[list[tuple[int, int]]]], parts: int, random: Random
) -> None:
    completions = []
    for branches in episodes:
        *others, last = [sequence(random, spans) for spans in branches]
        assert last.episode is not None
        completions.append(
            dataclasses.replace(last, episode=dataclasses.replace(last.episode, branches=others))
        )
    number = len(completions)
    mean = (number - 1) / 2
    advantages = [each - mean for each in range(number)]
    batch = pack([RolloutGroup(PROMPT, completions, [0.0] * number)], [advantages])

    assert batch.advantages is not None and batch.completions is not None
    weights = token_weights(batch, "sequence_mean")
    assert abs(float((weights * batch.advantages).sum())) < 1e-5
    of_tokens = batch.completions.repeat_interleave(batch.lengths)
    totals = torch.zeros(number).index_add(0, of_tokens, weights)
    torch.testing.assert_close(totals, torch.full((number,), 1 / number))
    cut = [dataclasses.replace(completions[0], truncated=True), *completions[1:]]
    group = RolloutGroup(PROMPT, cut, [0.0] * number)
    left_out = pack([group], leaves_out_truncated=True).left_out
    assert left_out is not None and torch.equal(left_out, of_tokens == 0)
    # No episode is in two minibatches.
    minibatches = [each for each in batch.split(parts) if len(each)]
    of_parts = [
        set(each.completions.tolist()) for each in minibatches if each.completions is not None
    ]
    assert sum(map(len, of_parts)) == number and sum(map(len, minibatches)) == len(batch)
    for part, own in zip(minibatches, of_parts, strict=True):
        values = token_weights(part, "sequence_mean")[part.loss_mask].unique()  # type: ignore[no-untyped-call]
        assert len(values) <= len(own)


@given(SPANS, st.randoms(), st.sampled_from(get_args(Objective)))
def test_what_lies_at_observed_tokens_reaches_neither_loss_nor_gradient(
    spans: list[tuple[int, int]], random: Random, objective: Any
) -> None:
    """Bit for bit, even NaN: the objective of an episode is that of its sampled tokens alone."""
    group = RolloutGroup(PROMPT, [sequence(random, spans)], [1.0])
    batch = pack([group], [[0.7]], version=7)
    weights = token_weights(batch, "token_mean")
    current = -torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(1))
    loss = PolicyLoss(ObjectiveConfig(objective=objective), by_staleness=True)

    def gradient(polluted: bool, alone: bool) -> tuple[Tensor, Tensor]:
        part = batch.map(lambda tensor: tensor[batch.loss_mask]) if alone else batch
        kept = batch.loss_mask if alone else torch.ones_like(batch.loss_mask)
        logprobs = current[kept].clone().requires_grad_()
        assert part.behaviour_logprobs is not None and part.advantages is not None
        if polluted:
            nan = torch.tensor(float("nan"))
            part = dataclasses.replace(
                part,
                behaviour_logprobs=torch.where(part.loss_mask, part.behaviour_logprobs, nan),
                advantages=torch.where(part.loss_mask, part.advantages, nan),
            )
        part = dataclasses.replace(part, proximal_logprobs=None)
        value, _ = loss(
            logprobs,
            torch.zeros(len(logprobs)),
            part,
            weights[kept],
            lambda log_rho: torch.full_like(log_rho, float(log_rho.double().sum())),  # its one
        )
        value.backward()
        assert logprobs.grad is not None
        return value.detach(), logprobs.grad

    (plain, of_plain), (dirty, of_dirty) = gradient(False, False), gradient(True, False)
    assert torch.equal(plain, dirty) and torch.equal(of_plain, of_dirty)
    assert not of_plain[~batch.loss_mask].any()
    assert of_plain[batch.loss_mask].count_nonzero() > 0 or objective == "naive"
    _, of_sampled = gradient(False, True)
    assert torch.equal(of_plain[batch.loss_mask], of_sampled)


def episode_of(*turns: TurnTokens, end: str = "answered", **fields: Any) -> Completion:
    made = sequence(Random(1), [(turn.length, 2) for turn in turns], end=end, turns=list(turns))
    return dataclasses.replace(made, **fields)


def test_the_penalty_for_length_is_that_of_the_longest_turn() -> None:
    rollout = RolloutConfig(max_completion_length=8, soft_overlong_tokens=4)
    short = episode_of(*[TurnTokens(4, 5, 0)] * 5)  # 20 sampled tokens in all
    long = episode_of(TurnTokens(2, 5, 0), TurnTokens(7, 9, 0))
    group = RolloutGroup(PROMPT, [short, long], [1.0, 1.0])
    assert _penalize_length(group, rollout).rewards == [1.0, 1.0 - 3 / 4]


def test_metrics_count_sampled_and_observed_tokens_turns_ends_and_failures() -> None:
    failure = Score(0.0, {}, "took too long")
    failed = episode_of(TurnTokens(1, 1, 0), end="deadline", score=failure)
    completions = [
        episode_of(TurnTokens(3, 4, 0), TurnTokens(2, 9, 7)),  # two observed between
        episode_of(TurnTokens(5, 4, 0), end="turns", truncated=True),
    ]
    scores = [Score(value, {}, "") for value in (1.0, 0.0)]
    group = RolloutGroup(PROMPT, completions, [1.0, 0.0], scores, failed=[failed])
    summary = _summarize([group], [group], pack([group], version=7))
    client: Any = types.SimpleNamespace()
    summary |= AgentClient.metrics(client, [group])
    assert summary["completion_length_mean"] == summary["sampled_tokens"] / 2 == 5
    assert summary["observed_length_mean"] == 1 and summary["turns_mean"] == 1.5
    assert summary["branches_mean"] == 1 and summary["completion_truncated_fraction"] == 0.5
    assert summary["episode_ends"] == {
        "answered": 1, "turns": 1, "tokens": 0, "deadline": 1, "error": 0,
    }  # fmt: skip
    assert (summary["episodes_failed"], summary["episode_failure"]) == (1, "took too long")
    assert summary["prefix_cached_by_turn"] == {"1": 0, "2": 7 / 9}
    assert summary["reward_mean"] == 0.5


def test_a_sample_shows_which_tokens_were_read() -> None:
    completion = episode_of(TurnTokens(2, 4, 0), TurnTokens(1, 8, 6))
    group = RolloutGroup(PROMPT, [completion], [1.0], [Score(1.0, {}, "")])
    batch = pack([group])
    assert batch.behaviour_logprobs is not None

    class Tokenizer:
        def batch_decode(self, batch: list[list[int]]) -> list[str]:
            return [str(token) for (token,) in batch]

    (sample,) = make_samples(
        1, [group], [batch.behaviour_logprobs + batch.loss_mask], Tokenizer(), 1
    )
    assert sample.ratios == [2.718, 2.718, None, None, 2.718]
    assert sample.tokens == [str(token) for token in completion.token_ids]
    assert sample.end == "answered"


def test_an_episode_is_described_token_by_token() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(f"<{token}>" for token in ids)

    first = Completion([7], [-0.5], "", False, [1], episode=Episode([5], [True]))
    turns = [TurnTokens(1, 1, 0), TurnTokens(2, 2, 1), TurnTokens(1, 4, 3), TurnTokens(1, 7, 6)]
    score = Score(0.5, {"guesses": 3.0}, "")
    episode = Episode([5, 6], [True, True, True, False, False, True], "answered", turns)
    last = Completion(
        [8, 9, 8, 30, 31, 9],
        [-1.0, -2.0, -3.0, -4.0],
        "",
        False,
        [1] * 4,
        score=score,
        episode=dataclasses.replace(episode, branches=[first]),
    )
    assert list(describe(3, PROMPT, last, Tokenizer())) == [
        "episode 3: answered after 4 turns, reward 0.5, guesses 3",
        "  question: 'question'",
        "  prompt    1 tokens: '<5>'",
        "  sampled   1 tokens: '<7>'",
        "            0 of 1 tokens before it were cached; log-probs:",
        "            '<7>' -0.500",
        "  branch 1: another history",
        "  prompt    2 tokens: '<5><6>'",
        "  sampled   2 tokens: '<8><9>'",
        "            1 of 2 tokens before it were cached; log-probs:",
        "            '<8>' -1.000  '<9>' -2.000",
        "  sampled   1 tokens: '<8>'",
        "            3 of 4 tokens before it were cached; log-probs:",
        "            '<8>' -3.000",
        "  observed  2 tokens: '<30><31>'",
        "  sampled   1 tokens: '<9>'",
        "            6 of 7 tokens before it were cached; log-probs:",
        "            '<9>' -4.000",
    ]
