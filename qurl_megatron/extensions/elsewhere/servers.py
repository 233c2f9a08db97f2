"""Servers that somebody started elsewhere, with `qurl serve`: their descriptions and checks.

The run reaches such a server by its URL and a key only: it has no process, log, shared file system
or process group of it.
"""

import asyncio
import dataclasses
import ipaddress
import json
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from urllib.parse import urlsplit

from qurl_megatron.config.keep import kept_layers, layers_of
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import from_tree
from qurl_megatron.extensions.elsewhere.wire import Description
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout.requests import NoAnswer
from qurl_megatron.rollout.server import Server, those_that
from qurl_megatron.rollout.wire import DESCRIPTION_PATH, RUN_PATH, escaped

DESCRIBE_TIMEOUT_S = 30.0
RELEASE_TIMEOUT_S = 5.0


def remote_server(url: str, key: str, run: str = "") -> Server:
    """Return a server that somebody started elsewhere, from its URL and key.

    `run` names the run that the server is asked to serve.
    """
    return Server(url, key, is_remote=True, run=run)


def description_of(architecture: Architecture, config: Config) -> Description:
    """Return the description that a server must give of itself to fit a run."""
    quantization, rollout = config.quantization, config.rollout
    method = ENGINE_METHODS.get(quantization.weight_format)
    model = json.loads(json.dumps(dataclasses.asdict(architecture)))  # as it comes over HTTP
    kept = layers_of(kept_layers(quantization.keep, architecture)) if method else []
    records = rollout.routing != "ignore"
    return Description(version("qurl-megatron"), method, rollout.max_length, model, kept, records)


class Unreachable(ConfigError):
    """A server does not answer."""


def check_servers(
    config: Config, key: str, run: str = "", without: Callable[[Unreachable], None] | None = None
) -> None:
    """Check that each server of `rollout.servers_at` answers, and can sample for the run.

    Args:
        run: the run's name, if it has begun; a server that serves another run is refused.
        without: called for each server that does not answer; None: that is an error too.

    Raises:
        ConfigError: one does not answer or fit; the message names it and says why.
    """
    for url in config.rollout.servers_at:
        try:
            _ = urlsplit(url).port  # raises if it is not a port
            is_safe = is_private(url)
        except ValueError as error:
            raise ConfigError(f"rollout.servers_at: {url} is not a URL: {error}") from None
        if not (config.rollout.servers_plain_http or is_safe):
            raise ConfigError(
                f"rollout.servers_at: {url} would carry the key and all completions in the clear; "
                "use https:// or an SSH tunnel, or set rollout.servers_plain_http=true if you "
                "trust every machine on the way"
            )
    architecture = Architecture.from_directory(config.model)
    needed = dataclasses.replace(description_of(architecture, config), run=run)
    for problem in asyncio.run(_problems(config.rollout.servers_at, key, needed)):
        if without is not None and isinstance(problem, Unreachable):
            without(problem)
        elif problem is not None:
            raise problem


async def _problems(
    urls: Sequence[str], key: str, needed: Description
) -> list[BaseException | None]:
    """Ask all servers at once; return an error, or None, for each."""

    async def check(url: str) -> None:
        description = await describe(url, key)
        try:
            description.check(url, needed)
        except ConfigError as error:  # quotes the server
            raise ConfigError(escaped(str(error))) from None

    return await asyncio.gather(*map(check, urls), return_exceptions=True)


def is_private(url: str) -> bool:
    """Return True if nobody between this machine and the server can read the traffic."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


async def describe(url: str, key: str) -> Description:
    """Ask a server for its description.

    Raises:
        Unreachable: the server does not answer.
        ConfigError: the server takes another key, or was not started by `qurl serve`.
    """
    server = f"rollout.servers_at: the server at {url}"
    try:
        answer = await remote_server(url, key).ask(
            "GET", DESCRIPTION_PATH, timeout_s=DESCRIBE_TIMEOUT_S
        )
    except NoAnswer as error:
        raise Unreachable(f"{server} {error}; start it with qurl serve") from None
    if answer.status == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(f"{server} was started with another key; give both sides the same")
    try:
        return from_tree(Description, answer.fields())
    except ValueError:
        raise ConfigError(
            f"{server} is not a server of qurl serve: it answers {DESCRIPTION_PATH} with status "
            f"{answer.status}"
        ) from None


def release(servers: Iterable[Server]) -> None:
    """Let the servers serve another run, if they answer."""

    async def leave(server: Server) -> bool:
        return (await server.ask("DELETE", RUN_PATH, timeout_s=RELEASE_TIMEOUT_S)).is_success

    asyncio.run(those_that(servers, leave))
