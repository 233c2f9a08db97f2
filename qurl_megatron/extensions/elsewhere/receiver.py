"""The routes by which a server takes weights over HTTP.

The HTTP process writes the values of a bucket to a file that only this user can read. Then it asks
the schedulers for an update, as for any bucket, and names the file where a process group would be.
`weights.receive` reads it there. So pausing, versions and refusals are those of every other update.
The file is gone when the learner gets its answer. A tensor that the model does not have, or a delta
that cannot be read, is refused before the schedulers hear of it.
"""

import asyncio
import dataclasses
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, Any, Protocol

from starlette.responses import JSONResponse
from torch import Tensor

from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.extensions.elsewhere.wire import BucketHeader, Description
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.wire import LARGEST_HEADER_BYTES, RUN_HEADER, escaped
from qurl_megatron.weight_sync.bucket import (
    FILE_PREFIX,
    SentTensor,
    changed_version,
    check_manifest,
    read_file,
)
from qurl_megatron.weight_sync.delta import unpack


class Claimed(Protocol):
    """The server's access control, which knows the run that the server serves."""

    @property
    def run(self) -> str:
        """The run's name; empty if there is none."""

    def release(self, run: str) -> None:
        """End the claim of this run; do nothing if another run has it."""


@dataclass(frozen=True)
class Receiver:
    """The routes of `wire.py` on a server; the fields tell what it is and holds."""

    claimed: Claimed
    arguments: Callable[[], Any]  # the server's SGLang arguments
    kept: Callable[[], list[str]]  # layers in BF16
    held: Callable[[], Mapping[str, SentTensor]]  # the tensors that the server takes, by name
    update: Callable[..., Awaitable[tuple[bool, str]]]  # whether it loaded, and if not, why

    async def release(self, request: Any) -> Any:
        """End the claim of the run that asks for it."""
        self.claimed.release(request.headers.get(RUN_HEADER, ""))
        return JSONResponse({"success": True})

    async def describe(self, request: Any) -> Any:
        """Return the `Description` of this server."""
        arguments = self.arguments()
        description = Description(
            version("qurl-megatron"),
            arguments.quantization,
            arguments.context_length - CONTEXT_RESERVE,
            dataclasses.asdict(Architecture.from_directory(arguments.model_path)),
            self.kept(),
            arguments.enable_return_routed_experts,
            self.claimed.run,
        )
        return JSONResponse(dataclasses.asdict(description))

    async def receive(self, request: Any) -> Any:
        """Take a bucket from the body of a request, and let the schedulers load it."""
        with tempfile.NamedTemporaryFile(prefix="weights-") as file:
            try:
                header = await receive_body(request.stream(), file.file, self.held())
                if changed_version(header.names) is not None:
                    await asyncio.to_thread(check_delta, read_file(file.name), self.held())
            except (OSError, RuntimeError, ValueError, zlib.error) as error:  # OSError: a full disk
                message = escaped(str(error))
                return JSONResponse({"success": False, "message": message}, status_code=400)
            start = time.perf_counter()
            success, message = await self.update(
                names=list(header.names),
                dtypes=list(header.dtypes),
                shapes=[list(shape) for shape in header.shapes],
                group_name=FILE_PREFIX + file.name,
                load_format="flattened_bucket",
                weight_version=str(header.version),
                flush_cache=header.flush_cache,
            )
            load_s = time.perf_counter() - start
        return JSONResponse({"success": success, "message": message, "load_s": load_s})


def check_delta(flat: Tensor, held: Mapping[str, SentTensor]) -> None:
    """Check that a delta, `[bytes]` uint8, changes only tensors that a server has.

    Raises:
        ValueError, RuntimeError: it changes another, or cannot be read.
    """
    for change in unpack(flat):
        if change.name not in held:
            raise ValueError(f"{change.name}: the model has no such tensor")


async def receive_body(
    body: AsyncIterator[bytes], file: IO[bytes], held: Mapping[str, SentTensor]
) -> BucketHeader:
    """Write the values in a body to `file`; return the body's header.

    Args:
        held: the tensors that the server takes, by name.

    Raises:
        ValueError: the body is not of this form, not complete, or not for this server.
        zlib.error: it is not compressed as its header says.
    """
    line = b""
    header: BucketHeader | None = None
    decompress = zlib.decompressobj().decompress
    num_bytes = 0
    async for chunk in body:
        if header is None:
            line, end, chunk = (line + chunk).partition(b"\n")
            if len(line) > LARGEST_HEADER_BYTES:
                raise ValueError(f"a header of more than {LARGEST_HEADER_BYTES} bytes")
            if not end:
                continue
            header = BucketHeader.unpack(line)
            check_manifest(header.names, header.dtypes, header.shapes, held)
        values = chunk
        if header.is_compressed:
            # A chunk can become a thousand times as long. One byte too many is enough to tell.
            most = header.num_bytes - num_bytes + 1
            values = await asyncio.to_thread(decompress, chunk, most)
        num_bytes += len(values)
        if num_bytes > header.num_bytes:
            break  # before a body without end fills the disk
        file.write(values)
    file.flush()
    if header is None or num_bytes != header.num_bytes:
        whole = "a header" if header is None else f"{header.num_bytes} bytes"
        raise ValueError(f"the body is not complete: {num_bytes} bytes of weights, not {whole}")
    return header
