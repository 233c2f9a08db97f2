"""The way of weights over HTTP: bodies, routes, compression, and the one run of a server.

Both ends are here, and SGLang's layers and loader. Its server is not:
`tests/e2e/test_servers_at.py` starts that.
"""

import asyncio
import dataclasses
import json
import re
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from described import KEPT, KEY, description
from fastapi import FastAPI
from starlette.testclient import TestClient
from torch import Tensor

import sglang_loader
from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.extensions.elsewhere import receiver
from qurl_megatron.extensions.elsewhere import transport as channels
from qurl_megatron.extensions.elsewhere.servers import remote_server
from qurl_megatron.extensions.elsewhere.transport import HttpChannel, HttpDestination
from qurl_megatron.extensions.elsewhere.wire import BucketHeader, Description
from qurl_megatron.rollout import server as servers
from qurl_megatron.rollout.requests import Reply
from qurl_megatron.rollout.server import UpdateRefused
from qurl_megatron.sglang_plugin import access, weights
from qurl_megatron.sglang_plugin import routes as plugin
from qurl_megatron.sglang_plugin.access import AccessControl
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket, SentTensor
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.delta_gather import delta_bucket
from sent import packed
from tiny import quantized

HELD = {"a": SentTensor("a", torch.int8, (3,))}


async def bodies(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def test_a_body_is_read_however_it_is_cut_and_refused_if_it_is_not_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = BucketHeader(["a"], ["int8"], [[3]], 7, True, num_bytes=3, is_compressed=False)
    squeezed = dataclasses.replace(header, is_compressed=True)
    named = lambda name: dataclasses.replace(header, names=[name]).pack()  # noqa: E731
    body, small = header.pack() + b"x\nz", squeezed.pack() + zlib.compress(b"x\nz")
    for whole, sent in ((body, header), (small, squeezed)):
        for size in (1, 5, len(whole) - 2, len(whole)):
            file = BytesIO()
            chunks = [whole[start : start + size] for start in range(0, len(whole), size)]
            assert asyncio.run(receiver.receive_body(bodies(*chunks), file, HELD)) == sent
            assert file.getvalue() == b"x\nz"
    monkeypatch.setattr(receiver, "LARGEST_HEADER_BYTES", 1000)
    for wrong, message in (
        (body[:-1], "not complete: 2 bytes of weights, not 3 bytes"),
        (body + b"!", "not complete: 4 bytes"),
        (body[:20], "not complete: 0 bytes of weights, not a header"),
        (b"", "not complete"),
        (b"{" * 1001, "a header of more than 1000 bytes"),
        (b"{}\n", "^names: field required"),
        (b"\xff\n", "Invalid JSON: expected value"),
        (b"[" * 900 + b"\n", "Invalid JSON: recursion limit exceeded"),
        (named("../../etc"), "../../etc: the model has no such tensor"),
        (small[:-8], "not complete: 0 bytes of weights, not 3 bytes"),
        (squeezed.pack() + b"x\nz", "incorrect header check"),
        # No more than one byte too many is ever in memory.
        (squeezed.pack() + zlib.compress(bytes(2**20)), "not complete: 4 bytes of weights, not 3"),
        (dataclasses.replace(squeezed, num_bytes=-1).pack() + small, "num_bytes=-1: "),
    ):
        with pytest.raises((ValueError, zlib.error), match=message):
            asyncio.run(receiver.receive_body(bodies(wrong), BytesIO(), HELD))


class ServerProcess:
    """The HTTP routes of a server, and models that the real loader fills, in this process."""

    def __init__(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.utils.auth import add_api_key_middleware

        self.ranks = sglang_loader.build_ranks(model_dir, "int8", 2)
        self.versions: list[tuple[str, bool]] = []
        self.files: list[Path] = []
        self.arguments = SimpleNamespace(
            quantization="qurl_int8",
            context_length=100 + CONTEXT_RESERVE,
            model_path=str(model_dir),
            json_model_override_args="{}",
            enable_return_routed_experts=False,
        )
        manager = SimpleNamespace(
            server_args=self.arguments, update_weights_from_distributed=self._update
        )
        monkeypatch.setattr(plugin, "_tokenizer_manager", lambda: manager)
        app = FastAPI()
        plugin.add_routes(add_api_key_middleware, app, api_key=KEY, admin_api_key=None)
        self.http = TestClient(app)

        async def ask(method: str, url: str, headers: dict[str, str], **rest: Any) -> Reply:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
                said = await http.request(method, url, headers=headers, content=rest["data"])
            return Reply(said.status_code, said.headers["Content-Type"], said.content)

        monkeypatch.setattr(servers, "ask", ask)

    async def _update(self, request: Any) -> tuple[bool, str]:
        self.versions.append((request.weight_version, request.flush_cache))
        self.files.append(Path(request.group_name.partition(":")[2]))
        assert self.files[-1].stat().st_mode & 0o777 == 0o600
        for rank, model in enumerate(self.ranks):
            updater = SimpleNamespace(
                get_model=lambda model=model: model, device="cpu", _model_update_group={}
            )
            with sglang_loader.as_rank(rank, len(self.ranks)):
                try:
                    weights.receive(
                        _never, updater, names=request.names, dtypes=request.dtypes,
                        shapes=request.shapes, group_name=request.group_name,
                    )  # fmt: skip
                except RuntimeError as error:
                    return False, f"Failed to receive weights: {error}"
        return True, "loaded"

    def channel(self, key: str = KEY) -> HttpChannel:
        server = dataclasses.replace(remote_server("http://a", key, "first"), timeout_s=1.0)
        channel = HttpChannel(HttpDestination("weights", server, flush_cache=True))
        return channel


def _never(*arguments: object, **named: object) -> None:
    raise AssertionError("not a file")


@pytest.fixture
def process(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    with sglang_loader.engine(model_dir):
        yield ServerProcess(model_dir, monkeypatch)


def bucket_of_delta(old: dict[str, Tensor], new: dict[str, Tensor], base: int) -> Bucket:
    changes = [delta.compare(name, (0, 0), old[name], new[name], is_relative=True) for name in new]
    found = [change for change in changes if change]
    return delta_bucket(base, delta.pack(found, torch.device("cpu")))


def test_key_frames_and_deltas_plain_or_compressed_arrive_bit_for_bit(
    process: ServerProcess, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MEASURED_BYTES", 1)
    check, threads = receiver.check_delta, []

    def watched(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        check(*arguments)

    monkeypatch.setattr(receiver, "check_delta", watched)
    weights = quantized(model_dir, "int8")
    channel = process.channel()
    whole = sum(tensor.nbytes for tensor in weights.values())
    assert channel.send(packed(weights), 1).result() == whole
    assert 0 < channel.rate < float("inf")
    for version, rate in (
        (2, channels.COMPRESSION_PAYS_BELOW_BYTES_PER_S),
        (3, 1.0),  # what crosses the link is then counted, not what is sent
    ):
        new = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in new.values():
            if tensor.dtype == torch.int8:
                tensor.view(-1)[version::50] += 1
        channel.rate = rate
        bucket = bucket_of_delta(weights, new, version - 1)
        num_bytes = channel.send(bucket, version).result()
        assert num_bytes < len(bucket.flat) / 2 if rate == 1.0 else num_bytes == len(bucket.flat)
        weights = new
        held = sglang_loader.whole_tensors(process.ranks, weights)
        for name, tensor in weights.items():
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name
    empty = delta_bucket(3, torch.empty(0, dtype=torch.uint8))  # brings the version alone
    assert channel.send(empty, 4).result() < 10 and channel.failure is None
    assert process.versions == [("1", True), ("2", True), ("3", True), ("4", True)]
    assert [file.exists() for file in process.files] == [False] * 4
    # A server that reads a large delta goes on to answer others.
    assert len(threads) == 3 and threading.main_thread() not in threads


def test_a_full_disk_of_a_server_is_told_to_the_run(
    process: ServerProcess, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(receiver, "receive_body", fail)
    bucket = packed(quantized(model_dir, "int8"))
    channel = process.channel()
    assert channel.send(bucket, 1).result() == 0
    assert isinstance(channel.failure, UpdateRefused)
    assert re.search("http://a refused weights: .* No space left on device", str(channel.failure))


def test_the_routes_need_the_key_and_say_why_weights_are_refused(
    process: ServerProcess, model_dir: Path
) -> None:
    keep = {"quantization_config": {"modules_to_not_convert": [KEPT]}}
    process.arguments.json_model_override_args = json.dumps(keep)
    described = process.http.get("/qurl", headers={"Authorization": f"Bearer {KEY}"})
    assert Description(**described.json()) == description(model_dir)
    of_another_model = Change.whole("../../etc", (0, 0), torch.zeros(8))
    wrong = delta_bucket(1, delta.pack([of_another_model], torch.device("cpu")))
    channel = process.channel()
    for _ in range(2):  # after a failure a channel sends nothing more
        assert channel.send(wrong, 1).result() == 0
    assert isinstance(channel.failure, UpdateRefused) and not process.versions
    assert "http://a refused weights: ../../etc: the model has no such tensor" in str(
        channel.failure
    )
    noise = process.channel()
    assert noise.send(delta_bucket(1, torch.full((16,), 255, dtype=torch.uint8)), 1).result() == 0
    assert "split_with_sizes expects" in str(noise.failure) and not process.versions
    stranger = process.channel("another-key-of-it")
    assert process.http.get("/qurl").status_code == 401
    assert stranger.send(wrong, 1).result() == 0
    assert "Unauthorized" in str(stranger.failure)


def test_who_has_no_key_can_neither_claim_a_server_nor_learn_which_run_it_serves(
    process: ServerProcess,
) -> None:
    own = remote_server("http://a", KEY, "first").headers
    stranger = {"Qurl-Run": "intruder"}
    for headers in (stranger, stranger | {"Authorization": "Bearer another-key-of-it"}):
        assert process.http.post("/generate", headers=headers).status_code == 401
        process.http.get("/health", headers=headers)  # needs no key
    assert process.http.get("/qurl", headers=own).json()["run"] == ""
    process.http.post("/qurl/weights", headers=own)
    assert process.http.get("/qurl", headers=own).json()["run"] == "first"
    refused = process.http.post("/generate", headers=stranger)
    assert refused.status_code == 401 and "first" not in refused.text


def test_a_server_serves_one_run_until_it_is_released_or_silent_for_long(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(method: str, path: str, run: str = "") -> httpx.Response:
        headers = remote_server("http://a", KEY, run).headers
        return process.http.request(method, path, headers=headers)

    def served() -> str:
        return ask("GET", "/qurl", "second").json()["run"]

    assert served() == ""
    assert ask("POST", "/qurl/weights", "first").status_code == 400  # no body, and yet a request
    assert served() == "first"
    for path in ("/qurl/weights", "/generate", "/pause_generation"):
        refused = ask("POST", path, "second")
        assert refused.status_code == 409
        assert refused.json() == {"success": False, "message": "it serves the run first"}
    assert ask("POST", "/generate").status_code == 400  # of no run, as a person's; it has no body
    assert ask("POST", "/pause_generation").json()["message"].startswith("it needs the name of a")
    ask("DELETE", "/qurl/run", "second")
    assert served() == "first"
    ask("DELETE", "/qurl/run", "first")
    assert served() == ""
    assert ask("POST", "/qurl/weights", "second").status_code == 400
    assert ask("POST", "/qurl/weights", "first").status_code == 409
    monkeypatch.setattr(access, "CLAIM_S", 0.0)
    assert ask("POST", "/qurl/weights", "first").status_code == 400
    own = AccessControl(dict)

    async def take_longer(scope: Any, *_: Any) -> None:
        assert own.run == "first"
        served_in_time.append(scope)

    served_in_time: list[Any] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/qurl/weights",
        "headers": [(b"qurl-run", b"first")],
    }
    asyncio.run(own.guard(take_longer)(scope, None, None))
    assert served_in_time == [scope]
    assert own.run == ""


def test_what_is_not_this_projects_goes_to_sglangs_own_code() -> None:
    request: Any = {"names": ["model.norm.weight"], "dtypes": ["int8"], "shapes": [[1]]}
    request |= {"group_name": "a group", "load_format": "flattened_bucket"}
    passed_on = weights.receive(lambda updater, **given: (updater, given), "updater", **request)
    assert passed_on == ("updater", request)


def test_the_log_of_a_servers_arguments_lacks_its_key() -> None:
    logged = plugin.without_key(vars, SimpleNamespace(api_key=KEY, port=7))
    assert logged == {"port": 7}
