"""Weights over HTTP, for a server that the learner reaches by a URL and a key only.

`add_routes` gives a server with a key the routes of `rollout/wire.py`. A server without a key
does not get them. `without_key` keeps the key out of the log.

The HTTP process writes the values of a bucket to a file that only this user can read. Then it asks
the schedulers for an update, as for any bucket, and names the file where a process group would be.
`weights.receive` reads it there. So pausing, versions and refusals are those of every other update.
The file is gone when the learner gets its answer.

A server serves one run: the weights of a second one would silently replace those of the first. A
run names itself in a header of every request. `Claim` knows which run the server serves, and
refuses the requests of any other.
"""

import dataclasses
import json
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from importlib.metadata import version
from typing import IO, Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.wire import (
    DESCRIPTION_PATH,
    FILE_PREFIX,
    LARGEST_HEADER_BYTES,
    RUN_HEADER,
    RUN_PATH,
    WEIGHTS_PATH,
    BucketHeader,
    Description,
)

# A run that asks for nothing for so long has ended without saying so. The learner's part of a step
# must be shorter.
CLAIM_S = 3600.0


def add_routes(original: Callable[..., None], app: Any, **keys: Any) -> None:
    """Add the routes before SGLang's `add_api_key_middleware`, which protects all of them."""
    tempfile.tempdir = None  # a fork has its parent's, and not the directory that TMPDIR names
    app.add_route(DESCRIPTION_PATH, _describe, methods=["GET"])
    app.add_route(WEIGHTS_PATH, _receive, methods=["POST"])
    app.add_route(RUN_PATH, _release, methods=["DELETE"])
    app.state.claim = Claim()
    app.add_middleware(app.state.claim.guard)
    original(app, **keys)


def without_key(original: Callable[[Any], dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """Return what SGLang writes of its arguments to its log, but not the key."""
    return {name: value for name, value in original(arguments).items() if name != "api_key"}


async def _release(request: Any) -> Any:
    """End the claim of the run that asks for it."""
    request.app.state.claim.release(request.headers.get(RUN_HEADER, ""))
    return JSONResponse({"success": True})


async def _describe(request: Any) -> Any:
    """Return the `Description` of this server."""
    arguments = _tokenizer_manager().server_args
    changes = json.loads(arguments.json_model_override_args)
    description = Description(
        version("qurl-megatron"),
        arguments.quantization,
        arguments.context_length - CONTEXT_RESERVE,
        dataclasses.asdict(Architecture.from_directory(arguments.model_path)),
        changes.get("quantization_config", {}).get("modules_to_not_convert", []),
        arguments.enable_return_routed_experts,
        request.app.state.claim.run,
    )
    return JSONResponse(dataclasses.asdict(description))


async def _receive(request: Any) -> Any:
    """Take a bucket from the body of a request, and have the schedulers load it."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    with tempfile.NamedTemporaryFile(prefix="weights-") as file:
        try:
            header = await receive_body(request.stream(), file.file)
        except (OSError, ValueError, zlib.error) as error:  # OSError: the disk is full
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        update = UpdateWeightsFromDistributedReqInput(
            names=list(header.names),
            dtypes=list(header.dtypes),
            shapes=[list(shape) for shape in header.shapes],
            group_name=FILE_PREFIX + file.name,
            load_format="flattened_bucket",
            weight_version=str(header.version),
            flush_cache=header.flush_cache,
        )
        start = time.perf_counter()
        success, message = await _tokenizer_manager().update_weights_from_distributed(update)
        load_s = time.perf_counter() - start
    return JSONResponse({"success": success, "message": message, "load_s": load_s})


async def receive_body(body: AsyncIterator[bytes], file: IO[bytes]) -> BucketHeader:
    """Write the values that a body brings to `file`; return its header.

    Raises:
        ValueError: the body is not of this form, or not complete.
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
        values = decompress(chunk) if header.is_compressed else chunk
        num_bytes += len(values)
        file.write(values)
    file.flush()
    if header is None or num_bytes != header.num_bytes:
        whole = "a header" if header is None else f"{header.num_bytes} bytes"
        raise ValueError(f"the body is not complete: {num_bytes} bytes of weights, not {whole}")
    return header


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


class Claim:
    """Which run a server serves: the one that asked last, unless that was long ago."""

    def __init__(self) -> None:
        self._run = ""
        self._num_running = 0  # requests of the run
        self._heard_at = 0.0  # when its last one ended, by the monotonic clock

    @property
    def run(self) -> str:
        """The run that the server serves; empty: none."""
        silent_s = time.monotonic() - self._heard_at
        return self._run if self._num_running or silent_s < CLAIM_S else ""

    def release(self, run: str) -> None:
        """Forget the run, if it is this one."""
        if self._run == run:
            self._run = ""

    def guard(self, app: Any) -> Callable[..., Coroutine[Any, Any, None]]:
        """Return an ASGI application that gives `app` the requests of this run and of no run.

        The first run that asks for something has the claim. Other runs are refused.
        """

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            run = Headers(scope=scope).get(RUN_HEADER, "") if scope["type"] == "http" else ""
            if not run or scope["path"] in (DESCRIPTION_PATH, RUN_PATH):
                await app(scope, receive, send)
            elif self.run in ("", run):
                self._run = run
                self._num_running += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self._num_running -= 1
                    self._heard_at = time.monotonic()
            else:
                message = f"it serves the run {self.run}"
                refusal = JSONResponse({"success": False, "message": message}, status_code=409)
                await refusal(scope, receive, send)

        return answer
