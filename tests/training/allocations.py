"""Watches what torch allocates: the largest result of any operation, forward and backward."""

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
