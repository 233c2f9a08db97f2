"""A server that `qurl serve` started, reached by URL and key only, over a slow link with HTTPS."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from certificates import loopback_certificate
from e2e.running import QUICK, Command, metrics_of
from e2e.shaped_link import ShapedLink
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.elsewhere.servers import check_servers, remote_server
from qurl_megatron.machine.network import free_port
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout import requests

KEY = "the-key-of-the-test"
SLOW = 4e6  # bytes per second, at which deltas are compressed
STEPS = 4


@dataclass
class Elsewhere:
    """What stands for another machine: its command, and the link to it."""

    serve: Command
    link: ShapedLink
    model: Path
    key_file: Path
    start: Any  # starts the command again, and returns it

    def config(self) -> Config:
        words = [f"model={self.model}", f"rollout.servers_at=[{self.link.url}]"]
        return with_overrides(quickstart.recipe(), words)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    directory = tmp_path_factory.mktemp("elsewhere")
    model = directory / "model"
    quickstart.build_model(model, 0)
    key_file = directory / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY + "\n")
    port = free_port()
    length = quickstart.recipe().rollout.max_length
    settings = [f"max_length={length}", f"port={port}", f"key_file={key_file}"]
    settings += ["server.mem_fraction_static=0.6", "server.max_total_tokens=16384"]
    commands: list[Command] = []

    def start() -> Command:
        place = directory / str(len(commands))
        place.mkdir()
        commands.append(Command(place, "serve", model, *settings))
        commands[-1].wait_for("ready: rollout.servers_at=")
        return commands[-1]

    certificate, trusted = loopback_certificate(directory)
    with ShapedLink(port, SLOW, certificate) as link, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        requests.certificates.cache_clear()
        try:
            yield Elsewhere(start(), link, model, key_file, start)
        finally:
            for command in commands:
                command.end()
            requests.certificates.cache_clear()


def test_the_command_prints_its_url_and_shows_its_key_nowhere(elsewhere: Elsewhere) -> None:
    serve = elsewhere.serve
    assert f"ready: rollout.servers_at=[http://127.0.0.1:{elsewhere.link._target}]" in serve.text()
    serve.poll()
    for process in serve.started:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended
            assert KEY not in " ".join(process.cmdline())
    for log in serve.output.parent.glob("*"):
        if log.is_file():
            assert KEY not in log.read_text(), log


def test_another_key_format_or_length_is_refused_on_one_line(elsewhere: Elsewhere) -> None:
    check_servers(elsewhere.config(), KEY)
    other_format, longer = elsewhere.config(), elsewhere.config()
    other_format.quantization.format = "fp8"
    longer.rollout.max_prompt_length = 5000
    for config, key, message in (
        (elsewhere.config(), "another-key-of-it", "was started with another key"),
        (other_format, KEY, "takes weights as qurl_int8; .* needs qurl_fp8"),
        (longer, KEY, "serves at most .* tokens of prompt plus completion; the run needs 50"),
    ):
        with pytest.raises(
            ConfigError, match=f"server at {elsewhere.link.url} {message}"
        ) as caught:
            check_servers(config, key)
        assert "\n" not in str(caught.value)


def test_a_run_trains_on_a_server_elsewhere_also_after_it_was_killed_and_started_again(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    link = elsewhere.link
    words = [*QUICK, f"model={elsewhere.model}", "rollout.servers=0", "quantization.publish=delta"]
    words += [f"rollout.servers_at=[{link.url}]", "checkpoint.every_steps=0", "rollout.top_p=0.9"]
    words += [f"steps={STEPS}", "optimizer.learning_rate=1e-6"]
    (tmp_path / "wrong").write_text("another-key-of-it")
    (tmp_path / "wrong").chmod(0o600)
    wrong_key = [*words, "rollout.servers_key_file=wrong"]
    refused = Command(tmp_path, "train", *wrong_key)
    assert refused.exit_code() == 2
    (line,) = refused.text().splitlines()
    assert line.endswith("was started with another key; give both sides the same")
    assert not (tmp_path / "runs").exists()

    words.append(f"rollout.servers_key_file={elsewhere.key_file}")
    run = Command(tmp_path, "train", *words)
    try:
        run.wait_for(rf"step +2/{STEPS}")
        with pytest.raises(ConfigError, match=f"serves the run {run.run_dir.name}-"):
            check_servers(elsewhere.config(), KEY)
        elsewhere.serve.process.send_signal(signal.SIGKILL)
        run.wait_for("server rollout_0 is lost")
        elsewhere.serve = elsewhere.start()
        assert run.exit_code() == 0, run.text()
    finally:
        run.end()
    check_servers(elsewhere.config(), KEY)  # another run may have it now
    assert KEY not in run.text()
    steps = metrics_of(run)
    assert len(steps) == STEPS
    full = steps[0]["publish_full_bytes"]
    assert steps[0]["publish_bytes"] < full / 2 and steps[-1]["publish_bytes"] < full / 2
    assert {step["servers_serving"] for step in steps} <= {0, 1}
    # What the server holds is what the run published last: it was verified with each publish.
    assert asyncio.run(remote_server(link.url, KEY, "the test").checksums())
