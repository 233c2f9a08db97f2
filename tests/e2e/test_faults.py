"""A run outlives its servers, reports why it ends, leaves no process behind, and can resume."""

import json
import os
import re
import signal
from pathlib import Path

import psutil

from e2e.running import (
    LONG_ANSWERS,
    PER_STEP,
    QUICK,
    Start,
    curve_steps,
    metrics_of,
    prompts_trained,
)
from qurl_megatron import device
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import read_state
from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.report.record import list_checkpoints

SMOOTHING = re.compile(r"smoothing of 0.5 by \d+ prompts: the largest outlier .* checksum is .*")


def test_a_server_that_does_not_start_ends_the_run_with_its_log(start: Start) -> None:
    # SGLang takes the option, and finds only at its start that there is no such kernel.
    run = start("train", *QUICK, "rollout.server.options.attention_backend=flashinfer")
    assert run.exit_code() == 1
    assert "server_rollout_0.log" in run.text()
    assert "flashinfer_backend.py" in run.text()
    assert run.survivors() == []


def test_a_run_goes_on_without_one_of_its_servers_and_waits_for_new_ones_without_any(
    start: Start,
) -> None:
    num_steps = 7
    words = [f"stop_above.weight_version={num_steps}", "steps=1000"]
    words += ["rollout.servers=2", "evaluation.problems=16"]
    words += ["rollout.max_staleness=1", "learner.tensor_parallel_size=1"]
    run = start("train", *QUICK, *LONG_ANSWERS, *words)
    run.wait_for("step 1/")
    os.kill(run.server_pid("rollout", 1), signal.SIGKILL)
    os.kill(run.server_pid("evaluation", 0), signal.SIGKILL)
    for name in ("rollout_1", "evaluation_0"):
        run.wait_for(rf"server {name} died \(killed by signal 9\); restarting \(1\)")
    done = len(metrics_of(run))
    run.wait_for(f"step {done + 1}/")  # the other server has sampled
    # The learner waits, so that the run is not over before the server is back.
    run.first_rank().suspend()
    run.wait_for("server rollout_1 answers again")
    run.first_rank().resume()
    run.wait_for("(?s)server rollout_1 serves.*server rollout_1 serves")
    if device.accelerator() == "cpu":  # so a server that it starts again is a fork, up at once
        assert psutil.Process(run.process.pid).num_threads() == 1

    # After this line sampling is most of a step, so the server is stopped in it. In a publish it
    # would be 60 s before the learner gives it up, see tests/e2e/test_fleet.py.
    run.wait_for(f"step {len(metrics_of(run)) + 1}/")
    main = psutil.Process(run.server_pid("rollout", 0))
    for process in (main, *main.children(recursive=True)):
        process.suspend()
    os.kill(run.server_pid("rollout", 1), signal.SIGKILL)
    run.wait_for(r"server rollout_1 died \(killed by signal 9\); restarting \(2\)")
    run.wait_for(r"server rollout_0 does not answer the learner; restarting \(1\)")
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    assert [step["weight_version"] for step in steps] == list(range(2, num_steps + 2))
    assert max(step["token_staleness_max"] for step in steps) == 1
    assert sum(step["groups_dropped"] for step in steps) == 0
    assert prompts_trained(run) == num_steps * PER_STEP
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert 0 <= summary["held_out_accuracy_after"] <= 1
    # A metric ended the run, and its last checkpoint may still be the best.
    (*_, last) = list_checkpoints(run.run_dir)
    assert read_state(last).accuracy == summary["held_out_accuracy_after"]
    logs = {log.name: log for log in (run.run_dir / "logs").glob("server_rollout_*.log")}
    assert len(logs) == 5
    logs.pop("server_rollout_0_restarted_1.log")  # the run may be over before it has its settings
    assert len({random_seed(log) for log in logs.values()}) == 4


def test_a_run_without_servers_saves_and_another_layout_resumes_it(
    start: Start,
) -> None:
    words = ["optimizer.learning_rate=0.1", "optimizer.warmup_steps=0", "checkpoint.every_steps=2"]
    words += ["optimizer.weight_decay=1"]  # changes the weights quickly for any rewards
    words += ["objective.advantage_estimator=gae", "critic.tensor_parallel_size=1"]
    words += ["quantization.smoothing=0.5"]
    run = start("train", *QUICK, *words, "steps=1000")
    run.wait_for("step 3/")
    model = run.run_dir / "model" / "config.json"
    model.rename(run.run_dir / "hidden")  # no server can start without it
    run.find("sglang::scheduler").kill()
    assert run.exit_code() == STOPPED_EARLY, run.text()
    (run.run_dir / "hidden").rename(model)
    assert "not restarting it, after 3 restarts within 60 minutes" in run.text()
    assert "server_rollout_0_restarted_3.log ends" in run.text()
    assert run.survivors() == []
    before = metrics_of(run)
    (*_, newest) = list_checkpoints(run.run_dir)
    done = read_state(newest).step
    assert done == len(before) >= 3  # no step is lost
    assert f"stopped early after step {done}, with a checkpoint" in run.text()
    assert run.says_how_to_resume(done, "runs/run"), run.text()

    resumed = start("resume", "runs/run", "learner.tensor_parallel_size=1")
    resumed.wait_for(rf"step {done + 4}/")
    assert f"resuming after step {done}" in resumed.text()
    # The scales are again those of the model and the prompts that the run began with.
    chosen = [SMOOTHING.findall(each.text()) for each in (run, resumed)]
    assert len(chosen[0]) == 1 and chosen[1] == chosen[0]
    after = metrics_of(resumed)
    assert after[:done] == before[:done]
    # The critic trains on every step.
    assert all(step["value_loss"] >= 0 and step["time_critic_s"] > 0 for step in after)
    logs = run.run_dir / "logs"
    seeds = [random_seed(logs / part / "server_rollout_0.log") for part in (".", "resumed_1")]
    assert seeds[0] != seeds[1]  # with the first seed the server would repeat its samples
    assert [step["step"] for step in after] == list(range(1, len(after) + 1))
    assert [step["weight_version"] for step in after] == list(range(2, len(after) + 2))
    # The proof was made again, and the first one is kept.
    mismatch = json.loads((run.run_dir / "mismatch.json").read_text())
    assert {"rollout", "new_servers"} <= mismatch.keys()
    assert 0 < mismatch["new_servers"]["predicted_logprob_abs_diff"] < 0.1
    # It took none of the rollout's time, which tokens are divided by.
    first = after[done]
    assert first["time_rollout_s"] - first["time_waited_s"] < first["time_proof_s"]
    # The servers had the checkpoint's weights, not the model's, before their first prompt.
    kl = [step["kl_behaviour_proximal_k3"] for step in after]
    assert kl[done] < 2 * kl[done - 1]
    (*_, newer) = list_checkpoints(run.run_dir)
    assert read_state(newer).step > done

    os.kill(resumed.server_pid("rollout", 0), signal.SIGKILL)
    resumed.wait_for(r"restarting \(1\)")
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.exit_code() == 128 + signal.SIGTERM
    assert resumed.survivors() == []
    assert start_ticks(resumed.server_pid("rollout", 0)) is None
    shown = curve_steps(run.run_dir, "reward_mean")
    assert len(shown) >= done + 4 and shown == list(range(1, len(shown) + 1))


def random_seed(log: Path) -> str:
    """Return a server's random seed, which SGLang logs with all its settings."""
    match = re.search(r"'random_seed': (\d+)", log.read_text())
    assert match
    return match[1]
