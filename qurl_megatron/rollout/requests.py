"""One request to a server, and its answer: in time, complete, and of limited size.

A server that somebody else runs may do anything. It cannot stall a run: a time limit covers the
whole answer, since a byte now and then would satisfy a limit on each read. It cannot fill the
memory: the size of an answer is limited, and nothing is decompressed. Its text is printed on one
line, without control characters.
"""

import asyncio
import functools
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from qurl_megatron.rollout.wire import escaped, read_json

LARGEST_ANSWER_BYTES = 2**20  # unless a request says otherwise
SLOWEST_BYTES_PER_S = 5e5  # of a link: 4 Mb/s
LATENCY_S = 60.0  # that a link and a server may add to a transfer
# Nothing is sent while a long answer is sampled. Routers forget a connection that is silent for
# minutes; neither side would be told.
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 30),
]


class NoAnswer(Exception):
    """A server gave no complete answer; the text says what it did instead."""


@dataclass(frozen=True)
class Reply:
    """A server's answer to one request."""

    status: int
    media_type: str
    content: bytes

    @property
    def is_success(self) -> bool:
        """True if the server says that it did what was asked."""
        return 200 <= self.status < 300

    @property
    def is_json(self) -> bool:
        """True if the answer is JSON; a proxy before the server answers in another form."""
        return self.media_type.startswith("application/json")

    @property
    def text(self) -> str:
        """The beginning of the content, for a message."""
        return escaped(self.content[:4096].decode(errors="replace"))

    def fields(self) -> dict[str, Any]:
        """Return the content, a JSON object.

        Raises:
            ValueError: it is something else.
        """
        content = read_json(self.content)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return the certificates that verify servers elsewhere; to read them takes milliseconds."""
    return ssl.create_default_context()


def connect(most: int = 0) -> aiohttp.TCPConnector:
    """Return a connector that has at most this many connections open; 0: any number.

    It keeps no idle connection: a server closes one after 5 s, maybe just when it is used again,
    and that would look like the death of the server.
    """
    return aiohttp.TCPConnector(
        limit=most, force_close=True, ssl=certificates(), socket_factory=_open_socket
    )


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(*address[:3])
    for option in KEEP_ALIVE:
        opened.setsockopt(*option)
    return opened


def transfer_s(num_bytes: int) -> float:
    """Return how many seconds a transfer may take."""
    return LATENCY_S + num_bytes / SLOWEST_BYTES_PER_S


async def ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    timeout_s: float | None,
    most_bytes: int = LARGEST_ANSWER_BYTES,
    connector: aiohttp.TCPConnector | None = None,
    **request: Any,
) -> Reply:
    """Send a request; return the answer, whatever its status.

    It ignores variables such as HTTP_PROXY: a proxy could not reach loopback, and would read what
    is sent there.

    Args:
        timeout_s: time for request and answer. None: any time until the answer begins, and then
            `transfer_s`.
        most_bytes: largest size of the answer.
        connector: opens the connection; None: a new one.
        request: the rest of the request, in aiohttp's words.

    Raises:
        NoAnswer: it did not come in time, or was too large, or the connection was closed.
    """
    path = URL(url).path
    content = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s) as limit,
            aiohttp.ClientSession(
                connector=connector or connect(),
                connector_owner=connector is None,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(),  # none of aiohttp's own
                auto_decompress=False,
            ) as session,
            session.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                allow_redirects=False,
                **request,
            ) as response,
        ):
            if timeout_s is None:
                timeout_s = transfer_s(most_bytes)
                limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > most_bytes:
                    raise NoAnswer(f"answered {path} with more than {most_bytes:,} bytes")
    except TimeoutError:
        within = "in time" if timeout_s is None else f"in {timeout_s:g} s"
        raise NoAnswer(f"did not answer {path} {within}") from None
    except aiohttp.ClientConnectorError as error:
        raise NoAnswer(f"cannot be reached: {escaped(str(error))}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(f"closed the connection in {path} ({escaped(repr(error))})") from None
    return Reply(response.status, response.headers.get("Content-Type", ""), bytes(content))
