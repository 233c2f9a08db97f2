"""A slow link on one machine: a proxy on loopback that carries so many bytes a second.

Both directions have the rate each, over all connections together. There is no delay beside that
of loopback, and no loss. With a certificate it is a proxy for HTTPS before a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading

CHUNK_BYTES = 2**16


class ShapedLink:
    """A proxy on loopback to a port of this machine; it runs in a thread, within a `with`."""

    def __init__(
        self, port: int, bytes_per_s: float, certificate: ssl.SSLContext | None = None
    ) -> None:
        """Listen nowhere yet."""
        self._certificate = certificate
        self.port = 0  # that it listens on
        self._bytes_per_s = bytes_per_s
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    @property
    def url(self) -> str:
        """Return the URL at which the server is reached over the link."""
        return f"http{'s' if self._certificate else ''}://127.0.0.1:{self.port}"

    def __enter__(self) -> ShapedLink:
        """Listen, and carry bytes until the context ends."""
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *raised: object) -> None:
        """Close every connection."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._free_at = {"to": 0.0, "from": 0.0}
        server = await asyncio.start_server(
            self._carry, "127.0.0.1", 0, limit=CHUNK_BYTES, ssl=self._certificate
        )
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        carrying = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            with contextlib.closing(far_writer):
                ways = (
                    self._pump("to", reader, far_writer),
                    self._pump("from", far_reader, writer),
                )
                await asyncio.gather(*ways)

    async def _pump(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                now = self._loop.time()
                self._free_at[way] = max(now, self._free_at[way]) + len(chunk) / self._bytes_per_s
                await asyncio.sleep(self._free_at[way] - now)
                writer.write(chunk)
                await writer.drain()
        with contextlib.suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()
            else:  # TLS has no half of a connection
                writer.close()
