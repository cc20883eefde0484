"""Recorded sessions as one array: windows for training, whole streams for evaluation.

Recordings lie end to end in two arrays, frames and actions. A training window starts at a random action of a random session
and never crosses into another one; it is drawn by a seeded generator, so the same seed gives the same windows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.frames.actions import ActionTable
from shoal.frames.corpus import Change, CorpusError, skipped_line
from shoal.frames.sessions import Recording, record, session_keys


@dataclass(frozen=True)
class Dataset:
    frames_NRC: NDArray[np.uint8]
    actions_N: NDArray[np.int64]
    starts_S: NDArray[np.int64]
    """First action of each session, and the end of the last one."""

    def __len__(self) -> int:
        return len(self.actions_N)

    @property
    def sessions(self) -> int:
        return len(self.starts_S) - 1

    def windows(self, length: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (frames [L, B, R, C], actions [L, B]); sessions that are shorter than the window are left out."""
        if length < 1 or batch < 1:
            raise CorpusError(f"{batch} windows of {length} actions hold nothing.")
        lengths = np.diff(self.starts_S)
        longer = np.flatnonzero(lengths >= length)
        if not len(longer):
            raise CorpusError(f"No session has {length} actions; the longest has {lengths.max()}.")
        places = lengths[longer] - length + 1
        rng = np.random.default_rng(seed)
        steps = np.arange(length)[:, None]
        while True:
            which = rng.choice(len(longer), batch, p=places / places.sum())
            first = self.starts_S[longer[which]] + rng.integers(0, places[which])
            at = first[None, :] + steps
            yield torch.from_numpy(self.frames_NRC[at]), torch.from_numpy(self.actions_N[at])

    def streams(self, length: int, most: int) -> tuple[Tensor, Tensor]:
        """The first `length` actions of up to `most` sessions that have as many."""
        if length < 1 or most < 1:
            raise CorpusError(f"{most} streams of {length} actions hold nothing.")
        lengths = np.diff(self.starts_S)
        chosen = self.starts_S[:-1][lengths >= length][:most]
        if not len(chosen):
            raise CorpusError(f"No session has {length} actions; the longest has {lengths.max()}.")
        at = chosen[None, :] + np.arange(length)[:, None]
        return torch.from_numpy(self.frames_NRC[at]), torch.from_numpy(self.actions_N[at])


def build_dataset(
    changes: Iterable[Change],
    table: ActionTable,
    rows: int,
    columns: int,
    *,
    actions: int,
    least: int,
    most: int,
    seed: int,
    skipped: Counter[str] | None = None,
) -> Dataset:
    """Sessions of `least` to `most` actions each until there are about `actions` in all; `skipped` is for the refusal."""
    if not 1 <= least <= most:
        raise CorpusError(f"No session has at least {least} and at most {most} actions.")
    kept: list[Recording] = []
    total = 0
    for number, change in enumerate(changes):
        keys = session_keys(change.before, change.after, rows, columns, seed * 1_000_003 + number)
        recording = record(change.before, keys, table, rows, columns, most)
        if len(recording) >= least:
            kept.append(recording)
            total += len(recording)
        if total >= actions:
            break
    if not kept:
        raise CorpusError(f"No change gives a session of {least} actions.", hint=skipped_line(skipped or Counter()))
    return join(kept)


def join(recordings: list[Recording]) -> Dataset:
    starts = np.cumsum([0, *map(len, recordings)])
    return Dataset(
        np.concatenate([one.frames_LRC for one in recordings]),
        np.concatenate([one.actions_L for one in recordings]),
        starts.astype(np.int64),
    )
