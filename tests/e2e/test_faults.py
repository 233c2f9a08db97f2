"""A run outlives its servers, reports why it ends, leaves no process behind, and can resume."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil

from e2e.running import SMALL, Command, Start, curve_steps, metrics_of
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import list_checkpoints, read_state
from qurl_megatron.process import start_ticks
from qurl_megatron.rollout.roster import read_roster

# The parent of a killed server, the preloaded process, may not have seen yet how it ended.
KILLED = "(killed by signal 9|exit code unknown)"


def test_ctrl_c_while_it_starts_ends_every_process(start: Start) -> None:
    run = start("train", "quickstart", *SMALL)
    run.wait_for("run directory")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.exit_code() == 130
    assert "interrupted" in run.text()
    assert run.survivors() == []


def test_a_run_that_is_told_to_stop_early_before_it_starts_can_be_resumed(start: Start) -> None:
    run = start("train", "quickstart", *SMALL)
    run.wait_for("run directory")
    os.kill(run.process.pid, signal.SIGUSR1)
    assert run.exit_code() == STOPPED_EARLY, run.text()
    assert "Traceback" not in run.text()
    assert run.survivors() == []


def test_the_kernel_ends_every_process_of_a_killed_launcher(start: Start) -> None:
    run = start("train", "quickstart", *SMALL)
    run.wait_for("waiting for the servers")
    run.poll()
    assert len(run.started) >= 5  # two ranks, the server's processes and the parent of both
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(run.survivors(), timeout=30)
    assert alive == []


def test_a_server_that_does_not_start_ends_the_run_with_its_log(start: Start) -> None:
    # SGLang counts two tokens for each request, so it can take none.
    run = start("train", "quickstart", *SMALL, "rollout.server.max_total_tokens=1")
    assert run.exit_code() == 1
    assert "server_rollout_0.log" in run.text()
    assert "max_running_request is zero" in run.text()
    assert run.survivors() == []


def test_the_only_server_killed_and_then_stopped_is_replaced_and_the_run_completes(
    start: Start,
) -> None:
    # Sampling is most of a step: the server is stopped in it. In a publish it would be 60 s before
    # the learner gives it up, see tests/e2e/test_fleet.py.
    long_answers = ["rollout.max_response_length=128", "rollout.server.max_running_requests=8"]
    run = start("train", "quickstart", *SMALL, *long_answers, "steps=6")
    run.wait_for(r"step 1/")
    os.kill(pid_of(run, "rollout", 0), signal.SIGKILL)
    run.wait_for(rf"server rollout_0 died \({KILLED}\); restarting \(1\)")
    run.wait_for("server rollout_0 answers again")
    done = len(metrics_of(run))
    run.wait_for(rf"step {done + 1}/")
    time.sleep(0.5)
    for process in tree_of(run, "rollout", 0):
        process.suspend()
    run.wait_for(r"server rollout_0 does not answer the learner; restarting \(2\)")
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == list(range(1, 7))
    assert [step["weight_version"] for step in steps] == list(range(2, 8))
    suffixes = ("", "_restarted_1", "_restarted_2")
    logs = [run.run_dir / "logs" / f"server_rollout_0{suffix}.log" for suffix in suffixes]
    assert len({random_seed(log) for log in logs}) == 3


def test_the_run_goes_on_without_one_of_two_servers_and_without_the_evaluation_server(
    start: Start,
) -> None:
    words = ["steps=40", "rollout.servers=2", "evaluation.problems=16"]
    run = start("train", "quickstart", *SMALL, *words)
    run.wait_for(r"step 2/")
    os.kill(pid_of(run, "rollout", 1), signal.SIGKILL)
    os.kill(pid_of(run, "evaluation", 0), signal.SIGKILL)
    for name in ("rollout_1", "evaluation_0"):
        run.wait_for(rf"server {name} died \({KILLED}\); restarting \(1\)")
    done = len(metrics_of(run))
    run.wait_for("server rollout_1 answers again")
    assert len(metrics_of(run)) > done  # the other server has sampled
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    assert [step["step"] for step in metrics_of(run)] == list(range(1, 41))
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert 0 <= summary["held_out_accuracy_after"] <= 1


def test_sigterm_while_a_server_restarts_leaves_no_process(start: Start) -> None:
    run = start("train", "quickstart", *SMALL, "steps=1000")
    run.wait_for(r"step 1/")
    os.kill(pid_of(run, "rollout", 0), signal.SIGKILL)
    run.wait_for(r"restarting \(1\)")
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 143
    assert run.survivors() == []
    assert start_ticks(pid_of(run, "rollout", 0)) is None


def test_a_run_without_servers_saves_and_another_layout_resumes_it(start: Start) -> None:
    words = ["optimizer.learning_rate=0.1", "optimizer.warmup_steps=0", "checkpoint.every_steps=2"]
    words += ["optimizer.weight_decay=1"]  # changes the weights quickly for any rewards
    words += ["advantage_estimator=gae", "critic.tensor_parallel_size=1"]
    run = start("train", "quickstart", *SMALL, *words, "steps=1000")
    run.wait_for(r"step 5/")
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
    assert done == len(before) >= 5  # no step is lost
    assert f"stopped early after step {done}, with a checkpoint" in run.text()
    assert f"to resume after step {done}: qurl resume runs/run" in run.text()

    resumed = start("resume", "runs/run", "learner.tensor_parallel_size=1")
    resumed.wait_for(rf"step {done + 4}/")
    assert f"resuming after step {done}" in resumed.text()
    after = metrics_of(resumed)
    assert after[:done] == before[:done]
    # The critic trains on every step.
    assert all(step["value_loss"] >= 0 and step["time_critic_s"] > 0 for step in after)
    logs = run.run_dir / "logs"
    seeds = [random_seed(logs / part / "server_rollout_0.log") for part in (".", "resumed_1")]
    assert seeds[0] != seeds[1]  # with the first seed the server would repeat its samples
    assert [step["step"] for step in after] == list(range(1, len(after) + 1))
    assert [step["weight_version"] for step in after] == list(range(2, len(after) + 2))
    # The servers had the checkpoint's weights, not the model's, before their first prompt.
    kl = [step["kl_behaviour_proximal_k3"] for step in after]
    assert kl[done] < 2 * kl[done - 1]
    (*_, newer) = list_checkpoints(run.run_dir)
    assert read_state(newer).step > done

    resumed.find("qurl_megatron.loop.train runs/").kill()
    assert resumed.exit_code() == 1
    assert "learner rank 0" in resumed.text()
    assert str(run.run_dir.relative_to(run.output.parent) / "logs" / "resumed_1") in resumed.text()
    assert resumed.survivors() == []
    shown = curve_steps(run, "reward_mean")
    assert len(shown) >= done + 4 and shown == list(range(1, len(shown) + 1))


def pid_of(run: Command, set_name: str, index: int) -> int:
    """Return the main process of a server."""
    return read_roster(run.run_dir / "servers.json")[set_name][index].pid


def tree_of(run: Command, set_name: str, index: int) -> list[psutil.Process]:
    """Return all processes of a server."""
    main = psutil.Process(pid_of(run, set_name, index))
    return [main, *main.children(recursive=True)]


def random_seed(log: Path) -> str:
    """Return a server's random seed, which SGLang logs with all its settings."""
    match = re.search(r"random_seed=(\d+)", log.read_text())
    assert match
    return match[1]
