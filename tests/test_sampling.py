"""A step's batch: which groups are in it, and what their completions are worth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from distributed import run_ranks
from qurl_megatron.algorithm.batch import Completion, Prompt, TrainBatch
from qurl_megatron.config.schema import Config, StageConfig
from qurl_megatron.loop.sampling import SampleSummary

PROMPTS = [Prompt(f"{n}", f"question {n}", "yes", [10 + n]) for n in range(12)]


@dataclasses.dataclass
class Scripted:
    """Answers a prompt as a script says, and notes what it was asked."""

    texts: dict[str, list[str]]  # by prompt, the text of each completion
    asked: list[list[str]] = dataclasses.field(default_factory=list)
    settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def generate(self, prompts: list[Prompt], **settings: Any) -> list[list[Completion]]:
        self.asked.append([prompt.id for prompt in prompts])
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


def sample(tries: int, texts: dict[str, list[str]], soft_tokens: int = 0) -> Any:
    """One step of two prompts: the batch, its summary, and the prompts asked in each round."""
    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.loop.sampling import Sampler

    device.initialize_distributed()
    config = Config(reward="exact")
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 2, 2
    config.rollout.max_response_length = 4
    config.rollout.dynamic_sampling_tries = tries
    config.rollout.soft_overlong_tokens = soft_tokens
    client = Scripted(texts)
    sampler = Sampler(config, client, PROMPTS, Tokenizer())  # type: ignore[arg-type]
    batch, summary = sampler.sample(step=1)
    dist.destroy_process_group()
    return batch, summary, client.asked


def run(*args: Any) -> tuple[TrainBatch, SampleSummary, list[list[str]]]:
    return run_ranks(sample, 1, *args)[0]


def test_without_dynamic_sampling_the_first_prompts_are_the_batch() -> None:
    batch, summary, asked = run(0, {})
    assert len(asked) == 1 and summary.groups_replaced == 0
    assert not batch.advantages.any()


@pytest.mark.parametrize("tries", [1, 3])
def test_groups_of_equal_rewards_are_replaced_a_bounded_number_of_times(tries: int) -> None:
    _, _, [(first, second)] = run(0, {})
    batch, summary, asked = run(tries, {first: ["yes", "no"]})
    assert asked[0] == [first, second]
    assert [len(prompts) for prompts in asked[1:]] == [1] * tries  # only in place of the second
    assert summary.groups_replaced == tries
    assert len({prompt for prompts in asked for prompt in prompts}) == 2 + tries
    assert batch.tokens[:, 0].tolist() == [10 + int(p) for p in (first, first, asked[-1][0])] + [
        10 + int(asked[-1][0])
    ]
    assert summary.reward_mean == pytest.approx(1 / (4 + 2 * tries))  # of all that was sampled


def test_a_replacement_that_teaches_ends_the_tries() -> None:
    _, _, [(first, second)] = run(0, {})
    _, _, asked = run(2, {first: ["yes", "no"]})
    third = asked[1][0]
    batch, summary, asked = run(5, {first: ["yes", "no"], third: ["no", "yes"]})
    assert asked == [[first, second], [third]] and summary.groups_replaced == 1
    signs = torch.sign(batch.advantages.sum(1)).tolist()
    assert signs == [1, -1, -1, 1]


def test_length_costs_advantage_and_not_the_reward_that_is_reported() -> None:
    _, _, [(first, second)] = run(0, {})
    right = {first: ["yes", "yes"], second: ["yes", "yes"]}  # of 3 and of 4 tokens
    batch, summary, _ = run(0, right, 2)
    assert summary.reward_mean == 1
    assert torch.sign(batch.advantages.sum(1)).tolist() == [1, -1, 1, -1]


def sample_mathematics(texts: list[str]) -> Any:
    """One step of one prompt whose completions say `texts`, verified as mathematics."""
    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.loop.sampling import Sampler

    device.initialize_distributed()
    config = Config(reward="math")
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 1, len(texts)
    prompt = Prompt("0", "question", "42", [10])
    client = Scripted({"0": texts})
    sampled = Sampler(config, client, [prompt], Tokenizer()).sample(step=1)  # type: ignore[arg-type]
    dist.destroy_process_group()
    return sampled


def test_verifier_that_times_out_or_crashes_costs_its_completion_and_not_the_run() -> None:
    right, wrong = "\\boxed{42}", "\\boxed{41}"
    too_slow, too_deep = "\\boxed{9^{9^{9^9}}}", "9" * 100_000
    batch, summary = run_ranks(sample_mathematics, 1, [right, too_slow, too_deep, wrong])[0]
    assert summary.verifier_failures == 2
    assert summary.reward_mean == 1 / 4
    assert torch.sign(batch.advantages.sum(1)).tolist() == [1, -1, -1, -1]


def sample_steps(stages: dict[int, StageConfig], steps: list[int]) -> Any:
    """Of each step the settings it was sampled with, its prompts, and the rows of its batch."""
    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.loop.sampling import Sampler

    device.initialize_distributed()
    config = Config(reward="exact")
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 2, 2
    config.rollout.max_response_length, config.rollout.stages = 4, stages
    client = Scripted({prompt.id: ["yes"] * 2 for prompt in PROMPTS})
    sampler = Sampler(config, client, PROMPTS, Tokenizer())  # type: ignore[arg-type]
    for step in steps:
        sampler.sample(step)
    dist.destroy_process_group()
    return client.settings, client.asked, sampler.state()


def test_stages_change_how_much_is_sampled_and_not_from_where() -> None:
    stages = {3: StageConfig(8, 4), 4: StageConfig(16, 3)}
    steps = [1, 2, 3, 4, 5]
    settings, asked, state = run_ranks(sample_steps, 1, stages, steps)[0]
    asked_for = [(one["max_response_length"], one["completions_per_prompt"]) for one in settings]
    assert asked_for == [(4, 2), (4, 2), (8, 4), (16, 3), (16, 3)]
    _, without, state_without = run_ranks(sample_steps, 1, {}, steps)[0]
    assert (asked, state) == (without, state_without)
