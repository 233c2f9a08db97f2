"""Check that a run's log holds each step once across resumes, in its files and its curves."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from logs import ZEROS, evaluation, run_log, write
from qurl_megatron.config.schema import RolloutConfig, StageConfig
from qurl_megatron.machine.network import free_port
from qurl_megatron.report.metrics import (
    MAX_REWARDS,
    Evaluation,
    StepMetrics,
    count_rewards,
)
from qurl_megatron.report.run_log import evaluation_directory
from waiting import wait_until

BEFORE = Evaluation(0.25)


def logged(directory: Path) -> tuple[list[int], list[int]]:
    """Return the steps of metrics.jsonl and the weight versions of weights.jsonl."""
    lines = {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").open()]
        for name in ("metrics", "weights")
    }
    return (
        [line["step"] for line in lines["metrics"]],
        [line["weight_version"] for line in lines["weights"]],
    )


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values that TensorBoard shows, by tag."""
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("torn", ["", '{"step": 6, "weigh'], ids=["whole", "last line cut short"])
def test_resuming_drops_steps_logged_after_the_checkpoint(torn: str, tmp_path: Path) -> None:
    log = run_log(tmp_path)
    log.start(BEFORE)
    for step in range(1, 6):
        write(log, step)
        evaluation_directory(tmp_path, step).mkdir(parents=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)

    log = run_log(tmp_path)
    log.resume(3, time_s=100.0, before=BEFORE)
    assert logged(tmp_path) == ([1, 2, 3], [2, 3, 4])
    answers = sorted(path.name for path in (tmp_path / "evaluation").iterdir())
    assert answers == ["step_000001", "step_000002", "step_000003"]
    write(log, 4)
    log.finish(evaluation(0.75))
    assert logged(tmp_path) == ([1, 2, 3, 4], [2, 3, 4, 5])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["time_s"] > 100
    assert summary["held_out_accuracy_before"] == 0.25
    assert summary["evaluation_before"] == {}
    assert summary["evaluation_after"]["aime"]["Avg@1"]["mean"] == 0.75


def test_a_run_that_starts_over_logs_from_its_first_step(tmp_path: Path) -> None:
    for reward in (0.25, 0.5):  # the first run stopped before it had a checkpoint
        log = run_log(tmp_path)
        log.start(BEFORE)
        write(log, 1, reward_mean=reward)
        log.close()
    assert logged(tmp_path) == ([1], [2])
    assert curves(tmp_path)["held_out_accuracy"] == [(0, 0.25)]
    assert curves(tmp_path)["reward_mean"] == [(1, 0.5)]
    assert not (tmp_path / "wandb").exists()  # unless the configuration asks for it


def test_evaluations_are_logged_by_the_name_of_their_file(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    log.start(evaluation(0.1))
    for step in (1, 2):
        write(log, step)
    without, with_scores = (json.loads(line) for line in (tmp_path / "metrics.jsonl").open())
    assert without["evaluation"] is None and without["held_out_accuracy"] is None
    assert with_scores["evaluation"] == evaluation(0.2).files
    assert with_scores["held_out_accuracy"] == 0.2
    log.close()
    tag = "evaluation/aime/Avg@4 sampled/mean"
    assert curves(tmp_path)[tag] == [(0, 0.1), (2, 0.2)]


def test_tensorboard_shows_each_step_once_and_every_metric(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    log.start(BEFORE)
    for step in range(1, 6):  # the log is not closed, as if the run had been killed after step 5
        write(log, step, reward_mean=step / 8)
    log = run_log(tmp_path)
    log.resume(3, time_s=0.0, before=BEFORE)
    for step in (4, 5, 6):
        write(log, step, reward_mean=step / 4)
    log.close()
    shown = curves(tmp_path)
    assert shown["reward_mean"] == [
        (1, 0.125), (2, 0.25), (3, 0.375), (4, 1.0), (5, 1.25), (6, 1.5),
    ]  # fmt: skip
    assert shown["held_out_accuracy"] == [(0, 0.25), (2, 0.2), (4, 0.4), (6, 0.6)]
    numbers = {name for name, value in ZEROS.items() if value == 0} - {"step"}
    numbers |= {"held_out_standard_error"}
    assert numbers <= set(shown)


def wandb_rewards(run: Path) -> list[tuple[int, float]]:
    """Return the steps and rewards that an offline W&B run has stored for upload."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = run.glob("*.wandb")
    store = DataStore()
    rewards: list[tuple[int, float]] = []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "reward_mean" in items:
                rewards.append((int(items["step"]), float(items["reward_mean"])))
    return rewards


def test_rewards_are_counted_by_value_and_many_values_in_even_steps() -> None:
    assert count_rewards([1.0, 0.0, 1.0, -1.0]) == [(-1.0, 1), (0.0, 1), (1.0, 2)]
    counts = count_rewards([number / 1000 for number in range(1001)])
    assert len(counts) == MAX_REWARDS and sum(count for _, count in counts) == 1001
    assert (counts[0][0], counts[-1][0]) == (0.0, 1.0)
    assert counts[1][0] == pytest.approx(1 / 19) and counts[0][1] == 27 and counts[1][1] in (52, 53)


def test_the_time_left_follows_the_pace_of_the_last_steps(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    log._ends_s.extend([0.0, 10.0, 20.0])
    assert log._left_s(step=6) == 40.0
    log._ends_s.extend(20.0 + 2 * step for step in range(1, 31))
    assert log._left_s(step=6) == pytest.approx(8.0)
    log = run_log(tmp_path, time_limit_s=30.0)
    log._ends_s.extend([0.0, 10.0, 20.0])
    log._start -= 25.0
    assert log._left_s(step=6) == pytest.approx(5.0, abs=0.5)


def test_a_proof_is_no_part_of_the_pace(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    log.start(Evaluation())
    log._start -= 100.0  # a proof before the first step
    log.begin_steps()
    for step, proof_s in ((1, 0.0), (3, 50.0)):  # one more in the second
        log._start -= 10.0 + proof_s
        write(log, step, time_proof_s=proof_s)
    assert log._left_s(step=6) == pytest.approx(40.0, abs=1.0)
    log.finish(Evaluation())


def test_a_metric_above_its_limit_ends_the_run_and_is_in_the_summary(tmp_path: Path) -> None:
    log = run_log(tmp_path, stop_above={"evaluation/aime/Avg@1/mean": 0.2, "grad_norm": 0.5})
    log.start(evaluation(0.9))
    for step in range(1, 5):
        assert not log.has_reached()
        write(log, step, grad_norm=0.5)
    assert log.has_reached()
    for step, is_over in ((3, False), (4, True)):  # after an interruption
        log = run_log(tmp_path, stop_above={"evaluation/aime/Avg@1/mean": 0.2, "grad_norm": 0.5})
        log.resume(step, time_s=0.0, before=evaluation(0.9))
        assert log.has_reached() == is_over
        if not is_over:
            write(log, 4, grad_norm=0.5)
    log.finish(evaluation(0.1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reached"] == {"evaluation/aime/Avg@1/mean": 0.4}


def test_the_score_of_an_evaluation_is_held_out_accuracy_the_mean_over_files_or_that_of_one() -> (
    None
):
    def average(mean: float, error: float) -> dict[str, float]:
        return {"mean": mean, "standard_error": error}

    assert Evaluation().score() == (None, None)
    files = {
        "aime": {"Avg@1": average(0.5, 0.03)},
        "gsm8k": {"Avg@1": average(0.9, 0.0), "Avg@4 sampled": average(0.7, 0.04)},
    }
    assert Evaluation(0.25, files, 0.1).score() == (0.25, 0.1)
    assert Evaluation(None, files).score() == pytest.approx((0.6, 0.025))
    assert Evaluation(0.25, files, 0.1).score("gsm8k") == (0.7, 0.04)
    assert Evaluation(0.25, files, 0.1).score("aime") == (0.5, 0.03)


def test_an_evaluation_shows_the_answers_that_could_not_be_scored() -> None:
    assert Evaluation(0.25).lines() == [("held-out accuracy", "25.0%")]
    shown = Evaluation(0.0, failures="3 of 4 answers, which count as wrong: OSError").lines()
    assert shown[1] == ("scores that failed", "3 of 4 answers, which count as wrong: OSError")


def test_the_parts_of_a_run_are_one_run_of_weights_and_biases_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (run_dir := tmp_path / "run").mkdir()
    stages = RolloutConfig(stages={2: StageConfig(8, 2)})  # W&B must accept numbers as keys
    log = run_log(run_dir, wandb_project="project", rollout=stages)
    log.start(BEFORE)
    for step in (1, 2, 3):
        write(log, step, reward_mean=step / 8)
    log.close()
    log = run_log(run_dir, wandb_project="project")
    log.resume(2, time_s=0.0, before=BEFORE)
    write(log, 3, reward_mean=0.75)
    log.close()
    parts = sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    # offline-run-TIME-ID, and then a count if two parts began in one second
    assert len({part.name.split("-")[3] for part in parts}) == 1
    first, second = [(1, 0.125), (2, 0.25), (3, 0.375)], [(3, 0.75)]
    # W&B's own process may write the last of a run after `finish`.
    assert wait_until(lambda: [wandb_rewards(part) for part in parts] == [first, second], 10)


@pytest.mark.parametrize("blocked", ["base URL", "proxy", "base URL that is silent"])
def test_a_run_without_internet_records_curves_offline_and_says_how_to_send_them(
    blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if "silent" in blocked else free_port()
        name = "HTTPS_PROXY" if blocked == "proxy" else "WANDB_BASE_URL"
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        wandb.teardown()  # it keeps the settings of its first use in a process
        (run_dir := tmp_path / "a run").mkdir()
        log = run_log(run_dir, wandb_project="project")
        began = time.monotonic()
        log.start(BEFORE)
        assert time.monotonic() - began < 30  # wandb.init() alone waits for 90 s, and fails
        write(log, 1, reward_mean=0.25)
        log.close()
        wandb.teardown()
    (part,) = (run_dir / "wandb").glob("offline-run-*")
    assert wandb_rewards(part) == [(1, 0.25)]
    printed = "".join(capfd.readouterr())
    assert printed.count("Weights & Biases is offline: http") == 1
    assert "retry" not in printed
    command = printed.partition("to send the curves later: ")[2].splitlines()[0]
    shown = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True)
    assert shown.stdout == f"wandb sync --append {part}\n"


def test_parts_of_rewards_are_curves_and_the_first_verifier_failure_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_log(tmp_path)
    log.start(BEFORE)
    parts = {"accuracy": 0.5, "words": 12.0}
    values = [ZEROS | {"step": step, "reward_parts": parts} for step in (1, 2, 3)]
    log.write(StepMetrics(**values[0]), None)
    log.write(StepMetrics(**values[1] | {"verifier_failure": "KeyError: 'a'; question 'q'"}), None)
    log.write(StepMetrics(**values[2] | {"verifier_failure": "KeyError: 'b'; question 'q'"}), None)
    log.close()
    printed = capsys.readouterr().out
    assert "a verifier failed: KeyError: 'a'; question 'q'\n" in printed
    assert "KeyError: 'b'" not in printed
    shown = curves(tmp_path)
    assert shown["reward_parts/words"] == [(1, 12.0), (2, 12.0), (3, 12.0)]
    assert shown["reward_parts/accuracy"][0] == (1, 0.5)
    assert "verifier_failure" not in shown
