"""What a server that stalls, floods, or says anything costs the run that asks it: little."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elsewhere import KEY, config_of, description
from fleets import make_fleet, make_server, wait_for
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.rollout import fleet as fleets
from qurl_megatron.rollout import requests
from qurl_megatron.rollout import server as server_module
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.control import ServerControl, UpdateRefused
from qurl_megatron.rollout.fleet import Fleet, RequestRefused
from qurl_megatron.rollout.requests import NoAnswer, ask
from qurl_megatron.rollout.server import Server, ServerFailed, answers
from qurl_megatron.rollout.wire import escaped, read_json
from qurl_megatron.weight_sync.elsewhere import servers as elsewhere
from qurl_megatron.weight_sync.elsewhere.transport import post_weights
from qurl_megatron.weight_sync.elsewhere.wire import BucketHeader
from tiny import build_tiny_model

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CLEARS_THE_SCREEN = "\x1b[2J\x07\u202e"
Answering = Callable[[socket.socket], None]


@contextlib.contextmanager
def server_that(answer: Answering) -> Iterator[Server]:
    """Listen, and answer each connection by hand once a request has come."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(2**16)
            answer(connection)
            ended.wait(20)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listening.accept()[0]
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        port = listening.getsockname()[1]
        try:
            yield elsewhere.remote_server(f"http://127.0.0.1:{port}", KEY, "first")
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`


def saying(text: str, status: str = "200 OK") -> Answering:
    content = text.encode("utf-8", "surrogatepass")
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return lambda connection: connection.sendall(f"{head}\r\n\r\n".encode() + content)


def trickle(first: bytes) -> Answering:
    """Send these bytes, and then one more now and then, without an end."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)

    return answer


def flood(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n[")
    while True:
        connection.sendall(b"0," * 2**15)


def nothing(connection: socket.socket) -> None:
    """Keep the connection open."""


STALLS = {
    "nothing": nothing,
    "in the head": trickle(b"HTTP/1.1 200 OK\r\nX: "),
    "in the body": trickle(HEAD + b"\r\n"),
}


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS)
def test_a_time_limit_is_of_the_whole_answer(stall: Answering) -> None:
    begin = time.monotonic()
    with server_that(stall) as server:
        with pytest.raises(NoAnswer, match=r"did not answer /x in 0\.5 s"):
            asyncio.run(server.ask("GET", "/x", timeout_s=0.5))
        with pytest.raises(ServerFailed, match=r"did not answer /pause_generation in 0\.5 s"):
            asyncio.run(ServerControl(server, timeout_s=0.5).pause())
    assert time.monotonic() - begin < 5


def test_an_answer_that_may_begin_at_any_time_has_a_limit_once_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "LATENCY_S", 0.3)
    with server_that(trickle(HEAD + b"\r\n")) as server:
        with pytest.raises(NoAnswer, match="did not answer /x in"):
            asyncio.run(server.ask("GET", "/x", timeout_s=None, most_bytes=1000))


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
            post_weights(server, 0.2, header, payload)


def test_an_answer_that_is_too_large_is_not_read() -> None:
    with server_that(flood) as server:
        with pytest.raises(NoAnswer, match="answered /x with more than 1,048,576 bytes"):
            asyncio.run(server.ask("GET", "/x", timeout_s=20))
        with pytest.raises(ServerFailed, match="answered /generate with more than 1,052,672 bytes"):
            client = RolloutClient(Fleet("rollout", {}), None, [])
            client.fleet.controller.wait(client._post(ONE_PROMPT, server))


def test_nothing_that_is_packed_is_unpacked() -> None:
    packed = HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00"
    with server_that(lambda connection: connection.sendall(packed)) as server:
        answer = asyncio.run(server.ask("GET", "/x", timeout_s=5))
        assert answer.content == b"\x1f\x8b\x08\x00"


def test_json_that_is_nested_deeply_is_none() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="recursion limit exceeded"):
            read_json(text.encode())
    assert read_json(b'{"a": [1, "b"]}') == {"a": [1, "b"]}


def test_text_from_elsewhere_is_shown_on_one_short_line_that_does_nothing() -> None:
    shown = escaped(f"a\n{CLEARS_THE_SCREEN}\udcff")
    assert shown == "a\\n\\x1b[2J\\x07\\u202e\\udcff" and shown.isprintable()
    assert len(escaped("a" * 10**6)) < 1000
    with server_that(saying(f"no {CLEARS_THE_SCREEN}" + "x" * 10**6, "400 Bad Request")) as server:
        with pytest.raises(UpdateRefused) as refused:
            asyncio.run(ServerControl(server).resume())
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    with server_that(
        saying(json.dumps({"success": False, "message": CLEARS_THE_SCREEN}))
    ) as server:
        with pytest.raises(UpdateRefused, match=r"failed in /continue_generation: \\x1b"):
            asyncio.run(ServerControl(server).resume())


@pytest.mark.parametrize("text", ["[" * 9000, "3", '"x"', "", "{", "[]"])
def test_an_answer_of_another_form_is_a_server_that_failed(text: str) -> None:
    with server_that(saying(text)) as server, pytest.raises(ServerFailed):
        asyncio.run(ServerControl(server).pause())


@pytest.mark.parametrize(
    "ranks", [None, [], {}, [{}], [{"checksums": [1]}], [{"checksums": {"a": "9" * 9999}}]]
)
def test_checksums_that_are_none_are_a_server_that_failed(ranks: Any) -> None:
    with server_that(saying(json.dumps({"ranks": ranks}))) as server:
        if ranks == []:
            assert (
                asyncio.run(ServerControl(server).checksums()) == []
            )  # `verify` misses all tensors
        else:
            with pytest.raises(ServerFailed):
                asyncio.run(ServerControl(server).checksums())


@pytest.mark.parametrize("load_s", [None, "1", float("nan"), -1.0, 1e9])
def test_a_server_that_lies_about_its_time_is_given_up(load_s: Any) -> None:
    header = BucketHeader(["a"], ["int8"], [[1]], 1, True, 1, False)
    with server_that(saying(json.dumps({"success": True, "load_s": load_s}))) as server:
        with pytest.raises(ServerFailed, match="says that it loaded weights in"):
            post_weights(server, 1.0, header, torch.zeros(1, dtype=torch.uint8))


# ---------------------------------------------------------------------------------- completions


ONE_PROMPT: dict[str, Any] = {
    "input_ids": [1, 2],
    "sampling_params": {"n": 1, "max_new_tokens": 2, "top_k": -1},
}
META: dict[str, Any] = {
    "finish_reason": {"type": "stop"},
    "token_versions": [1, 1],
    "output_token_logprobs": [[-1.0, 1, None], [-1.0, 1, None]],
}
RIGHT: dict[str, Any] = {"output_ids": [1, 1], "meta_info": META}


@pytest.mark.parametrize(
    "sampled",
    [
        [],
        [RIGHT, RIGHT],
        {"output_ids": [1, 1]},
        {**RIGHT, "output_ids": []},
        {**RIGHT, "output_ids": [1]},
        {**RIGHT, "output_ids": [1, 1, 1]},
        {**RIGHT, "output_ids": [-1, 1]},
        {**RIGHT, "output_ids": [10**30, 1]},
        {**RIGHT, "meta_info": {**META, "token_versions": [1, "x"]}},
        {**RIGHT, "meta_info": {**META, "output_token_logprobs": [[None, 1, None]] * 2}},
        {**RIGHT, "meta_info": {**META, "output_token_logprobs": [[float("nan"), 1, None]] * 2}},
        {**RIGHT, "meta_info": {**META, "output_token_logprobs": 3}},
        {**RIGHT, "meta_info": {**META, "finish_reason": None}},
    ],
)
def test_an_answer_that_is_no_completion_costs_the_server_or_the_run_if_it_is_its_own(
    tmp_path: Path, sampled: Any
) -> None:
    client = RolloutClient(Fleet("rollout", {}), None, [])
    with server_that(saying(json.dumps(RIGHT))) as server:
        assert len(client.fleet.controller.wait(client._post(ONE_PROMPT, server))) == 1
    with server_that(saying(json.dumps(sampled))) as server:
        own = make_server(0, tmp_path, url=server.url)
        for each, error in ((server, ServerFailed), (own, RequestRefused)):
            with pytest.raises(error, match="answered a prompt with unexpected content") as failed:
                client.fleet.controller.wait(client._post(ONE_PROMPT, each))
            assert failed.type is error


def test_the_experts_of_an_answer_must_be_of_each_token() -> None:
    client = RolloutClient(Fleet("rollout", {}), None, [], routing_shape=(1, 1))
    for experts in (None, "", "AAAA", "!!!!"):
        sampled = {**RIGHT, "meta_info": {**META, "routed_experts": experts}}
        with server_that(saying(json.dumps(sampled))) as server:
            with pytest.raises(ServerFailed, match="with unexpected content"):
                client.fleet.controller.wait(client._post(ONE_PROMPT, server))


def test_the_sampling_masks_of_an_answer_must_have_its_tokens() -> None:
    tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
    client = RolloutClient(Fleet("rollout", {}), tokenizer, [])
    asked = {**ONE_PROMPT, "sampling_params": {**ONE_PROMPT["sampling_params"], "top_k": 9}}
    masks = {
        "output_token_sampling_mask": [[1, 7], [1]],
        "output_token_sampling_logprobs": [-0.5, 0.0],
    }
    right = {**RIGHT, "meta_info": {**META, **masks}}
    with server_that(saying(json.dumps(right))) as server:
        (answer,) = client.fleet.controller.wait(client._post(asked, server))
    completion = client._completion(answer, 2)
    assert completion.behaviour_logprobs == [-0.5, 0.0]
    assert completion.sampling_masks is not None
    assert [each.tolist() for each in completion.sampling_masks] == [[2, 1], [1, 7, 1]]
    wrong: list[dict[str, Any]] = [
        {"output_token_sampling_mask": None},
        {"output_token_sampling_mask": [[1, 7]]},
        {"output_token_sampling_mask": [[1, 7], []]},
        {"output_token_sampling_mask": [[1, 7], [7]]},
        {"output_token_sampling_mask": [[1, 7], [10**30, 1]]},
        {"output_token_sampling_logprobs": [-0.5]},
        {"output_token_sampling_logprobs": [-0.5, None]},
    ]
    for each in wrong:
        sampled = {**RIGHT, "meta_info": {**META, **masks, **each}}
        with server_that(saying(json.dumps(sampled))) as server:
            with pytest.raises(ServerFailed, match="with unexpected content"):
                client.fleet.controller.wait(client._post(asked, server))
    with server_that(saying(json.dumps(right))) as server:  # nobody asked for masks
        with pytest.raises(ServerFailed, match="with unexpected content"):
            client.fleet.controller.wait(client._post(ONE_PROMPT, server))


def test_a_server_that_answers_health_and_no_prompt_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "STALLED_S", 0.5)
    fleet = make_fleet(tmp_path, 1)

    async def never(server: Server) -> None:
        await asyncio.Event().wait()

    with closing(fleet):
        (member,) = fleet.members("serving")
        member.heard_at += 3600  # it has just answered /health
        fleet.watch()
        assert not wait_for(fleet, "lost", 1.0)  # it owes nothing
        asking = fleet.controller.start(fleet.ask(1, never))
        assert wait_for(fleet, "lost")
        asking.cancel()
        assert "has answered no prompt for" in fleet.last_loss


# ------------------------------------------------------------------------------------ many servers


def test_servers_are_asked_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "DESCRIBE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(elsewhere, "RELEASE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server_module, "REVIVE_TIMEOUT_S", 1.0)
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
        assert server_module.revive(servers) == []
        assert time.monotonic() - begin < 8


def test_what_a_server_says_of_itself_is_shown_escaped(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    config = config_of(model)
    said = {**vars(description(model)), "version": CLEARS_THE_SCREEN}
    with server_that(saying(json.dumps(said))) as server:
        config.rollout.servers_at = [server.url]
        with pytest.raises(
            ConfigError, match=r"runs qurl-megatron \\x1b\[2J\\x07\\u202e"
        ) as caught:
            elsewhere.check_servers(config, KEY)
    assert str(caught.value).isprintable()


def test_a_server_that_does_not_exist_or_says_no_http_has_no_answer() -> None:
    with pytest.raises(NoAnswer, match="^cannot be reached: "):
        asyncio.run(ask("GET", "http://127.0.0.1:9/x", {}, timeout_s=5))
    with server_that(lambda connection: connection.sendall(b"\x1b[2J\r\n\r\n")) as server:
        with pytest.raises(NoAnswer, match="^closed the connection in /x ") as caught:
            asyncio.run(server.ask("GET", "/x", timeout_s=5))
        assert str(caught.value).isprintable() and not answers(server)


def test_a_prompt_is_asked_of_another_server_if_one_floods(tmp_path: Path) -> None:
    with server_that(flood) as bad, server_that(saying(json.dumps(RIGHT))) as good:
        fleet = Fleet("rollout", {0: bad, 1: good}, loaded=True)
        tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
        client = RolloutClient(fleet, tokenizer, [])
        prompts = [Prompt(str(number), "", "", [1, 2]) for number in range(4)]
        groups = client.generate(
            prompts, completions_per_prompt=1, temperature=1.0, max_completion_length=2
        )
        assert [len(group) for group in groups] == [1] * 4
        assert [member.index for member in fleet.members("serving")] == [1]
