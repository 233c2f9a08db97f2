"""Load the plugin as each process of a server does, and say what of SGLang it changed.

`SGLANG_PLATFORM=qurl_cpu python -m sglang_hooks` prints it for a machine without a GPU.
"""

import inspect
import json
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

HOPPER = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=84_929_937_408,
    major=9,
    minor=0,
    multi_processor_count=132,
)


def load_hooks() -> dict[str, str]:
    """Load the plugins; return why each of our hooks does not fit what it changes, or `fits`."""
    import sglang.launch_server  # noqa: F401  # a server's first import
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    with suppress(RuntimeError):  # which the hooks that are missing have raised
        load_plugins()
    return {
        name: describe(name, hook, kind.value)
        for name, registered in HookRegistry._hooks.items()
        for kind, hook, _ in registered
        if hook.__module__.startswith("qurl_megatron.")
    }


def describe(name: str, hook: Callable[..., Any], kind: str) -> str:
    """Return `fits` if a hook is in its place, and takes what the function there takes."""
    from qurl_megatron.sglang_plugin import delta_net

    try:
        applied = pkgutil.resolve_name(name)
    except (AttributeError, ImportError) as missing:
        return str(missing)
    if hook not in [cell.cell_contents for cell in applied.__closure__ or ()]:
        return "is not called"
    hook = vars(delta_net).get(hook.__name__, hook)  # what a late kernel calls
    parameters = list(inspect.signature(applied.__wrapped__).parameters.values())
    any_way = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    original = ["original"] if kind == "around" else []
    error: TypeError | None = None
    for in_order in (any_way, any_way[:1], []):  # SGLang calls methods and functions, both ways
        named = {name: by_name[name] for name in by_name.keys() - {p.name for p in in_order}}
        try:
            inspect.signature(hook).bind(*original, *in_order, **named)
            return "fits"
        except TypeError as refused:
            error = error or refused
    return str(error)


def pretend_a_gpu() -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (HOPPER.major, HOPPER.minor)
    torch.cuda.get_device_properties = lambda *_: HOPPER  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda *_: HOPPER.name
    torch.cuda.mem_get_info = lambda *_: (HOPPER.total_memory, HOPPER.total_memory)


if __name__ == "__main__":
    print(json.dumps({"hooks": load_hooks()}))
