"""The samples in flight of a decode batch, and which row of the cache each reads.

Samples whose prompt and tokens so far are equal have equal keys, values and states: they share one row, which is computed once for
all of them. They part at the first token in which they differ, and the row is then copied. `arrange` says how, without touching a
tensor. Between two steps the first sample of each row stands at the place of its row and the others behind all rows, so a model
reads the first R samples.

Shapes: S samples, R rows, U rows after the arrangement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.policy.engine import GenerationRequest, signed_seed

Integers = NDArray[np.int64]

_COLUMNS = 7


class Samples:
    """The state of each sample: named views of one table, so that entering and reordering are one operation each."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._table = torch.zeros(_COLUMNS, most, dtype=torch.int64, device=device)
        self.token, self.row, self.position, self.count, self.seed, self.limit, self.slot = self._table

    def enter(
        self, first: int, requests: Sequence[GenerationRequest], rows: Sequence[int], slots: Sequence[int]
    ) -> None:
        """New requests from `first` on, before their first token."""
        states = [
            [
                0,
                row,
                len(request.prompt_tokens),
                request.first_index,
                signed_seed(request.seed),
                request.first_index + request.max_new_tokens,
                slot,
            ]
            for request, row, slot in zip(requests, rows, slots, strict=True)
        ]
        self._table[:, first : first + len(requests)] = torch.tensor(states, device=self._table.device).T

    def places(self, count: int) -> Integers:
        """Token, row and position of the first samples."""
        places: Integers = self._table[:3, :count].cpu().numpy()
        return places

    def reorder(self, arrangement: "Arrangement") -> None:
        kept = self._table[:, torch.from_numpy(arrangement.order_S).to(self._table.device)]
        self._table[:, : kept.shape[1]] = kept
        self.row[: kept.shape[1]] = torch.from_numpy(arrangement.row_S).to(self._table.device)


@dataclass(frozen=True)
class Arrangement:
    order_S: Integers
    """The samples that stay, in their new order."""
    row_S: Integers
    """The row of each, in the new order: 0, 1, … for the first of each row."""
    rows: int
    to_rows: Integers
    from_rows: Integers
    """Rows to be copied; none is both."""


def arrange(tokens_S: Integers, rows_S: Integers, staying_S: Integers) -> Arrangement:
    """Rows for the samples that stay, one for each row and token that they have, numbered densely; as many as can keep theirs."""
    keys, first, inverse = np.unique(
        rows_S[staying_S] << 32 | tokens_S[staying_S], return_index=True, return_inverse=True
    )
    source_U, count = keys >> 32, len(keys)
    keeps_U = np.ones(count, dtype=bool)
    keeps_U[1:] = source_U[1:] != source_U[:-1]
    keeps_U &= source_U < count
    is_free = np.ones(count, dtype=bool)
    is_free[source_U[keeps_U]] = False
    place_U = source_U.copy()
    place_U[~keeps_U] = np.flatnonzero(is_free)
    leads_S = np.zeros(len(staying_S), dtype=bool)
    leads_S[first] = True
    order_S = np.empty(len(staying_S), dtype=np.int64)
    order_S[place_U], order_S[count:] = first, np.flatnonzero(~leads_S)
    return Arrangement(
        order_S=staying_S[order_S],
        row_S=place_U[inverse[order_S]],
        rows=count,
        to_rows=place_U[~keeps_U],
        from_rows=source_U[~keeps_U],
    )
