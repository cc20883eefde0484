"""What a turn leaves for the next one of the same sample, so that only new tokens pass through the model.

A row that waits for its environment holds no place in the batch: its keys and values are copied out when the turn ends and copied
back when the next one begins, behind which the tokens that the environment gave are prefilled.

Shapes: R rows, L cached positions, S new positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.policy.embedded.attention import ContinuationStep
from shoal.policy.embedded.kv_cache import KeyValueCache
from shoal.policy.embedded.prompts import padded
from shoal.policy.embedded.runner import ModelRunner


@dataclass(frozen=True, eq=False)
class KeptRow:
    """Keys and values of one row, plane by plane, each [heads, L, size]."""

    entries: list[Tensor]

    @property
    def positions(self) -> int:
        return self.entries[0].shape[1]


def keep_row(cache: KeyValueCache, row: int, positions: int) -> KeptRow:
    return KeptRow([plane[row, :, :positions].clone() for plane in cache.planes])


def resume_rows(
    runner: ModelRunner,
    cache: KeyValueCache,
    first_row: int,
    kept: Sequence[KeptRow],
    prompts: Sequence[Sequence[int]],
) -> Tensor:
    """Puts the rows back from `first_row` on and reads the tokens that follow; their last states, [R, D]."""
    starts = [row.positions for row in kept]
    new = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    ids_RS = padded(new, runner.device)
    starts_R = torch.tensor(starts, device=runner.device)
    positions_RS = starts_R[:, None] + torch.arange(ids_RS.shape[1], device=runner.device)
    rows_R = torch.arange(len(kept), device=runner.device)
    step = ContinuationStep(_side_by_side(kept, max(starts)), rows_R, positions_RS, keeps=True)
    states_RSD = runner.run(ids_RS, positions_RS, step)
    for plane, entries_RHSd in enumerate(step.continued):
        for row, (one, tokens) in enumerate(zip(kept, new, strict=True)):
            target = cache.planes[plane][first_row + row]
            target[:, : one.positions] = one.entries[plane]
            target[:, one.positions : one.positions + len(tokens)] = entries_RHSd[row, :, : len(tokens)]
    return states_RSD[rows_R, torch.tensor([len(tokens) - 1 for tokens in new], device=runner.device)]


def _side_by_side(kept: Sequence[KeptRow], longest: int) -> list[Tensor]:
    """Plane by plane, padded to the longest: [R, heads, L, size]."""
    planes = []
    for entries in zip(*(row.entries for row in kept), strict=True):
        plane = entries[0].new_zeros(len(kept), entries[0].shape[0], longest, entries[0].shape[2])
        for row, one in enumerate(entries):
            plane[row, :, : one.shape[1]] = one
        planes.append(plane)
    return planes
