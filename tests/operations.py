"""The operations that torch carries out."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperations(TorchDispatchMode):
    """Note every operation of torch within this context in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.found.add(func)
        return func(*args, **(kwargs or {}))
