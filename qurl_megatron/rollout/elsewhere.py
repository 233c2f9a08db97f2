"""Servers that somebody started elsewhere, with `qurl serve`: what they are, and weights by HTTP.

The run reaches such a server by its URL and a key, and has nothing else of it: no process, no log,
no shared file system, no process group.
"""

import contextlib
import dataclasses
import ipaddress
import json
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import httpx
from torch import Tensor

from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import from_tree
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout.control import UpdateRefused
from qurl_megatron.rollout.server import Server, connect
from qurl_megatron.rollout.wire import (
    DESCRIPTION_PATH,
    RUN_PATH,
    WEIGHTS_PATH,
    BucketHeader,
    Description,
)

DESCRIBE_TIMEOUT_S = 30.0
RELEASE_TIMEOUT_S = 5.0
_CHUNK_BYTES = 2**20  # copied from the device and written to the connection at once


def remote_server(url: str, key: str, run: str = "") -> Server:
    """Return a server that somebody started elsewhere, of which only URL and key are known.

    `run` names the run that the server is asked to serve.
    """
    return Server(url, key, is_remote=True, run=run)


def description_of(architecture: Architecture, config: Config) -> Description:
    """Return what a server of this version of the package says of itself, if it fits a run."""
    quantization, rollout = config.quantization, config.rollout
    method = ENGINE_METHODS.get(quantization.format)
    model = json.loads(json.dumps(dataclasses.asdict(architecture)))  # as it comes over HTTP
    kept = kept_layers(quantization.keep, architecture) if method else []
    records = rollout.routing != "ignore"
    return Description(version("qurl-megatron"), method, rollout.max_length, model, kept, records)


class Unreachable(ConfigError):
    """A server does not answer."""


def check_servers(
    config: Config, key: str, run: str = "", without: Callable[[Unreachable], None] | None = None
) -> None:
    """Check that each server of `rollout.servers_at` answers, and can sample for the run.

    Args:
        run: names the run, if it has begun; a server that serves another is refused.
        without: called for each that does not answer; None: that is an error too.

    Raises:
        ConfigError: one does not or cannot; the message names it and says why.
    """
    for url in config.rollout.servers_at:
        try:
            _ = urlsplit(url).port  # httpx takes any number
            is_safe = is_private(url)
        except (ValueError, httpx.InvalidURL) as error:
            raise ConfigError(f"rollout.servers_at: {url} is no URL: {error}") from None
        if not (config.rollout.servers_plain_http or is_safe):
            raise ConfigError(
                f"rollout.servers_at: {url} would carry the key and all completions in the clear; "
                "use https:// or an SSH tunnel, or set rollout.servers_plain_http=true if you "
                "trust every machine on the way"
            )
    architecture = Architecture.from_directory(config.model)
    needed = dataclasses.replace(description_of(architecture, config), run=run)
    for url in config.rollout.servers_at:
        try:
            describe(url, key).check(url, needed)
        except Unreachable as error:
            if without is None:
                raise
            without(error)


def is_private(url: str) -> bool:
    """Return whether nobody between this machine and the server can read what is sent."""
    parts = httpx.URL(url)
    if parts.scheme == "https" or parts.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.host).is_loopback
    except ValueError:  # a name
        return False


def describe(url: str, key: str) -> Description:
    """Ask a server what it is.

    Raises:
        Unreachable: it does not answer.
        ConfigError: it takes another key, or was not started by `qurl serve`.
    """
    server = f"rollout.servers_at: the server at {url}"
    try:
        with connect(remote_server(url, key), DESCRIBE_TIMEOUT_S) as http:
            answer = http.get(DESCRIPTION_PATH)
    except httpx.RequestError as error:
        why = str(error) or type(error).__name__
        raise Unreachable(f"{server} cannot be reached: {why}; start it with qurl serve") from None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"{server} was started with another key; give both sides the same")
    try:
        return from_tree(Description, answer.json())
    except ValueError:
        raise ConfigError(
            f"{server} is none of qurl serve: it answers {DESCRIPTION_PATH} with status "
            f"{answer.status_code}"
        ) from None


def revive(server: Server) -> bool:
    """Return whether a server answers, after ending a pause in which another learner left it."""
    with contextlib.suppress(httpx.TransportError), connect(server, DESCRIBE_TIMEOUT_S) as http:
        http.post("/continue_generation", json={})
        return http.get("/health").is_success
    return False


def release(server: Server) -> None:
    """Let the server serve another run, if it answers."""
    with contextlib.suppress(httpx.TransportError), connect(server, RELEASE_TIMEOUT_S) as http:
        http.delete(RUN_PATH)


def post_weights(
    server: Server, http: httpx.Client, header: BucketHeader, payload: Tensor
) -> float:
    """Send a bucket to a server; return for how many seconds it was on its way.

    Args:
        http: the server's client, whose time limit is the longest time without progress.
        payload: `[bytes]` uint8, on any device.

    Raises:
        UpdateRefused: the server answered that it did not load it.
        ServerFailed: the server did not answer.
    """
    start = header.pack()
    length = str(len(start) + len(payload))
    begin = time.perf_counter()
    try:
        response = http.post(
            WEIGHTS_PATH,
            content=_chunks(start, payload),
            headers={"Content-Length": length, "Content-Type": "application/octet-stream"},
        )
    except httpx.TimeoutException:
        raise server.failed("took no weights in time") from None
    except httpx.TransportError as error:
        raise server.failed(f"closed the connection in a publish ({error!r})") from None
    answer: dict[str, Any] = {}
    if response.headers.get("Content-Type") == "application/json":
        answer = response.json()
    if response.is_error or not answer.get("success"):
        message = answer.get("message") or response.text
        raise UpdateRefused(str(server.failed(f"refused weights: {message}")))
    return time.perf_counter() - begin - float(answer["load_s"])


def _chunks(start: bytes, payload: Tensor) -> Iterator[bytes]:
    yield start
    for chunk in payload.split(_CHUNK_BYTES):
        yield chunk.cpu().numpy().tobytes()
