"""The operations that torch carries out."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedOperations(TorchDispatchMode):
    """Note every operation of torch within this context in `found`, and how often in `counts`.

    `largest` is the number of elements of the largest tensor that one of them returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()  # by name, without the overload
        self.found: set[Any] = set()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.found.add(func)
        self.counts[func.overloadpacket] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


class Exchanged(RecordedOperations):
    """Add up in `num_bytes` the tensors of each collective within this context, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.num_bytes[func.overloadpacket.__name__] += sum(each.nbytes for each in tensors)
        return super().__torch_dispatch__(func, types, args, kwargs)


class HostReads(RecordedOperations):
    """Count in `number` how often a GPU would be waited for within this context.

    That is each time that Python reads values of a tensor, or that an operation's result has a size
    that depends on values.
    """

    METHODS = ("tolist", "cpu", "numpy")
    OPERATIONS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()
        self._patches = [
            patch.object(torch.Tensor, name, self._counting(name)) for name in self.METHODS
        ]

    def _counting(self, name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.read[name] += 1
            return original(tensor, *arguments, **options)

        return counted

    def __enter__(self) -> HostReads:
        for each in self._patches:
            each.start()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        for each in self._patches:
            each.stop()

    @property
    def number(self) -> int:
        """The number of reads."""
        operations = {str(name): count for name, count in self.counts.items()}
        return self.read.total() + sum(operations.get(name, 0) for name in self.OPERATIONS)
