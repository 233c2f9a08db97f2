"""After a process is killed, the run reports why, leaves no process behind, and can resume."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil

from e2e.running import SMALL, Start, curve_steps, metrics_of
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import list_checkpoints, read_state


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
    run = start("train", "quickstart", *SMALL, "rollout.server.mem_fraction_static=0.000001")
    assert run.exit_code() == 1
    assert "server_rollout_0.log" in run.text()
    assert "memory" in run.text().lower()
    assert run.survivors() == []


def test_a_crash_ends_the_run_with_its_reason_and_another_layout_resumes_it(
    start: Start,
) -> None:
    words = ["optimizer.learning_rate=0.1", "optimizer.warmup_steps=0", "checkpoint.every_steps=2"]
    words += ["optimizer.weight_decay=1"]  # changes the weights quickly for any rewards
    words += ["advantage_estimator=gae", "critic.tensor_parallel_size=1"]
    run = start("train", "quickstart", *SMALL, *words, "steps=1000")
    run.wait_for(r"step 5/")
    run.find("sglang::scheduler").kill()
    assert run.exit_code() == 1
    assert "server http://127.0.0.1" in run.text()
    assert run.survivors() == []
    before = metrics_of(run)
    (*_, newest) = list_checkpoints(run.run_dir)
    done = read_state(newest).step
    assert 2 <= done <= len(before)

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


def random_seed(log: Path) -> str:
    """Return a server's random seed, which SGLang logs with all its settings."""
    match = re.search(r"random_seed=(\d+)", log.read_text())
    assert match
    return match[1]
