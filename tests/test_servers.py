"""Servers are restarted by the process that started them; here `sleep` stands for each server."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen2Config

from qurl_megatron.config.schema import Config, ServerConfig
from qurl_megatron.config.servers import ServerSpec, server_specs
from qurl_megatron.config.text import save
from qurl_megatron.launch import servers, status
from qurl_megatron.launch.servers import MAX_RESTARTS, Attempt, Servers
from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.rollout import preload
from qurl_megatron.rollout.fleet import HEALTH_TIMEOUT_S
from qurl_megatron.rollout.roster import read_roster, report_lost
from qurl_megatron.rollout.server import Server, ServerFailed
from qurl_megatron.rollout.start import options, prefill_chunk, step_s, token_flops
from tiny import build_tiny_model

TIMEOUT_S = 20.0


class Machine:
    """What the tests know and decide of the processes that stand for servers."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.attempt = Attempt.create(config)
        self.roster = self.attempt.roster("here")
        self.seeds: list[int] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.answering: set[str] = set()  # URLs

    def start(
        self, _: ServerSpec, log_file: Path, *, seed: int, host: str, api_key: str, gpus: list[int]
    ) -> Server:
        log_file.write_text(f"the log of {log_file.name}\n")
        process = subprocess.Popen(["sleep", "1000"])
        pid = process.pid
        self.seeds.append(seed)
        self.processes[pid] = process
        preload._started[pid] = preload.Started(pid, process.poll)
        scratch = self.config.run_dir / f"scratch{pid}"
        scratch.mkdir()
        return Server(
            url=f"http://{pid}",
            api_key=api_key,
            machine=socket.gethostname(),
            pid=pid,
            start_ticks=start_ticks(pid),
            tensor_parallel_size=1,
            gpus=gpus,
            log_file=str(log_file),
            scratch_dir=str(scratch),
        )

    def answer(self, index: int = 0) -> None:
        """Let the present process of a rollout server answer from now on."""
        self.answering.add(self.listed(index).url)

    def listed(self, index: int = 0) -> Server:
        """Return a rollout server as the roster has it."""
        return read_roster(self.roster)["rollout"][index]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    config = Config(name="run", output_dir=str(tmp_path))
    config.rollout.servers = 2
    config.evaluation.problems = 0
    config.run_dir.mkdir()
    save(config, config.run_dir / "config.yaml")
    machine = Machine(config)
    monkeypatch.setattr(servers, "start", machine.start)
    monkeypatch.setattr(servers, "answers", lambda server: server.url in machine.answering)
    yield machine
    for pid in machine.processes:
        assert start_ticks(pid) is None, "a server was left running"


def start(machine: Machine, gpus: tuple[list[int], ...] = ([], [])) -> Servers:
    started = Servers(machine.attempt, machine.roster)
    for spec, on in zip(server_specs(machine.config), gpus, strict=False):
        started.start(spec, on)
    started.save()
    return started


def start_both(machine: Machine, gpus: tuple[list[int], ...] = ([], [])) -> Servers:
    """Start both servers, and let them answer."""
    started = start(machine, gpus)
    machine.answer(0)
    machine.answer(1)
    started.check()
    return started


def check_until(started: Servers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        started.check()
        time.sleep(0.01)


def test_a_killed_server_is_replaced_in_the_roster_with_another_log_and_seed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(start_both(machine)) as started:
        first, other = machine.listed(0), machine.listed(1)
        os.kill(first.pid, signal.SIGKILL)
        check_until(started, lambda: machine.listed(0) != first)
        second = machine.listed(0)
        assert machine.listed(1) == other
        assert (second.pid, second.url) != (first.pid, first.url)
        assert Path(first.log_file).name == "server_rollout_0.log"
        assert Path(second.log_file).name == "server_rollout_0_restarted_1.log"
        assert Path(first.log_file).exists() and not Path(first.scratch_dir).exists()
        assert len(set(machine.seeds)) == 3
        machine.answer(0)
        started.check()
    said = capsys.readouterr().out
    assert "server rollout_0 died (killed by signal 9); restarting (1)" in said
    assert "server rollout_0 answers again" in said


def test_a_stopped_server_that_the_learner_reports_is_killed_and_replaced(
    machine: Machine,
) -> None:
    with closing(start_both(machine)) as started:
        hung = machine.listed(1)
        os.kill(hung.pid, signal.SIGSTOP)
        started.check()
        assert machine.listed(1) == hung  # the starter does not see that it hangs
        report_lost(machine.attempt.logs, "rollout", 1, hung)
        check_until(started, lambda: machine.listed(1) != hung)
        assert not psutil.pid_exists(hung.pid) or start_ticks(hung.pid) is None
        successor = machine.listed(1)
        machine.answer(1)
        for _ in range(3):  # the report is about its predecessor
            started.check()
        assert machine.listed(1) == successor


def test_a_server_that_keeps_dying_is_given_up_with_the_end_of_its_log(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = partial(status.server_counts, machine.config.run_dir)
    assert counts() == ""
    with closing(start(machine)) as started:
        assert counts() == ", servers 2 of 2, restarts 0"
        machine.answer(0)
        machine.answer(1)
        started.check()
        for _ in range(MAX_RESTARTS):
            dying = machine.listed(0)
            os.kill(dying.pid, signal.SIGKILL)
            check_until(started, lambda dying=dying: machine.listed(0) != dying)  # type: ignore[misc]
        os.kill(machine.listed(0).pid, signal.SIGKILL)
        check_until(started, lambda: list(read_roster(machine.roster)["rollout"]) == [1])
        assert counts() == ", servers 1 of 2, restarts 3"
    said = capsys.readouterr().out
    assert "server rollout_0 died while starting (killed by signal 9); restarting (3)" in said
    assert "not restarting it, after 3 restarts within 60 minutes" in said
    assert said.endswith("the log of server_rollout_0_restarted_3.log\n")


def test_restarts_are_allowed_again_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(servers.time, "monotonic", lambda: now)
    limit = servers.RestartLimit()
    assert [limit.allows() for _ in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [False]
    now = servers.RESTART_WINDOW_S + 1
    assert limit.allows()


@pytest.mark.parametrize("failure", ["died while starting", "did not come up in 0 s"])
def test_a_server_that_fails_during_its_first_start_is_an_error(
    machine: Machine, failure: str
) -> None:
    with closing(start(machine)) as started:
        machine.answer(1)
        started.check()
        if failure.startswith("died"):
            os.kill(machine.listed(0).pid, signal.SIGKILL)
        else:
            machine.config.rollout.server.start_timeout_s = 1e-9
        with pytest.raises(ServerFailed, match=f"(?s){failure}.*server_rollout_0.log ends"):
            check_until(started, lambda: False)


def test_a_late_restart_is_a_failure_like_any_other(machine: Machine) -> None:
    with closing(start_both(machine)) as started:
        first = machine.listed(0)
        os.kill(first.pid, signal.SIGKILL)
        machine.config.rollout.server.start_timeout_s = 1e-9
        check_until(started, lambda: list(read_roster(machine.roster)["rollout"]) == [1])
        assert len(machine.seeds) == 2 + MAX_RESTARTS


def test_servers_that_share_a_gpu_restart_one_after_the_other(machine: Machine) -> None:
    with closing(start_both(machine, gpus=([0], [0]))) as started:
        first, second = machine.listed(0), machine.listed(1)
        for server in (first, second):  # both are dead when the starter looks
            os.kill(server.pid, signal.SIGKILL)
            machine.processes[server.pid].wait()
        check_until(started, lambda: machine.listed(0) != first)
        for _ in range(3):
            started.check()
        assert machine.listed(1) == second  # the first is not ready
        machine.answer(0)
        check_until(started, lambda: machine.listed(1) != second)


def test_a_starter_in_place_of_a_dead_one_continues_its_logs_and_seeds(machine: Machine) -> None:
    with closing(start(machine)):
        pass
    with closing(start(machine)) as again:
        assert Path(machine.listed(0).log_file).name == "server_rollout_0_restarted_1.log"
        assert len(set(machine.seeds)) == 4
        # It is a restart, so a failure now does not end the run.
        starting = machine.listed(0)
        os.kill(starting.pid, signal.SIGKILL)
        check_until(again, lambda: machine.listed(0) != starting)


def test_an_exit_code_is_described_and_whether_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(code: int | None, before: int | None = 2, now: int | None = 2) -> str:
        monkeypatch.setattr(preload, "oom_kills", lambda: now)
        monkeypatch.setitem(preload._started, 0, preload.Started(0, lambda: code, before))
        return preload.how_it_ended(0)

    monkeypatch.setattr(preload.device, "machine_memory_bytes", lambda: 3_000_000_000)
    killed = "; most likely memory ran out, and the kernel killed it: the limit here is 3 GB"
    assert ended(None) == "exit code unknown"
    assert ended(-11) == "killed by signal 11"
    assert ended(-9) == "killed by signal 9"  # by somebody
    assert ended(-9, None, None) == f"killed by signal 9{killed}"
    assert ended(1, now=3) == f"exit code 1{killed}"  # a part of a server was killed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has memory of its own")
def test_without_a_gpu_a_cache_holds_what_a_servers_requests_can_need(tmp_path: Path) -> None:
    def chosen(model_dir: Path, **fields: Any) -> dict[str, object]:
        server = ServerConfig(max_running_requests=4, **fields)
        return options(ServerSpec(model_dir, server, "bf16", 10), seed=0)

    dense = build_tiny_model(tmp_path / "dense")
    assert chosen(dense)["max_total_tokens"] == 4 * (10 + 6)
    assert chosen(dense, max_total_tokens=17)["max_total_tokens"] == 17
    assert "max_mamba_cache_size" not in chosen(dense)
    hybrid = chosen(build_tiny_model(tmp_path / "hybrid", "qwen3_5_text"))
    assert hybrid["max_mamba_cache_size"] == 4 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes a chunk at once")
@pytest.mark.parametrize("busy", [1, 10], ids=["idle", "load 10"])
def test_without_a_gpu_a_server_answers_in_time_at_real_sizes(tmp_path: Path, busy: int) -> None:
    # As Qwen2.5-0.5B; a core with AVX2 computed 54 GFLOP/s of the prompts of SmolLM2-135M.
    fields: dict[str, Any] = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    }
    family: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 1}
    Qwen2Config(**fields, **family).save_pretrained(tmp_path / "half")

    def spec(model_dir: Path, **options: Any) -> ServerSpec:
        return ServerSpec(model_dir, ServerConfig(options=options), "int8", 1024)

    half, toy = spec(tmp_path / "half"), spec(build_tiny_model(tmp_path / "toy"))
    seconds = prefill_chunk(half) * token_flops(half) / 54e9 * busy
    assert seconds < HEALTH_TIMEOUT_S and step_s(half) > 2 * seconds
    assert options(half, seed=0)["watchdog_timeout"] == 300 + step_s(half)
    assert prefill_chunk(toy) == 4096 and step_s(toy) < 1
    assert prefill_chunk(spec(tmp_path / "half", page_size=192)) == 192
    whole = spec(tmp_path / "half", chunked_prefill_size=-1)
    assert step_s(whole) > 10 * step_s(half)
