"""`qurl launch` of two quickstarts, one after the other: the first to its end, output and files."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import cos, pi
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reasoning_gym
from transformers import AutoModelForCausalLM

from e2e.running import SMALL, Command, Start, curve_steps
from qurl_megatron.config.text import load
from qurl_megatron.learner.checkpoint import read_state
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.report.run_log import evaluation_directory


@dataclass(frozen=True)
class Finished:
    """A finished run of two steps with shown answers, two data and evaluation files, two rewards,
    an entropy bonus, a schedule and a change of stage.

    It is the first of a sweep, which was told to end in its second run.
    """

    command: Command  # the sweep
    words: list[dict[str, Any]]  # the problems of the evaluation file, in order

    @property
    def run_dir(self) -> Path:
        return self.command.output.parent / "runs" / "sweep-2"

    @property
    def steps(self) -> list[dict[str, Any]]:
        return json_lines(self.run_dir / "metrics.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def answers(self, step: int, name: str) -> list[dict[str, Any]]:
        return json_lines(evaluation_directory(self.run_dir, step) / f"{name}.jsonl")


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    directory = tmp_path_factory.mktemp("quickstart")
    words = reasoning_gym.create_dataset(
        "spell_backward", size=16, seed=0, min_word_len=4, max_word_len=4
    )
    pq.write_table(pa.Table.from_pylist(list(words)), directory / "words.parquet")
    (directory / "own.py").write_text(
        "import functools\n"
        "from qurl_megatron.recipes import quickstart\n"
        "def build(directory, seed):\n"
        "    quickstart.build_model(directory, seed)\n"
        "    return functools.partial(quickstart.teach, accuracy=0.0)\n"
        "def brief(completion, problem):\n"
        "    return -len(completion)\n"
    )
    for seed, name in ((7, "more"), (8, "few")):
        own_words = reasoning_gym.create_dataset(
            "spell_backward", size=4, seed=seed, min_word_len=4, max_word_len=4
        )
        lines = "".join(json.dumps(word) + "\n" for word in own_words)
        (directory / f"{name}.jsonl").write_text(lines)
    own = directory / "own.yaml"
    own.write_text(
        f"""\
recipe: quickstart
data: [reasoning_gym:spell_backward, {directory / "more.jsonl"}]
prompts: {{weights: [1, 2], options.size: 2000}}
reward: [reasoning_gym, {directory / "own.py"}:brief]
scoring: {{weights: [1, 0.1], workers: 1}}
optimizer: {{schedule: cosine, learning_rate: 1e-5, warmup_steps: 0}}
objective.entropy_coefficient: 0.01
model_builder: {directory / "own.py"}:build
evaluation:
  problems: 32
  every_steps: 2
  data: {{words: {directory / "words.parquet"}, few: {directory / "few.jsonl"}}}
  k_of: {{words: 2}}
  reward_of: {{few: "{directory / "own.py"}:brief"}}
checkpoint.best_by: words
quantization.publish: delta
rollout.stages.2: {{max_completion_length: 10, completions_per_prompt: 6}}
"""
    )
    in_file = ("name=", "steps=", "model_builder=", "evaluation.")
    small = [word for word in SMALL if not word.startswith(in_file)]
    words_on_top = [*small, "name=sweep", "--sweep", "steps=2,100000"]
    command = Command(directory, "launch", own.name, *words_on_top)
    try:
        command.wait_for("run directory .*sweep-2")
        own.unlink()  # its runs have its fields
        command.wait_for("run directory .*sweep-100000")
        command.process.send_signal(signal.SIGTERM)
        command.exit_code()
        yield Finished(command, list(words))
    finally:
        command.end()


def test_a_sweep_runs_its_runs_in_order_and_ends_on_sigterm(finished: Finished) -> None:
    assert finished.command.exit_code() == 128 + signal.SIGTERM, finished.command.text()
    assert finished.summary["steps"] == 2
    second = finished.run_dir.with_name("sweep-100000")
    assert second.exists() and not (second / "summary.json").exists()


def test_no_process_survives_the_runs(finished: Finished) -> None:
    assert len(finished.command.started) >= 5
    assert finished.command.survivors() == []


def test_the_resolved_configuration_is_saved(finished: Finished) -> None:
    config = load(finished.run_dir / "config.yaml")
    assert config.rollout.stages[2].completions_per_prompt == 6
    assert [Path(file).name for file in config.recipe_file] == ["own.yaml"]


def test_every_step_has_every_metric_once(finished: Finished) -> None:
    assert [step["step"] for step in finished.steps] == [1, 2]
    assert [step["weight_version"] for step in finished.steps] == [2, 3]
    assert [step["held_out_accuracy"] is None for step in finished.steps] == [True, False]
    for step in finished.steps:
        assert step.keys() == {field.name for field in fields(StepMetrics)}


def test_the_metrics_are_in_the_range_of_int8_rollouts(finished: Finished) -> None:
    for step in finished.steps:
        assert 0 < step["logprob_abs_diff"] < 0.1
        assert 1e-6 < step["weight_quant_error"] < 1e-3
        # A delta is empty if no answer of the step was right.
        assert 0 <= step["publish_bytes"] < step["publish_full_bytes"] / 2
        assert step["publish_full_bytes"] > 1_000_000


def test_the_weighted_sum_of_the_rewards_is_trained_on_at_falling_rates(
    finished: Finished,
) -> None:
    for step in finished.steps:
        parts = step["reward_parts"]
        assert parts["brief"] < 0 and parts["accuracy"] == parts["reasoning_gym"]
        total = parts["reasoning_gym"] + 0.1 * parts["brief"]
        assert step["reward_mean"] == pytest.approx(total)
    rates = [step["learning_rate"] / 1e-5 for step in finished.steps]  # of the last of two updates
    assert rates == pytest.approx([(1 + cos(pi * part)) / 2 for part in (1 / 4, 3 / 4)])


def test_a_stage_changes_the_number_of_completions(finished: Finished) -> None:
    for step, completions in zip(finished.steps, (8 * 4, 8 * 6), strict=True):
        sampled_tokens = step["rollout_tokens_per_s"] * step["time_rollout_s"]
        assert round(sampled_tokens / step["completion_length_mean"], 6) == completions


def test_the_policy_is_evaluated_before_the_first_and_after_the_last_step(
    finished: Finished,
) -> None:
    assert finished.steps[0]["evaluation"] is None
    assert finished.summary["evaluation_after"] == finished.steps[1]["evaluation"]
    assert sorted(path.name for path in (finished.run_dir / "evaluation").iterdir()) == [
        "step_000000",
        "step_000002",
    ]


@pytest.mark.parametrize(("step", "when"), [(0, "before"), (2, "after")])
def test_reported_accuracies_match_the_saved_answers(
    finished: Finished, step: int, when: str
) -> None:
    held_out = finished.answers(step, "held_out")
    assert len(held_out) == 32
    right = fmean(answer["greedy"]["accuracy"] for answer in held_out)
    assert finished.summary[f"held_out_accuracy_{when}"] == right

    answers = finished.answers(step, "words")
    assert [answer["question"] for answer in answers] == [w["question"] for w in finished.words]
    assert all(len(answer["sampled"]) == 2 for answer in answers)
    right = fmean(sample["accuracy"] for answer in answers for sample in answer["sampled"])
    measured = finished.summary[f"evaluation_{when}"]
    assert measured["words"]["Avg@2 sampled"]["mean"] == pytest.approx(right)

    lengths = [len(answer["greedy"]["text"]) for answer in finished.answers(step, "few")]
    assert measured["few"].keys() == {"Avg@1"} and len(lengths) == 4
    assert measured["few"]["Avg@1"]["mean"] == -fmean(lengths)


def test_curves_are_in_tensorboard(finished: Finished) -> None:
    assert curve_steps(finished.run_dir, "loss") == [1, 2]
    assert curve_steps(finished.run_dir, "evaluation/words/Avg@1/mean") == [0, 2]


def test_int8_rollouts_have_more_noise_than_bf16_evaluation(finished: Finished) -> None:
    mismatch = json.loads((finished.run_dir / "mismatch.json").read_text())
    engine, rollout = (mismatch[name]["logprob_abs_diff"] for name in ("evaluation", "rollout"))
    assert 0 < engine < rollout < 0.1


def test_every_publish_measures_every_weight(finished: Finished) -> None:
    publishes = json_lines(finished.run_dir / "weights.jsonl")
    assert [publish["weight_version"] for publish in publishes] == [2, 3]
    down = publishes[-1]["weights"]["model.layers.0.mlp.down_proj.weight"]
    assert 1e-6 < down["weight_quant_error"] < 1e-3 and 0 <= down["code_flip_fraction"] < 1


def test_completions_of_every_step_are_kept_with_the_ratio_of_each_token(
    finished: Finished,
) -> None:
    samples = json_lines(finished.run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4
    assert [sample["weight_versions"] for sample in samples] == [[1]] * 4 + [[2]] * 4
    ratios = [ratio for sample in samples for ratio in sample["ratios"]]
    assert len(ratios) == sum(sample["length"] for sample in samples)
    assert len(set(ratios)) > 4 and all(0.3 < ratio < 3 for ratio in ratios)
    assert (
        f"Completions: {finished.run_dir.name}"
        in (finished.run_dir / "report" / "index.html").read_text()
    )


def test_the_checkpoint_of_the_best_evaluation_is_linked(finished: Finished) -> None:
    best = finished.run_dir / "checkpoints" / "best"
    assert best.readlink() == Path("step_000002")
    of_words = finished.summary["evaluation_after"]["words"]["Avg@2 sampled"]
    state = read_state(best)
    assert (state.accuracy, state.standard_error) == (of_words["mean"], of_words["standard_error"])


def test_the_final_model_loads_in_transformers(finished: Finished) -> None:
    trained = AutoModelForCausalLM.from_pretrained(finished.run_dir / "final_model")
    assert trained.num_parameters() > 1e6


def test_the_report_shows_layers_and_evaluations(finished: Finished) -> None:
    report = (finished.run_dir / "report" / "index.html").read_text()
    assert "Layer by layer" in report and "Evaluation: words" in report
    assert "Evaluation: few" in report


def test_the_progress_is_printed(finished: Finished) -> None:
    for shown in (
        "rollout server 1 of 1 is up after",
        "shown answers, step 4",
        "step 2/2",
        "step 2/2 held-out accuracy",
        "held-out accuracy after",
        "words Avg@2 sampled after",
        "weight versions published",
        "bytes",
    ):
        assert shown in finished.command.text()


def test_qurl_eval_of_the_checkpoint_gives_the_answers_of_the_run(
    finished: Finished, start: Start, tmp_path: Path
) -> None:
    first, checkpoint = list_checkpoints(finished.run_dir)
    assert (first.name, checkpoint.name) == ("step_000001", "step_000002")
    # Not Parquet, whose reader leaves threads: the server is then no fork, and takes much longer.
    files = [tmp_path / "words.jsonl", tmp_path / "first.jsonl"]
    for file, words in zip(files, (finished.words, finished.words[:4]), strict=True):
        file.write_text("".join(json.dumps(word) + "\n" for word in words))
    settings = [
        f"data.first={files[1]}",
        "reward=reasoning_gym",
        "max_prompt_length=6",
        "max_completion_length=10",
    ]
    settings += ["server.mem_fraction_static=0.3", "server.max_total_tokens=4096"]
    settings += [f"output={tmp_path / 'eval'}"]
    run = start("eval", checkpoint, files[0], *settings)
    assert run.exit_code() == 0, run.text()
    results = json.loads((tmp_path / "eval" / "summary.json").read_text())["results"]
    assert [*results] == [str(files[0]), "first"]
    texts = [answer["greedy"]["text"] for answer in finished.answers(2, "words")]
    for number, expected in enumerate((texts, texts[:4])):
        answers = json_lines(tmp_path / "eval" / f"answers_{number}.jsonl")
        assert [answer["greedy"]["text"] for answer in answers] == expected
