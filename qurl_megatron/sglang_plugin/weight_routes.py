"""Weights over HTTP, for a server that the learner reaches by a URL and a key only.

`add_routes` gives a server the routes of `rollout/wire.py`, behind its door (`door.py`).
`without_key` keeps the key out of the log.

The HTTP process writes the values of a bucket to a file that only this user can read. Then it asks
the schedulers for an update, as for any bucket, and names the file where a process group would be.
`weights.receive` reads it there. So pausing, versions and refusals are those of every other update.
The file is gone when the learner gets its answer. What the model does not have, or a
delta that cannot be read, is refused before the schedulers hear of it.
"""

import dataclasses
import functools
import json
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import version
from typing import IO, Any

from starlette.responses import JSONResponse
from torch import Tensor

from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout.wire import (
    DESCRIPTION_PATH,
    FILE_PREFIX,
    LARGEST_HEADER_BYTES,
    RUN_HEADER,
    RUN_PATH,
    WEIGHTS_PATH,
    BucketHeader,
    Description,
    escaped,
)
from qurl_megatron.sglang_plugin.door import Door
from qurl_megatron.sglang_plugin.weights import read_file
from qurl_megatron.weight_sync.bucket import SentTensor, check_manifest, model_tensors
from qurl_megatron.weight_sync.delta import base_version, unpack


def add_routes(original: Callable[..., None], app: Any, **keys: Any) -> None:
    """Add the routes before SGLang's `add_api_key_middleware`, which protects all of them."""
    tempfile.tempdir = None  # a fork has its parent's, and not the directory that TMPDIR names
    app.add_route(DESCRIPTION_PATH, _describe, methods=["GET"])
    app.add_route(WEIGHTS_PATH, _receive, methods=["POST"])
    app.add_route(RUN_PATH, _release, methods=["DELETE"])
    app.state.door = Door(_held)
    app.add_middleware(app.state.door.guard)
    original(app, **keys)


def without_key(original: Callable[[Any], dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """Return what SGLang writes of its arguments to its log, but not the key."""
    return {name: value for name, value in original(arguments).items() if name != "api_key"}


async def _release(request: Any) -> Any:
    """End the claim of the run that asks for it."""
    request.app.state.door.release(request.headers.get(RUN_HEADER, ""))
    return JSONResponse({"success": True})


async def _describe(request: Any) -> Any:
    """Return the `Description` of this server."""
    arguments = _tokenizer_manager().server_args
    description = Description(
        version("qurl-megatron"),
        arguments.quantization,
        arguments.context_length - CONTEXT_RESERVE,
        dataclasses.asdict(Architecture.from_directory(arguments.model_path)),
        _kept(arguments),
        arguments.enable_return_routed_experts,
        request.app.state.door.run,
    )
    return JSONResponse(dataclasses.asdict(description))


def _kept(arguments: Any) -> list[str]:
    """Return the layers that stay in BF16, by the server's arguments."""
    changes = json.loads(arguments.json_model_override_args)
    kept: list[str] = changes.get("quantization_config", {}).get("modules_to_not_convert", [])
    return kept


@functools.cache
def _held() -> Mapping[str, SentTensor]:
    """Return the tensors that this server takes, by name."""
    arguments = _tokenizer_manager().server_args
    formats = {method: name for name, method in ENGINE_METHODS.items()}
    return model_tensors(
        Architecture.from_directory(arguments.model_path),
        formats.get(arguments.quantization, "bf16"),
        set(_kept(arguments)),
    )


async def _receive(request: Any) -> Any:
    """Take a bucket from the body of a request, and have the schedulers load it."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    with tempfile.NamedTemporaryFile(prefix="weights-") as file:
        try:
            header = await receive_body(request.stream(), file.file, _held())
            if base_version(header.names) is not None:
                check_delta(read_file(file.name), _held())
        except (OSError, RuntimeError, ValueError, zlib.error) as error:  # OSError: a full disk
            message = escaped(str(error))
            return JSONResponse({"success": False, "message": message}, status_code=400)
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


def check_delta(flat: Tensor, held: Mapping[str, SentTensor]) -> None:
    """Check that a delta, `[bytes]` uint8, changes only tensors that a server has.

    Raises:
        ValueError, RuntimeError: it does not, or is none.
    """
    for change in unpack(flat):
        if change.name not in held:
            raise ValueError(f"{change.name}: the model has no such tensor")


async def receive_body(
    body: AsyncIterator[bytes], file: IO[bytes], held: Mapping[str, SentTensor]
) -> BucketHeader:
    """Write the values that a body brings to `file`; return its header.

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
        values = decompress(chunk) if header.is_compressed else chunk
        num_bytes += len(values)
        if num_bytes > header.num_bytes:
            break
        file.write(values)
    file.flush()
    if header is None or num_bytes != header.num_bytes:
        whole = "a header" if header is None else f"{header.num_bytes} bytes"
        raise ValueError(f"the body is not complete: {num_bytes} bytes of weights, not {whole}")
    return header


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager
