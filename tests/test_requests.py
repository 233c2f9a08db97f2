"""What a server that stalls, floods, or says anything costs the run that asks it: little."""

import asyncio
import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from answering import HEAD, Answering, flood, nothing, saying, server_that, trickle
from fleets import make_fleet, make_server, wait_for
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.rollout import fleet as fleets
from qurl_megatron.rollout import requests
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet, RequestRefused
from qurl_megatron.rollout.requests import NoAnswer, ask
from qurl_megatron.rollout.server import Server, ServerFailed, UpdateRefused, answers
from qurl_megatron.rollout.wire import escaped, read_json

CLEARS_THE_SCREEN = "\x1b[2J\x07\u202e"

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
            asyncio.run(replace(server, timeout_s=0.5).pause())
    assert time.monotonic() - begin < 5


def test_an_answer_that_may_begin_at_any_time_has_a_limit_once_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "LATENCY_S", 0.3)
    with server_that(trickle(HEAD + b"\r\n")) as server:
        with pytest.raises(NoAnswer, match="did not answer /x in"):
            asyncio.run(server.ask("GET", "/x", timeout_s=None, most_bytes=1000))


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
            asyncio.run(server.resume())
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    with server_that(
        saying(json.dumps({"success": False, "message": CLEARS_THE_SCREEN}))
    ) as server:
        with pytest.raises(UpdateRefused, match=r"failed in /continue_generation: \\x1b"):
            asyncio.run(server.resume())


@pytest.mark.parametrize("text", ["[" * 9000, "3", '"x"', "", "{", "[]"])
def test_an_answer_of_another_form_is_a_server_that_failed(text: str) -> None:
    with server_that(saying(text)) as server, pytest.raises(ServerFailed):
        asyncio.run(server.pause())


@pytest.mark.parametrize(
    "ranks", [None, [], {}, [{}], [{"checksums": [1]}], [{"checksums": {"a": "9" * 9999}}]]
)
def test_checksums_that_are_none_are_a_server_that_failed(ranks: Any) -> None:
    with server_that(saying(json.dumps({"ranks": ranks}))) as server:
        if ranks == []:
            assert asyncio.run(server.checksums()) == []  # `verify` misses all tensors
        else:
            with pytest.raises(ServerFailed):
                asyncio.run(server.checksums())


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
