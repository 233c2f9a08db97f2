"""The routes of this package on a server, and access control before all of them (`access.py`).

`add_routes` also gives a server the routes by which weights reach it over HTTP. No run asks its own
servers for these, so what handles them (`extensions/elsewhere/receiver.py`) is imported at the
first request. `without_key` keeps the key out of the log.
"""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from qurl_megatron.config.extensions import is_there, needed
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout.wire import DESCRIPTION_PATH, RUN_PATH, WEIGHTS_PATH
from qurl_megatron.sglang_plugin.access import AccessControl
from qurl_megatron.weight_sync.bucket import SentTensor, model_tensors

# The routes of `extensions/elsewhere`: methods, and the names of their handlers in `Receiver`.
ELSEWHERE = {
    DESCRIPTION_PATH: ("GET", "describe"),
    WEIGHTS_PATH: ("POST", "receive"),
    RUN_PATH: ("DELETE", "release"),
}


def add_routes(original: Callable[..., None], app: Any, **keys: Any) -> None:
    """Add the routes before SGLang's `add_api_key_middleware`, which then protects them too."""
    tempfile.tempdir = None  # a fork has its parent's: TMPDIR now names another
    access = AccessControl(_held)
    for path, (method, handler) in ELSEWHERE.items() if is_there("elsewhere") else ():
        app.add_route(path, _late(handler, access), methods=[method])
    app.add_middleware(access.guard)
    original(app, **keys)


def _late(handler: str, access: AccessControl) -> Callable[..., Any]:
    """Return what answers by a method of `Receiver`, which is imported at the first request."""

    async def answer(request: Any) -> Any:
        elsewhere = needed("elsewhere", "receiver", by=request.url.path)
        receiver = elsewhere.Receiver(access, _arguments, _kept, _held, _update)
        return await getattr(receiver, handler)(request)

    return answer


def without_key(original: Callable[[Any], dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """Return the arguments that SGLang writes to its log, without the key."""
    return {name: value for name, value in original(arguments).items() if name != "api_key"}


def _arguments() -> Any:
    return _tokenizer_manager().server_args


def _kept() -> list[str]:
    """Return the layers that stay in BF16, by the server's arguments."""
    kept: list[str] = _quantization().get("modules_to_not_convert", [])
    return kept


def _quantization() -> dict[str, Any]:
    """Return the fields of `formats.QurlConfig` that the server was started with."""
    changes = json.loads(_arguments().json_model_override_args)
    fields: dict[str, Any] = changes.get("quantization_config", {})
    return fields


@functools.cache
def _held() -> Mapping[str, SentTensor]:
    """Return the tensors that this server takes, by name."""
    arguments = _arguments()
    formats = {method: name for name, method in ENGINE_METHODS.items()}
    return model_tensors(
        dataclasses.replace(
            Architecture.from_directory(arguments.model_path),
            adapter_rank=_quantization().get("adapters", {}).get("rank", 0),
        ),
        formats.get(arguments.quantization, "bf16"),
        set(_kept()),
    )


async def _update(**fields: Any) -> tuple[bool, str]:
    """Make the schedulers load a bucket; return whether they did, and why not."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    request = UpdateWeightsFromDistributedReqInput(**fields)
    success, message = await _tokenizer_manager().update_weights_from_distributed(request)
    return success, message


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager
