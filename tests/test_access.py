"""Access to a server: what is closed of all that SGLang has, and what bodies it lets through.

The server behind it is not SGLang's here; `tests/e2e/test_server.py` sends a real one what would
end it.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from distributed import run_ranks
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.server import RELEASED, Server
from qurl_megatron.sglang_plugin import access
from qurl_megatron.sglang_plugin import routes as plugin
from qurl_megatron.sglang_plugin.access import ROUTES
from qurl_megatron.weight_sync.bucket import (
    announce,
    announce_delta,
    announce_in_place,
    model_tensors,
)
from sent import packed
from tiny import build_tiny_model, quantized

SERVER = Server("http://a", "0123456789abcdef", is_remote=True, run="first")
OWN = {("GET", "/qurl"), ("POST", "/qurl/weights"), ("DELETE", "/qurl/run")}
WITH_METRICS = {("GET", "/metrics")}  # SGLang adds it if a run sets `enable_metrics`


def routes_of_sglang() -> set[tuple[str, str]]:
    os.environ["SGLANG_PLATFORM"] = "qurl_cpu"
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import app

    def walk(routes: list[Any]) -> Iterator[tuple[str, str]]:
        for route in routes:
            if hasattr(route, "path"):
                for method in getattr(route, "methods", None) or ["WEBSOCKET"]:
                    yield method, route.path
            else:  # of a router that the application includes
                yield from walk(route.original_router.routes)

    return set(walk(app.routes))


@pytest.fixture(scope="module")
def of_sglang() -> set[tuple[str, str]]:
    (routes,) = run_ranks(routes_of_sglang, 1)
    return routes


def test_every_line_of_the_table_lets_in_a_route_that_sglang_has(
    of_sglang: set[tuple[str, str]],
) -> None:
    assert ROUTES.keys() - OWN - WITH_METRICS < of_sglang


@pytest.fixture
def http(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Return a server that answers what reaches it with the path and the body that came."""
    app = FastAPI()
    held = model_tensors(Architecture.from_directory(model_dir), "int8", [])
    monkeypatch.setattr(plugin, "_held", lambda: held)
    plugin.add_routes(add_api_key_middleware, app, api_key=SERVER.api_key, admin_api_key=None)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
    async def echo(request: Request) -> Any:
        return {"path": request.url.path, "body": (await request.body()).decode()}

    @app.websocket("/v1/realtime")
    async def speak(socket: WebSocket) -> None:
        await socket.accept()

    return TestClient(app, headers=SERVER.headers)


def test_a_route_that_is_not_in_the_table_answers_nobody_whatever_key_or_run_is_given(
    http: TestClient, of_sglang: set[tuple[str, str]]
) -> None:
    closed = of_sglang - ROUTES.keys()
    assert {("POST", "/flush_cache"), ("GET", "/weights_checker")} < closed
    for method, path in sorted(closed | {("POST", "/of_the_next_release")}):
        if method != "WEBSOCKET":
            assert http.request(method, path, json={}).status_code == 404, (method, path)
    for path in ("/health/", "//health", "/health_generate", "/generate/", "/%2e%2e/health"):
        assert http.get(path).status_code == 404, path
    assert http.options("/generate").status_code == 404
    with pytest.raises(WebSocketDisconnect), http.websocket_connect("/v1/realtime"):
        pass


def test_only_what_is_open_answers_without_the_key(http: TestClient) -> None:
    for method, path in ROUTES:
        answer = http.request(method, path, headers={"Authorization": "Bearer no"})  # another key
        assert answer.status_code == (200 if path in ("/health", "/metrics") else 401), path


def test_what_changes_a_server_needs_the_name_of_a_run(http: TestClient) -> None:
    del http.headers["Qurl-Run"]
    changing = {path for (_, path), route in ROUTES.items() if route.changes}
    assert {"/qurl/weights", "/update_weights_from_distributed"} < changing
    for path in changing:
        answer = http.post(path, json={})
        assert answer.status_code == 400 and "needs the name of a run" in answer.text, path


@dataclass(frozen=True)
class Recorded(Server):
    """Keeps what a learner would send."""

    posted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def _post(self, path: str, body: dict[str, Any], **_: Any) -> Any:
        self.posted.append((path, body))
        return {"ranks": []}


async def requests_of_a_run(model_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    server = Recorded(**vars(SERVER))
    await server.init_weights_group(
        master_address="fe80::1",
        master_port=20001,
        world_size=3,
        group_name="weights-0123456789abcdef.7",
        backend="gloo",
    )
    await server.pause()
    await server.checksums()
    await server.parameters()
    await server.resume()
    await server.sleep(RELEASED["all"])
    await server.wake(["kv_cache"])
    bucket = packed(quantized(model_dir, "int8"))
    for manifest in (announce([[[bucket]]]), announce_delta(3, 2), announce_in_place()):
        await server.update_weights(
            manifest.names,
            manifest.dtypes,
            manifest.shapes,
            group_name="weights-0123456789abcdef",
            weight_version=4,
        )
    sampling = {"n": 2, "max_new_tokens": 3, "stop_token_ids": [1], "top_p": 1.0, "top_k": -1}
    sample = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
    return [*server.posted, ("/generate", sample)]


def test_what_a_run_sends_reaches_sglang_as_it_was_sent(http: TestClient, model_dir: Path) -> None:
    for path, body in asyncio.run(requests_of_a_run(model_dir)):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["path"] == path and json.loads(answer.json()["body"]) == body


def test_a_body_that_lacks_a_field_or_has_one_too_many_or_of_another_type_is_refused(
    http: TestClient, model_dir: Path
) -> None:
    for path, body in asyncio.run(requests_of_a_run(model_dir)):
        required = {name for name, field in ROUTES["POST", path].body.model_fields.items()  # type: ignore[union-attr]
                    if field.is_required()}  # fmt: skip
        wrong = [{**body, "session_id": 1}, [body], None]
        wrong += [{key: body[key] for key in body if key != left_out} for left_out in required]
        wrong += [{**body, name: {"a": ["b"]}} for name in body]
        for one in wrong:
            answer = http.post(path, json=one)
            assert answer.status_code == 400, (path, one)
            assert answer.json()["success"] is False and answer.json()["message"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["bucket of sender 0", "../../etc"]}, "../../etc: the model has no such tensor"),
        ({"names": ["bucket of sender 0", "delta of version 3"]}, "it must be the only name"),
        ({"names": ["delta of version x", "model.norm.weight"]}, "no such tensor"),
        ({"dtypes": ["uint8", "load"]}, "model.norm.weight: load [64]; the model's is bfloat16"),
        ({"dtypes": ["uint8", "float32"]}, "the model's is bfloat16 [64]"),
        ({"dtypes": ["int8", "bfloat16"]}, "a marker is uint8 and has one number"),
        ({"shapes": [[128], [65]]}, "model.norm.weight: bfloat16 [65]; the model's is"),
        ({"shapes": [[-1], [64]]}, "a marker is uint8 and has one number"),
        ({"shapes": [[128]]}, "not equally long"),
        ({"names": [], "dtypes": [], "shapes": []}, "not equally long"),
        ({"weight_version": "-1"}, "weight_version: Value error, a version is a number"),
        ({"weight_version": None}, "weight_version: Input should be a valid string"),
        ({"group_name": "file:/etc/passwd"}, "group_name: Value error, a group's name has"),
        ({"group_name": "http://host/x"}, "group_name: Value error, a group's name has"),
        ({"load_format": "auto"}, "load_format: Input should be 'flattened_bucket'"),
        ({"\x1b[2J": 1}, "\\x1b[2J: Extra inputs are not permitted"),
    ],
)
def test_an_update_that_is_not_of_this_model_is_refused_at_the_door(
    http: TestClient, changes: dict[str, Any], message: str
) -> None:
    update = {
        "names": ["bucket of sender 0", "model.norm.weight"],
        "dtypes": ["uint8", "bfloat16"],
        "shapes": [[128], [64]],
        "group_name": "weights-1",
        "load_format": "flattened_bucket",
        "weight_version": "1",
        "flush_cache": True,
    }
    path = "/update_weights_from_distributed"
    assert http.post(path, json=update).status_code == 200
    answer = http.post(path, json={**update, **changes})
    assert answer.status_code == 400 and message in answer.json()["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "recursion limit exceeded"),
        (b'{"mode": "retract"', "Invalid JSON"),
        (b"\xff\x00", "Invalid JSON"),
        (b"x" * 2000, "a body of more than 1000 bytes"),
    ],
)
def test_a_body_that_is_no_json_or_too_large_is_refused(
    http: TestClient, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    if b"x" in content:
        monkeypatch.setattr(access, "LARGEST_HEADER_BYTES", 1000)
    answer = http.post("/pause_generation", content=content)
    assert answer.status_code == 400 and message in answer.json()["message"]


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "fp8", "fp8-block"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_tensors_of_a_model_are_those_that_a_learner_sends(
    tmp_path: Path, family: Any, weight_format: Any
) -> None:
    model = build_tiny_model(tmp_path / "model", family)
    sent = quantized(model, weight_format)
    held = model_tensors(Architecture.from_directory(model), weight_format, [])
    assert {name: (each.dtype, each.shape) for name, each in held.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()
    }
