"""Keys and values of the rows that are being decoded, preallocated for the longest of them.

A row is one sequence, or several that are equal so far. Live rows are the first `n`, so attention reads one slice; when a row
leaves, the last one is copied to its place. All planes (keys or values of one layer) of equal shape share one tensor: rows are
copied at once, not layer by layer.

Shapes: S planes, R rows, C positions (capacity), H key-value heads, d head size, P prompts, L prompt length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.policy.embedded.prompts import PrefilledPrompts


@dataclass(frozen=True)
class PlaneShape:
    heads: int
    head_size: int

    @property
    def values(self) -> int:
        return self.heads * self.head_size


class KeyValueCache:
    def __init__(
        self, planes: Sequence[PlaneShape], rows: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`planes` lists keys and values alternately, layer by layer."""
        self.rows, self.capacity = rows, capacity
        # Zeros, not empty: a masked position still multiplies its value by 0, and 0·NaN is NaN.
        self._slabs = {
            shape: torch.zeros(
                (list(planes).count(shape), rows, shape.heads, capacity, shape.head_size), dtype=dtype, device=device
            )
            for shape in dict.fromkeys(planes)
        }
        taken = dict.fromkeys(self._slabs, 0)
        self.planes: list[Tensor] = []
        for shape in planes:
            self.planes.append(self._slabs[shape][taken[shape]])
            taken[shape] += 1

    def enter(self, first_row: int, source_R: Tensor, prompts: PrefilledPrompts) -> None:
        for plane, entries in enumerate(prompts.entries):
            self.write_prompts(plane, first_row, source_R, entries)

    def write_prompts(self, plane: int, first_row: int, source_R: Tensor, entries_PHLd: Tensor) -> None:
        """Rows from `first_row` on get copies of the prompts that `source_R` names, one per row."""
        rows = slice(first_row, first_row + source_R.shape[0])
        self.planes[plane][rows, :, : entries_PHLd.shape[2]] = entries_PHLd[source_R]

    def copy(self, to_rows: Tensor, from_rows: Tensor, length: int) -> None:
        for slab in self._slabs.values():
            slab[:, to_rows, :, :length] = slab[:, from_rows, :, :length]


def bytes_per_position(planes: Sequence[PlaneShape], dtype: torch.dtype) -> int:
    return sum(shape.values for shape in planes) * dtype.itemsize
