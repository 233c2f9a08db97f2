"""The batch of a step: its groups, and the rewards and advantages of their completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Completion, Prompt, TrainBatch
from qurl_megatron.config.schema import Config, StageConfig
from qurl_megatron.data import rewards
from qurl_megatron.loop.sampling import Sampler, SampleSummary

PROMPTS = [Prompt(f"{n}", f"question {n}", "yes", [10 + n]) for n in range(12)]


@pytest.fixture(autouse=True, scope="module")
def single_rank() -> Iterator[None]:
    """Make this process the only learner rank."""
    device.initialize_distributed()
    yield
    dist.destroy_process_group()


@dataclasses.dataclass
class ScriptedClient:
    """A rollout client that answers from a script and records what it is asked."""

    texts: dict[str, list[str]]  # prompt id -> text of each completion
    rounds: list[list[str]] = dataclasses.field(default_factory=list)  # prompt ids of each call
    settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def generate(self, prompts: list[Prompt], **settings: Any) -> list[list[Completion]]:
        """Return completions of 3, 4, ... tokens; both say "no" where the script has no texts."""
        self.rounds.append([prompt.id for prompt in prompts])
        self.settings.append(settings)
        return [
            [
                Completion([50] * length, [-1.0] * length, text, False, 1)
                for length, text in enumerate(self.texts.get(prompt.id, ["no", "no"]), start=3)
            ]
            for prompt in prompts
        ]


class Tokenizer:
    pad_token_id = 0
    eos_token_id = 1


def make_sampler(
    config: Config, client: ScriptedClient, prompts: list[Prompt] = PROMPTS
) -> Sampler:
    return Sampler(config, client, prompts, Tokenizer())  # type: ignore[arg-type]  # stand-ins


def two_prompt_config() -> Config:
    config = Config(reward="exact")
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 2, 2
    config.rollout.max_response_length = 4
    return config


def sample_step(
    tries: int, texts: dict[str, list[str]], soft_tokens: int = 0
) -> tuple[TrainBatch, SampleSummary, list[list[str]]]:
    """Sample one step of two prompts; return batch, summary, and the prompt ids of each round."""
    config = two_prompt_config()
    config.rollout.dynamic_sampling_tries = tries
    config.rollout.soft_overlong_tokens = soft_tokens
    client = ScriptedClient(texts)
    batch, summary = make_sampler(config, client).sample(step=1)
    return batch, summary, client.rounds


def advantage_signs(batch: TrainBatch) -> list[float]:
    assert batch.advantages is not None
    return torch.sign(batch.advantages.sum(1)).tolist()


def test_without_dynamic_sampling_zero_variance_groups_stay_in_the_batch() -> None:
    batch, summary, rounds = sample_step(0, {})
    assert len(rounds) == 1 and summary.groups_replaced == 0
    assert summary.equal_reward_fraction == 1 and summary.reward_counts == [(0.0, 4)]
    assert advantage_signs(batch) == [0, 0, 0, 0]


def test_batch_of_ppo_has_rewards_and_no_advantages_before_the_critic() -> None:
    config = two_prompt_config()
    config.advantage_estimator = "gae"
    client = ScriptedClient({prompt.id: ["yes", "no"] for prompt in PROMPTS})
    batch, _ = make_sampler(config, client).sample(step=1)
    assert batch.advantages is None
    assert batch.rewards.tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("tries", [1, 3])
def test_zero_variance_groups_are_replaced_at_most_as_often_as_configured(tries: int) -> None:
    _, _, [(first, second)] = sample_step(0, {})
    batch, summary, rounds = sample_step(tries, {first: ["yes", "no"]})
    assert rounds[0] == [first, second]
    assert [len(prompts) for prompts in rounds[1:]] == [1] * tries  # only the second is replaced
    assert summary.groups_replaced == tries
    assert len({prompt for prompts in rounds for prompt in prompts}) == 2 + tries
    (last,) = rounds[-1]
    assert batch.tokens[:, 0].tolist() == [10 + int(id_) for id_ in (first, first, last, last)]
    assert summary.reward_mean == pytest.approx(1 / (4 + 2 * tries))  # over all completions


def test_replacement_with_unequal_rewards_ends_dynamic_sampling() -> None:
    _, _, [(first, second)] = sample_step(0, {})
    _, _, rounds = sample_step(2, {first: ["yes", "no"]})
    third = rounds[1][0]
    batch, summary, rounds = sample_step(5, {first: ["yes", "no"], third: ["no", "yes"]})
    assert rounds == [[first, second], [third]] and summary.groups_replaced == 1
    assert summary.equal_reward_fraction == 0  # of the batch
    assert summary.reward_counts == [(0.0, 4), (1.0, 2)]  # of all that was sampled
    assert advantage_signs(batch) == [1, -1, -1, 1]


def test_length_penalty_lowers_advantages_and_not_the_reported_reward() -> None:
    right = {prompt.id: ["yes", "yes"] for prompt in PROMPTS}  # of 3 and of 4 tokens
    batch, summary, _ = sample_step(0, right, soft_tokens=2)
    assert summary.reward_mean == 1
    assert advantage_signs(batch) == [1, -1, 1, -1]


def test_verifier_that_times_out_or_crashes_costs_its_completion_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, wrong = "\\boxed{42}", "\\boxed{41}"
    too_slow, too_deep = "\\boxed{9^{9^{9^9}}}", "9" * 100_000
    prompt = Prompt("0", "question", "42", [10])
    rewards.score("math", right, prompt)  # imports math-verify
    monkeypatch.setattr(rewards, "score", partial(rewards.score, timeout_s=0.3))
    config = Config(reward="math")
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 1, 4
    client = ScriptedClient({"0": [right, too_slow, too_deep, wrong]})
    batch, summary = make_sampler(config, client, [prompt]).sample(step=1)
    assert summary.verifier_failures == 2
    assert summary.reward_mean == 1 / 4
    assert advantage_signs(batch) == [1, -1, -1, -1]


def sample_stages(
    stages: dict[int, StageConfig],
) -> tuple[list[dict[str, Any]], list[list[str]], dict[str, Any]]:
    """Sample steps 1 to 5; return settings and prompt ids of each, and the sampler's last state."""
    config = two_prompt_config()
    config.rollout.stages = stages
    client = ScriptedClient({prompt.id: ["yes"] * 2 for prompt in PROMPTS})
    sampler = make_sampler(config, client)
    for step in range(1, 6):
        sampler.sample(step)
    return client.settings, client.rounds, sampler.state()


def test_stages_change_the_size_of_samples_and_not_the_order_of_prompts() -> None:
    settings, rounds, state = sample_stages({3: StageConfig(8, 4), 4: StageConfig(16, 3)})
    sizes = [(step["max_response_length"], step["completions_per_prompt"]) for step in settings]
    assert sizes == [(4, 2), (4, 2), (8, 4), (16, 3), (16, 3)]
    _, rounds_without, state_without = sample_stages({})
    assert (rounds, state) == (rounds_without, state_without)
