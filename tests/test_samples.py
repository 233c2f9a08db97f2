"""Completions kept to be read: which are chosen, what is stored, and how they are shown."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distributed import run_ranks
from logs import Page, run_log, write, write_run
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import Config
from qurl_megatron.loop.sampling import make_samples
from qurl_megatron.report.metrics import (
    KINDS,
    SHOWN_CHARACTERS,
    SHOWN_TOKENS,
    Evaluation,
    Sample,
)
from qurl_megatron.report.record import RunRecord, read_run
from qurl_megatron.report.run_log import COLUMNS, markdown_table
from samplers import sampler_of
from tiny import build_tiny_model

HOSTILE = "</pre><script src='https://example.com/x.js'></script><img src=x onerror=y>&\u202e\x00|*"


class Tokenizer:
    """A tokenizer whose tokens are the letters of the alphabet."""

    def batch_decode(self, batch: list[list[int]]) -> list[str]:
        return ["".join(chr(97 + token % 26) for token in tokens) for tokens in batch]


def group(name: str, rewards: list[float], truncated: tuple[int, ...] = ()) -> RolloutGroup:
    """Return a group of completions of 2, 3, ... tokens, of which some are cut off."""
    texts = [f"{name}{index}" for index in range(len(rewards))]
    made = [
        Completion(
            list(range(index + 2)),
            [-1.0] * (index + 2),
            text,
            index in truncated,
            [3] * (index + 2),
        )
        for index, text in enumerate(texts)
    ]
    scores = [Score(reward, {"format": reward}, failure="") for reward in rewards]
    return RolloutGroup(Prompt(name, f"question {name}", "", [7, 8]), made, rewards, scores)


def pick(groups: list[RolloutGroup], count: int = 4, **ratios: float) -> list[Sample]:
    """Choose completions; `r3_1` is the ratio of row 3 at completion token 1, 1 elsewhere."""
    completions = [completion for group in groups for completion in group.completions]
    log_ratios = [torch.zeros(len(completion.token_ids)) for completion in completions]
    for name, ratio in ratios.items():
        row, token = map(int, name[1:].split("_"))
        log_ratios[row][token] = math.log(ratio)
    proximal = [torch.cat([torch.zeros(2), each - 1]) for each in log_ratios]
    return make_samples(5, groups, proximal, Tokenizer(), count)


GROUPS = [group("a", [0, 0, 0]), group("b", [0, 1, -1], (0, 1)), group("c", [1, 0, 0.5])]


def test_one_completion_of_each_kind_is_chosen() -> None:
    samples = pick(GROUPS, r2_1=1.1, r6_0=0.25)
    assert [(sample.kind, sample.text) for sample in samples] == [
        ("highest reward", "b1"),
        ("lowest reward", "b2"),  # of the same prompt, whose rewards differ most
        ("cut off", "b0"),
        ("largest ratio", "c0"),  # 1/4 is further from 1 than 1.1
    ]
    best = samples[0]
    assert (best.step, best.prompt, best.reward, best.length) == (5, "question b", 1, 3)
    assert best.truncated and best.weight_versions == [3] and best.parts == {"format": 1}
    assert best.tokens == ["a", "b", "c"] and best.ratios == [1, 1, 1]
    assert samples[3].ratios == [0.25, 1]


def test_no_completion_is_chosen_twice_and_never_more_than_asked_for() -> None:
    for count in range(12):
        chosen = [sample.text for sample in pick(GROUPS, count)]
        assert len(chosen) == len(set(chosen)) == min(count, 9)
    assert pick(GROUPS, 6) == [*pick(GROUPS, 6)]  # the same each time


def test_without_cut_off_completions_the_other_kinds_fill_the_number() -> None:
    kinds = [sample.kind for sample in pick([group("a", [0, 1, 0, 0]), group("c", [1, 0])], 4)]
    assert kinds == ["highest reward", "lowest reward", "largest ratio", "highest reward"]


def test_a_long_completion_is_stored_without_its_middle() -> None:
    length = 10 * SHOWN_TOKENS
    text = "x" * 50_000
    long = Completion(list(range(length)), [-1.0] * length, text, True, [1] * length)
    prompt = Prompt("p", "q" * 50_000, "", [1, 2])
    groups = [RolloutGroup(prompt, [long], [0.0], [Score(0.0, {}, failure="")])]
    ratios = {"r0_0": 2.0, f"r0_{SHOWN_TOKENS}": 3.0, f"r0_{length - 1}": 0.5}
    (sample,) = pick(groups, 4, **ratios)
    assert sample.length == length
    assert len(sample.tokens) == len(sample.ratios) == SHOWN_TOKENS
    assert sample.ratios[0] == 2 and sample.ratios[-1] == 0.5 and 3.0 not in sample.ratios
    assert "45904 characters left out" in sample.text
    assert len(sample.text) < SHOWN_CHARACTERS + 50 and len(sample.prompt) < SHOWN_CHARACTERS + 50


def sample_of(step: int, kind: str = "cut off", **fields: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt": HOSTILE,
        "text": HOSTILE,
        "reward": -0.5,
        "parts": {"for<mat": 1.0},
        "length": 3,
        "truncated": True,
        "weight_versions": [4, 5],
        "tokens": [HOSTILE, " b", "c"],
        "ratios": [1.01, 1.5, 0.25],
    }
    return Sample(step=step, kind=kind, **(values | fields))


def test_samples_after_the_checkpoint_are_dropped_and_tables_are_in_tensorboard(
    tmp_path: Path,
) -> None:
    log = run_log(tmp_path)
    log.start(Evaluation())
    for step in (1, 2, 3):
        write(log, step)
        log.write_samples([sample_of(step), sample_of(step, "largest ratio")])
    log.close()
    log = run_log(tmp_path)
    log.resume(2, time_s=0.0, before=Evaluation())
    log.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").open()]
    assert steps == [1, 1, 2, 2]
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0}).Reload()
    (tag,) = events.Tags()["tensors"]
    assert tag == "samples/text_summary"
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert text.count("\n") == 3 and "cut off" in text and "<script" not in text
    rewards = events.Histograms("rewards")[0].histogram_value
    assert (rewards.num, rewards.min, rewards.max) == (4, 0, 1)


def test_samples_are_a_table_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # which the log sets
        monkeypatch.setenv(name, "")
    (run_dir := tmp_path / "run").mkdir()
    log = run_log(run_dir, wandb_project="project")
    log.start(Evaluation())
    write(log, 1)
    log.write_samples([sample_of(1)])
    log.close()
    (stored,) = run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(stored.read_text())
    assert table["columns"] == list(COLUMNS)
    assert table["data"][0][:4] == [1, "cut off", -0.5, 3]
    assert table["data"][0][-1] == HOSTILE
    assert list((tmp_path / "home").glob("**/*wandb*")) == []


def test_a_cell_of_a_markdown_table_has_no_mark_and_no_line_break() -> None:
    (_, _, line) = markdown_table([sample_of(1, text="a|b\n**c** `d` <e> $f$")]).splitlines()
    cells = line.split(" | ")
    assert len(cells) == len(COLUMNS)
    assert html.unescape(cells[-1]).startswith("a|b<br>**c** `d` <e> $f$")
    assert not set("*`") & set(line) and "<e>" not in line


def section(samples: list[Sample]) -> str:
    """Return what a report shows of samples."""
    lines = [json.loads(json.dumps(vars(sample))) for sample in samples]
    record = RunRecord("a run", Config(), [], {}, {}, {}, lines)
    return str(needed("report", "page", by="this test").samples_section(record))


def test_text_of_a_model_cannot_become_part_of_the_page() -> None:
    page = Page(section([sample_of(1)]))
    assert page.tags == {
        "h2", "h3", "p", "span", "div", "section", "b", "details", "summary", "pre",
    }  # fmt: skip
    assert page.attributes == {"class", "style", "title", "dir"}
    assert "</pre><script src='https://example.com/x.js'>" in page.shown
    assert "\u202e" not in page.shown and "\x00" not in page.shown and "for<mat" in page.shown


def test_tokens_are_coloured_by_their_ratio() -> None:
    page = section([sample_of(1)])
    _, card = page.split('<section class="card">')
    spans = re.findall(
        r'<span style="background: rgba\(([^)]*)\)" title="([^"]*)">(.*?)</span>', card
    )
    assert spans == [("213, 94, 0, 0.53", "1.5", " b"), ("43, 140, 214, 0.80", "0.25", "c")]


def test_what_an_agent_read_is_grey_and_has_no_ratio() -> None:
    page = section([sample_of(1, ratios=[1.0, None, 1.5])])
    _, card = page.split('<section class="card">')
    assert '<span class="read"> b</span>' in card and card.count("title=") == 1
    assert "Grey tokens were read, not sampled" in page


def test_each_kind_shows_its_first_middle_and_last_completion() -> None:
    samples = [sample_of(step, kind) for step in range(1, 8) for kind in KINDS[:2]]
    page = section(samples + [sample_of(9, "cut off")])
    rows = page.split("<h3>")[1:]
    shown = [re.findall(r"<b>step (\d+),", row) for row in rows]
    assert shown == [["1", "4", "7"], ["1", "4", "7"], ["9"]]
    assert section([]) == ""


def test_a_run_without_samples_and_new_metrics_still_has_a_record(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    for line in lines:
        del line["equal_reward_fraction"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(run_dir)
    assert run.samples == [] and math.isnan(run.series("equal_reward_fraction")[0])


def test_a_series_is_of_a_metric_or_of_an_entry_of_one(tmp_path: Path) -> None:
    parts = [{"reward_parts": each} for each in ({"a.b": 2.0}, {}, None)]
    run = read_run(write_run(tmp_path / "run"))
    run.steps[:] = parts
    assert str(run.series("reward_parts.a.b")) == "[2.0, nan, nan]"
    for name in ("reward_parts.b", "rewards", "reward"):
        with pytest.raises(ValueError, match=f"^{name}: no step has this metric"):
            run.series(name)
    run.steps.clear()
    assert run.series("rewards") == []


def keep_of_shares(model: Path, parallel: dict[str, Any]) -> list[Sample]:
    """Pick samples of two minibatches whose proximal log-probs are (row + token) / 100 below."""
    from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
    from qurl_megatron.learner.learner import Learner

    config = LearnerConfig(dtype="float32", micro_batch_size=2, **parallel)
    learner = Learner(model, config, OptimizerConfig())
    groups = [group("a", [0, 1, 0.5]), group("b", [0, 0, 0])] if dist.get_rank() == 0 else []
    batch = pack(groups) if groups else TrainBatch.empty()
    shares = [learner.share(minibatch) for minibatch in batch.split(2)]
    for number, share in enumerate(shares):
        learner.score(share, ["proximal_logprobs"], temperature=1.0)
        for micro in share.micro_batches:
            rows = micro.rows
            if rows.proximal_logprobs is not None:
                assert rows.behaviour_logprobs is not None
                # The tokens of a completion are 0, 1, 2, ...; the second of b has the largest.
                rows.proximal_logprobs = rows.behaviour_logprobs + rows.tokens / (100 - number)
                rows.proximal_logprobs[~rows.loss_mask] = 9.0  # prompts do not count
    prompts = [group.prompt for group in groups]
    with sampler_of(Config(samples_per_step=4), None, None, prompts, Tokenizer()) as sampler:
        sampler._groups = groups
        samples = sampler.samples(5, shares)
    learner.close()
    return samples


@pytest.mark.parametrize(
    "parallel",
    [{"data_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"context_parallel_size": 2}],
    ids=lambda parallel: next(iter(parallel)),
)
def test_ratios_of_the_chosen_completions_come_from_the_ranks_that_have_them(
    parallel: dict[str, Any], tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path)
    samples, others = run_ranks(keep_of_shares, 2, model, parallel)
    assert others == []
    assert [(sample.kind, sample.text) for sample in samples] == [
        ("highest reward", "a1"),
        ("lowest reward", "a0"),
        ("largest ratio", "b2"),  # of the second minibatch, with the longest completions
        ("highest reward", "b0"),
    ]
    ratios = [[round(math.exp(token / 100), 3) for token in range(length)] for length in (3, 2)]
    assert [sample.ratios for sample in samples[:2]] == ratios
    assert samples[2].ratios == [round(math.exp(token / 99), 3) for token in range(4)]
