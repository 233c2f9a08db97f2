"""Servers elsewhere: their key, what a run refuses, their answers, what a fleet does.

SGLang's server is not started here; `tests/e2e/test_servers_at.py` does that.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import proxy_bypass

import httpx
import psutil
import pytest
import torch
from described import KEPT, KEY, config_of, description

from answering import Address, nothing, saying, server_that
from fleets import wait_for
from qurl_megatron import cli
from qurl_megatron.config.schema import Config, ConfigError, ServerConfig
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.elsewhere import claims, key, serve
from qurl_megatron.extensions.elsewhere import servers as elsewhere
from qurl_megatron.extensions.elsewhere.transport import post_weights
from qurl_megatron.extensions.elsewhere.wire import BucketHeader
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout import fleet as fleets
from qurl_megatron.rollout import preload, requests, server
from qurl_megatron.rollout import start as starting
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet, RequestRefused, ServerBusy
from qurl_megatron.rollout.roster import SERVERS_AT, read_roster
from qurl_megatron.rollout.server import ServerFailed, answers, revive
from qurl_megatron.rollout.start import environment
from tiny import build_tiny_model


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(f"{KEY}\n")
    return path


# ------------------------------------------------------------------------------------------ keys


def test_a_key_comes_from_a_file_or_from_the_environment(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key.read_key(str(key_file), "field") == KEY
    monkeypatch.setenv(key.VARIABLE, f"{KEY}x")
    assert key.read_key("", "field") == f"{KEY}x"
    assert key.read_key(str(key_file), "field") == KEY


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "no such file; make one with: "),
        *((KEY, mode, "others can read it; chmod 600 ") for mode in (0o640, 0o620, 0o604, 0o602)),
        ("short", 0o600, "a key has 16 to 512 letters"),
        ("-" + KEY, 0o600, "begins with a letter or digit"),
        (f"{KEY}\n{KEY}", 0o600, "a key has 16 to 512 letters"),
        (f"{KEY}\xff", 0o600, "a key has 16 to 512 letters"),
    ],
)
def test_what_is_no_key_is_refused_on_one_line_that_does_not_show_it(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text, encoding="latin-1")
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message) as refused:
        key.read_key(str(path), "key_file")
    assert str(refused.value).startswith(f"key_file={path}: ")
    assert "\n" not in str(refused.value) and KEY not in str(refused.value)


def test_without_any_key_nothing_starts(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(key.VARIABLE, raising=False)
    config = config_of(model_dir, "rollout.servers_at=[http://127.0.0.1:1]")
    with pytest.raises(ConfigError, match=r"^rollout.servers_key_file: missing; servers elsewhere"):
        claims.check(config)
    with pytest.raises(SystemExit) as ended:
        cli.app(["serve", str(model_dir)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("qurl: key_file: missing; servers elsewhere need a")


def test_the_roster_of_servers_elsewhere_is_written_for_this_user_only(
    tmp_path: Path, model_dir: Path, key_file: Path
) -> None:
    words = ["name=größe", f"output_dir={tmp_path}", f"rollout.servers_key_file={key_file}"]
    at = "rollout.servers_at=[http://10.0.0.1:2, 'https://host/a/b']"
    config = config_of(model_dir, *words, "rollout.servers=3", at)
    config.run_dir.mkdir()
    path = config.run_dir / SERVERS_AT
    with claims.claimed(config):
        servers = read_roster(path)["rollout"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert {index: server.url for index, server in servers.items()} == {
        3: "http://10.0.0.1:2",
        4: "https://host/a/b",
    }
    assert all(server.is_remote and server.api_key == KEY for server in servers.values())
    with claims.claimed(config):  # when the run resumes
        pass
    assert read_roster(path)["rollout"] == servers
    (run,) = {server.run for server in servers.values()}
    assert re.fullmatch(r"gr\\xf6\\xdfe-[0-9a-f]{8}", run)  # a header takes ASCII only
    httpx.Headers(servers[3].headers)  # raises what no header can be


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "url",
    ["10.0.0.1:2", "ftp://a", "http://user:word@a", "http://a/?b=c", "http://a/", "http://a b"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"give http\(s\)://HOST:PORT"):
        with_overrides(Config(), [f"rollout.servers_at={json.dumps([url])}"])


def test_only_loopback_and_https_are_private() -> None:
    for url in ("http://localhost:2", "http://127.0.0.9:2", "http://[::1]:2", "https://a"):
        assert elsewhere.is_private(url), url
    for url in ("gpu-node:2", "localhost.example.com", "10.0.0.1:2", "0.0.0.0:2", "[2001:db8::1]"):
        assert not elsewhere.is_private(f"http://{url}"), url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://192.0.2.1:2", "would carry the key and all completions in the clear"),
        ("http://a:99999", "is not a URL: "),
        ("https://[:::]", "is not a URL: "),
    ],
)
def test_a_url_that_must_not_or_cannot_be_asked_is_refused(
    model_dir: Path, url: str, message: str
) -> None:
    config = config_of(model_dir, f"rollout.servers_at={json.dumps([url])}")
    with pytest.raises(ConfigError, match=f"^rollout.servers_at: .* {message}"):
        elsewhere.check_servers(config, KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.0.1"}, r"runs qurl-megatron 0\.0\.1, and this is .*; install the same"),
        ({"method": "qurl_fp8"}, "takes weights as qurl_fp8; .* needs qurl_int8"),
        ({"method": None}, "takes weights as bf16"),
        ({"method": "qurl_int4_g32"}, "takes weights as qurl_int4_g32; .* format and group_size"),
        (
            {"context_length": 99},
            "serves at most 99 tokens .* the run needs 100; .* max_length=100",
        ),
        (
            {"run": "first-01"},
            "serves the run first-01; give each run servers of its own, or start",
        ),
        ({"kept": []}, f"and the run do not keep the same layers in BF16: one keeps {KEPT}; start"),
        ({"kept": [KEPT, "other"]}, "and the run do not keep the same layers .*: one keeps other;"),
        ({"model": {"hidden_size": 7}}, "has a model whose hidden_size is 7; that of the run is"),
        ({"records_routing": False}, "does not record the experts .*; start it with records_rout"),
    ],
)
def test_a_server_that_cannot_sample_for_the_run_is_named_with_what_differs(
    model_dir: Path, changes: dict[str, Any], message: str
) -> None:
    own = description(model_dir, records_routing=True)
    needed = dataclasses.replace(own, model={"hidden_size": 8} if "model" in changes else own.model)
    own.check("http://a", own)
    own.check("http://a", description(model_dir))  # more than is needed is no harm
    with pytest.raises(ConfigError, match=f"^rollout.servers_at: the server at http://a {message}"):
        dataclasses.replace(own, **changes).check("http://a", needed)


def test_a_server_of_another_kind_or_with_another_key_is_refused(
    address: Address, model_dir: Path
) -> None:
    wrong_types = json.dumps(dataclasses.asdict(description(model_dir)) | {"context_length": "x"})
    for status, text, message in (
        (401, "", "was started with another key; give both sides the same"),
        (
            404,
            '{"detail": "Not Found"}',
            "is not a server of qurl serve: it answers /qurl with status 404",
        ),
        (200, "<html>", "is not a server of qurl serve"),
        (200, "{}", "is not a server of qurl serve"),
        (200, "[1]", "is not a server of qurl serve"),
        (200, wrong_types, "is not a server of qurl serve"),
    ):
        address.status, address.text = status, text
        with pytest.raises(ConfigError, match=message):
            asyncio.run(elsewhere.describe(address.url, KEY))
    with pytest.raises(ConfigError, match="cannot be reached: .*; start it with qurl serve"):
        asyncio.run(elsewhere.describe("http://127.0.0.1:9", KEY))


def test_no_proxy_is_asked_for_a_server(
    address: Address, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    described = description(model_dir)
    address.text = json.dumps(dataclasses.asdict(described))
    server = elsewhere.remote_server(address.url, KEY)
    assert answers(server) and revive([server]) == [server]
    assert asyncio.run(elsewhere.describe(address.url, KEY)) == described
    with closing(Fleet("rollout", {0: server})) as fleet:
        fleet.watch()
        assert wait_for(fleet, "joining")


def test_a_server_asks_no_proxy_when_it_asks_itself(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = environment(ServerSpec(model_dir, ServerConfig(), "int8", 10))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given[name])
        assert proxy_bypass("127.0.0.1")
        monkeypatch.delenv(name)


def test_a_server_gets_variables_of_engines_only_if_they_are_named(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs: list[preload.Program] = []

    def begin(program: preload.Program) -> preload.Started:
        programs.append(program)
        return preload.Started(os.getpid(), lambda: None)

    monkeypatch.setattr(preload, "start", begin)
    monkeypatch.setattr(starting, "_said_dropped", set())
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)  # SGLang sets some where it is imported
    of_shell = {"SGLANG_RETURN_ORIGINAL_LOGPROB", "SGL_X", "TORCH_LOGS", "DNNL_X", "ONEDNN_X"}
    for name in [*of_shell, "NCCL_DEBUG", "SGLANG_PYSPY_DUMP_BEFORE_CRASH"]:
        monkeypatch.setenv(name, "1")
    for given in ServerConfig(), ServerConfig(environment={"TORCH_LOGS": "+dynamo"}):
        spec = ServerSpec(model_dir, given, "bf16", 10)
        shutil.rmtree(starting.start(spec, tmp_path / "log", seed=0).scratch_dir)
    assert set(programs[0].without) == of_shell and programs[0].is_fresh
    assert programs[0].environment["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "0"
    assert set(programs[1].without) == of_shell - {"TORCH_LOGS"}
    assert programs[1].environment["TORCH_LOGS"] == "+dynamo"
    said = f"qurl: servers do not get {', '.join(sorted(of_shell))} from this shell; "
    assert capsys.readouterr().err.startswith(said)
    for name in of_shell:
        monkeypatch.delenv(name)
    spec = ServerSpec(model_dir, ServerConfig(), "bf16", 10)
    shutil.rmtree(starting.start(spec, tmp_path / "log", seed=0).scratch_dir)
    assert not programs[2].without and not programs[2].is_fresh
    assert not capsys.readouterr().err


def test_a_new_run_needs_every_server_and_one_that_resumes_goes_on_without_some(
    model_dir: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rollout.servers_at=[http://127.0.0.1:9]", f"rollout.servers_key_file={key_file}"]
    config = config_of(model_dir, *words)
    with pytest.raises(ConfigError, match="http://127.0.0.1:9 cannot be reached"):
        claims.check(config)
    claims.check(config, resumes=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("start it with qurl serve; the run goes on without it")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("max_length=513", "max_length=513: the model has 512 positions"),
        ("host=192.0.2.1", "host=192.0.2.1 port=0: cannot listen there: Cannot assign"),
        ("server.tensor_parallel_size=3", "server: 4 attention heads are not divisible by"),
        ("server.options.host=a", "server.options.host=a: refused"),
        ("host=", "host=: missing; give an address, or 0.0.0.0 to listen on all"),
        ("host=ä..ö", "host=ä..ö port=0: cannot listen there: encoding of hostname failed"),
        ("keep=[no_such]", "^keep=no_such: matches no quantized layer"),
        ("records_routing=true", "records_routing=True: the model has no experts"),
        ("log_file=", "is not a regular file"),
        ("log_file={key_file.parent}", "is not a regular file"),
        ("log_file={key_file}/server.log", "exists"),
    ],
)
def test_a_wrong_setting_of_serve_is_refused_before_anything_starts(
    model_dir: Path, key_file: Path, word: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preload, "start", None)  # is not called
    words = [f"key_file={key_file}", f"log_file={key_file.parent}/new/server.log"]
    words += ["max_length=100", word.format(key_file=key_file)]
    with pytest.raises((ConfigError, ValueError, OSError), match=message):
        serve.run(with_overrides(serve.ServeConfig(model=str(model_dir)), words))
    assert not (key_file.parent / "new").exists()


def test_experts_in_blocks_are_divided_as_the_server_divides_them(
    model_dir: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(Architecture, "check_blocks", lambda _, *given: asked.append(given))
    monkeypatch.setattr(Architecture, "check_server_layout", lambda *_: None)
    words = ["format=fp8-block", "host=", "max_length=100", "server.tensor_parallel_size=4"]
    words += [f"key_file={key_file}", "server.expert_parallel_size=2"]
    with pytest.raises(ConfigError, match="host=: missing"):
        serve.run(with_overrides(serve.ServeConfig(model=str(model_dir)), words))
    assert asked == [("fp8-block", 4, 2)]


# ------------------------------------------------------------------------------------- their end


def test_a_command_that_is_ended_ends_its_server_and_removes_the_key(
    model_dir: Path, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    def end(*_: object, **__: object) -> None:  # as a signal does
        assert len(list(tmp_path.glob("qurl-server-*/key.yaml"))) == 1
        sys.exit(128 + signal.SIGTERM)

    monkeypatch.setattr(preload, "start", start)
    monkeypatch.setattr("qurl_megatron.rollout.start.wait_ready", end)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = [f"key_file={key_file}", "max_length=100", f"log_file={tmp_path}/server.log"]
    with pytest.raises(SystemExit, match="143"):
        serve.run(with_overrides(serve.ServeConfig(model=str(model_dir)), words))
    assert not psutil.pid_exists(started[0].pid)
    assert not list(tmp_path.glob("qurl-server-*"))


# ---------------------------------------------------------------------------------- in the fleet


def test_a_lost_server_elsewhere_is_asked_until_it_answers_and_is_then_another(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "ASK_AGAIN_S", 0.3)
    said: list[str] = []
    address.status = 503
    roster = {4: elsewhere.remote_server(address.url, KEY)}
    with closing(Fleet("rollout", roster, loaded=True, patience_s=99, say=said.append)) as fleet:
        fleet.watch(lambda: roster)
        (lost,) = fleet.members("serving")
        lost.lose("closed the connection")
        assert said == [
            "server rollout_4 is lost: closed the connection; it was started elsewhere, so it is "
            "asked again until it answers"
        ]
        assert wait_for(fleet, "starting")
        assert not wait_for(fleet, "joining", 1.0)
        fleet.check_size()  # it may come back
        address.status = 200
        assert wait_for(fleet, "joining")
        (back,) = fleet.members("joining")
        assert back is not lost and back.server == lost.server


ONE_PROMPT = {
    "input_ids": [1, 2],
    "sampling_params": {"n": 1, "max_new_tokens": 2, "top_k": -1},
}


def completion(end: str, *versions: int) -> dict[str, Any]:
    meta = {"finish_reason": {"type": end}, "token_versions": versions}
    logprobs = [[-1.0, 1, None] for _ in versions]
    return {
        "output_ids": [1 for _ in versions],
        "meta_info": {**meta, "output_token_logprobs": logprobs},
    }


@pytest.mark.parametrize(
    ("status", "text", "error", "message"),
    [
        # Of a proxy, or of a server with another key: it costs a server, and not the run.
        *((status, "<html>", ServerFailed, f"with status {status}") for status in (502, 503, 504)),
        (200, "<", ServerFailed, "answered a prompt with status 200"),
        *((status, "{}", ServerFailed, f"with status {status}") for status in (401, 409)),
        (400, "{}", RequestRefused, ""),  # other servers would refuse it, too
        (503, "{}", ServerBusy, ""),
        (200, json.dumps([completion("stop", 3), completion("abort", 3)]), ServerBusy, ""),
        *(
            (200, json.dumps(completion("stop", *versions)), ServerFailed, "without weights")
            for versions in ((0, 0), (0, 3))  # it was started again
        ),
    ],
)
def test_an_answer_that_is_none_is_told_from_a_refusal_and_from_a_busy_server(
    address: Address,
    status: int,
    text: str,
    error: type[Exception],
    message: str,
) -> None:
    client = RolloutClient(Fleet("rollout", {}), None, [])
    server = elsewhere.remote_server(address.url, KEY)
    address.text = json.dumps(completion("stop", 3, 3))
    assert client.fleet.controller.wait(client._post(ONE_PROMPT, server))
    address.status, address.text = status, text
    with pytest.raises(error, match=message) as failed:
        client.fleet.controller.wait(client._post(ONE_PROMPT, server))
    assert failed.type is error


def test_a_server_that_reads_weights_too_slowly_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "LATENCY_S", 0.1)
    payload = torch.zeros(2**23, dtype=torch.uint8)  # more than a connection takes
    monkeypatch.setattr(requests, "SLOWEST_BYTES_PER_S", len(payload) / 0.2)
    header = BucketHeader(["a"], ["int8"], [[1]], 1, True, len(payload), False)

    def read_little(connection: socket.socket) -> None:
        while connection.recv(1000):
            time.sleep(0.05)

    with server_that(read_little) as server:
        with pytest.raises(ServerFailed, match="did not answer /qurl/weights in"):
            post_weights(dataclasses.replace(server, timeout_s=0.2), header, payload)


@pytest.mark.parametrize("load_s", [None, "1", float("nan"), -1.0, 1e9])
def test_a_server_that_lies_about_its_time_is_given_up(load_s: Any) -> None:
    header = BucketHeader(["a"], ["int8"], [[1]], 1, True, 1, False)
    with server_that(saying(json.dumps({"success": True, "load_s": load_s}))) as server:
        with pytest.raises(ServerFailed, match="says that it loaded weights in"):
            post_weights(server, header, torch.zeros(1, dtype=torch.uint8))


def test_servers_are_asked_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "DESCRIBE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(elsewhere, "RELEASE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server, "REVIVE_TIMEOUT_S", 1.0)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server_that(nothing)) for _ in range(8)]
        urls = json.dumps([server.url for server in servers])
        config = config_of(build_tiny_model(tmp_path / "model"), f"rollout.servers_at={urls}")
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=f"{servers[0].url} did not answer /qurl in 1 s"):
            elsewhere.check_servers(config, KEY)
        left_out: list[elsewhere.Unreachable] = []
        elsewhere.check_servers(config, KEY, without=left_out.append)
        assert len(left_out) == 8
        elsewhere.release(servers)
        assert server.revive(servers) == []
        assert time.monotonic() - begin < 8


def test_what_a_server_says_of_itself_is_shown_escaped(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    config = config_of(model)
    said = {**vars(description(model)), "version": "\x1b[2J\x07\u202e"}
    with server_that(saying(json.dumps(said))) as server:
        config.rollout.servers_at = [server.url]
        with pytest.raises(
            ConfigError, match=r"runs qurl-megatron \\x1b\[2J\\x07\\u202e"
        ) as caught:
            elsewhere.check_servers(config, KEY)
    assert str(caught.value).isprintable()
