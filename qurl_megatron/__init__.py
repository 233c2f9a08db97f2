"""QuRL: reinforcement learning with quantized rollouts on Megatron-core and SGLang.

    config = qurl_megatron.load("my.yaml", "steps=200")
    run = qurl_megatron.train(config)

What `__all__` lists is for other programs; all else may change. The page "From Python" has more.
"""

import importlib
from typing import Any

_PLACES = {
    "load": "launch.python",
    "train": "launch.python",
    "read_run": "report.record",
    "quantize": "quantization.quantize",
    "dequantize": "quantization.quantize",
    "policy_objective": "algorithm.objective",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:  # so that a command imports only what it uses
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
