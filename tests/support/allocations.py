"""Watches what torch allocates, forward and backward: the largest result of any operation, and the peak of all that is alive."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Number of elements of the largest tensor that an operation made; views cost nothing and are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf._is_view():
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Most bytes that tensors held at once: those given at first, and all that operations make while they are alive."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive and self._alive[key]() is storage:
            return

        def gone(_: object) -> None:
            self.now -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
