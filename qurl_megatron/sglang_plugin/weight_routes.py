"""Weights over HTTP, for a server that the learner reaches by a URL and a key only.

`add_routes` gives a server with a key the routes of `rollout/wire.py`. A server without a key
does not get them. `without_key` keeps the key out of the log.

The HTTP process writes the payload of a bucket to a file that only this user can read. Then it asks
the schedulers for an update, as for any bucket, and names the file where a process group would be.
`load_file` reads it there. So pausing, versions and refusals are those of every other update. The
file is gone when the learner gets its answer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version
from typing import IO, Any

import torch
from torch import Tensor

from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.rollout.wire import (
    DESCRIPTION_PATH,
    PREFIX_BYTES,
    RUN_HEADER,
    RUN_PATH,
    WEIGHTS_PATH,
    BucketHeader,
    Description,
    file_of_group,
    group_of_file,
    header_bytes,
)
from qurl_megatron.sglang_plugin.claim import Claim, Claimed
from qurl_megatron.sglang_plugin.receive import write_changes
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.coding import decode
from qurl_megatron.weight_sync.delta import Change, base_version, unpack


def add_routes(original: Callable[..., None], app: Any, **keys: Any) -> None:
    """Add the routes before SGLang's `add_api_key_middleware`, which protects all of them."""
    tempfile.tempdir = None  # a fork has its parent's, and not the directory that TMPDIR names
    app.add_route(DESCRIPTION_PATH, _describe, methods=["GET"])
    app.add_route(WEIGHTS_PATH, _receive, methods=["POST"])
    app.add_route(RUN_PATH, _release, methods=["DELETE"])
    app.state.claim = Claim()
    app.add_middleware(Claimed, claim=app.state.claim)
    original(app, **keys)


def without_key(original: Callable[[Any], str], arguments: Any) -> str:
    """Return the text of `ServerArgs`, which SGLang writes to its log, without the key."""
    text = original(arguments)
    return text.replace(arguments.api_key, "...") if arguments.api_key else text


async def _release(request: Any) -> Any:
    """End the claim of the run that asks for it."""
    from starlette.responses import JSONResponse

    request.app.state.claim.release(request.headers.get(RUN_HEADER, ""))
    return JSONResponse({"success": True})


async def _describe(request: Any) -> Any:
    """Return the `Description` of this server."""
    from starlette.responses import JSONResponse

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
    from starlette.responses import JSONResponse

    with tempfile.NamedTemporaryFile(prefix="weights-") as file:
        try:
            header = await receive_body(request.stream(), file.file)
        except (OSError, ValueError) as error:  # OSError: the disk is full
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        update = UpdateWeightsFromDistributedReqInput(
            names=list(header.names),
            dtypes=list(header.dtypes),
            shapes=[list(shape) for shape in header.shapes],
            group_name=group_of_file(file.name, header.coding),
            load_format="flattened_bucket",
            weight_version=str(header.version),
            flush_cache=header.flush_cache,
        )
        start = time.perf_counter()
        success, message = await _tokenizer_manager().update_weights_from_distributed(update)
        load_s = time.perf_counter() - start
    return JSONResponse({"success": success, "message": message, "load_s": load_s})


async def receive_body(body: AsyncIterator[bytes], file: IO[bytes]) -> BucketHeader:
    """Write the payload of a body to `file`; return its header.

    Raises:
        ValueError: the body is not of this form, or not complete.
    """
    begun = b""  # of prefix and header
    header: BucketHeader | None = None
    num_bytes = 0
    async for chunk in body:
        if header is None:
            begun += chunk
            if len(begun) < PREFIX_BYTES:
                continue
            end = PREFIX_BYTES + header_bytes(begun[:PREFIX_BYTES])
            if len(begun) < end:
                continue
            header = BucketHeader.unpack(begun[PREFIX_BYTES:end])
            chunk = begun[end:]
        num_bytes += len(chunk)
        file.write(chunk)
    file.flush()
    if header is None or num_bytes != header.num_bytes:
        whole = "a header" if header is None else f"{header.num_bytes} bytes"
        raise ValueError(f"the body is not complete: {num_bytes} bytes of weights, not {whole}")
    return header


def load_file(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Load a bucket from a file, around `WeightUpdater.update_weights_from_distributed`.

    Return whether it succeeded, and a message. SGLang's `original` handles process groups.
    """
    named = file_of_group(group_name)
    if named is None:
        return original(updater, names, dtypes, shapes, group_name, load_format)
    path, coding = named
    model, device = updater.get_model(), torch.device(updater.device)
    try:
        flat = _read(path)
        if coding == "rice":
            write_changes(model, decode(flat, device))
        elif base_version(names) is not None:
            write_changes(model, unpack(flat.to(device)))
        else:
            bucket = Bucket(names, [getattr(torch, d) for d in dtypes], shapes, flat.to(device))
            write_changes(model, map(whole, *zip(*bucket.tensors(), strict=True)))
    except Exception as error:
        return False, f"Failed to load weights: {error!r}"
    return True, "Succeeded to update parameter online."


def whole(name: str, tensor: Tensor) -> Change:
    """Return the change that sends all elements of a tensor."""
    shape = (len(tensor), math.prod(tensor.shape[1:]))
    return Change(name, (0, 0), shape, None, as_integers(tensor).reshape(-1))


def _read(path: str) -> Tensor:
    """Return a file's bytes, `[bytes]` uint8, which are read when they are used."""
    size = os.path.getsize(path)
    if size == 0:  # cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, size=size, dtype=torch.uint8)


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager
