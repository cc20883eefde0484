"""Two tasks of state tracking with a label at every position, made fresh for every batch.

Shell game: five cups, one ball under the first; each symbol swaps two cups; say where the ball is. Permutations never merge,
so no window of recent symbols helps: the floor is 1/5. Forward-referencing jumps: each block names two jumps and a bit; a
block that runs XORs its bit into the register and skips on by one of the two jumps; say whether a block is skipped, or what
the register is. Jumps are uniform in 1…16: short ones would let all states merge, and a short window would do.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
CUPS = 5
SWAPS = tuple(combinations(range(CUPS), 2))
LONGEST_JUMP = 16
WINDOW = 8
"""Recent blocks that the floor's predictor sees."""


@dataclass(frozen=True)
class Task:
    name: str
    fields: tuple[int, ...]
    """Values of each part of a symbol; its embedding is the sum over the parts."""
    labels: int
    weights: tuple[float, ...]
    """Of the labels in the loss: rare ones count as much as frequent ones."""

    def batch(self, count: int, length: int, seed: int) -> tuple[Ints, Ints]:
        """Symbols [B, L, fields] and labels [B, L]."""
        rng = np.random.default_rng(seed)
        symbols = np.stack([rng.integers(0, size, (count, length)) for size in self.fields], axis=-1)
        return symbols, _LABELS[self.name](symbols)

    def floor(self, seed: int = 0) -> float:
        """Balanced accuracy of the best predictor that sees the last eight symbols only."""
        return 1 / CUPS if self.name == "shell" else _jump_floor(seed)


def _ball(symbols: Ints) -> Ints:
    ends = np.array(SWAPS)
    labels = np.empty(symbols.shape[:2], np.int64)
    ball = np.zeros(len(symbols), np.int64)
    for at in range(symbols.shape[1]):
        first, second = ends[symbols[:, at, 0]].T
        ball = np.where(ball == first, second, np.where(ball == second, first, ball))
        labels[:, at] = ball
    return labels


def _run(symbols: Ints, skip: Ints, register: Ints) -> tuple[Ints, Ints, Ints]:
    """Labels (0 skipped, 1 + register), and the state after the last block."""
    labels = np.empty(symbols.shape[:2], np.int64)
    for at in range(symbols.shape[1]):
        runs = skip == 0
        register = np.where(runs, register ^ symbols[:, at, 2], register)
        jump = np.where(register == 0, symbols[:, at, 0], symbols[:, at, 1])
        labels[:, at] = np.where(runs, 1 + register, 0)
        skip = np.where(runs, jump, skip - 1)  # a jump of n + 1 blocks skips n
    return labels, skip, register


def _halts(symbols: Ints) -> Ints:
    zero = np.zeros(len(symbols), np.int64)
    return _run(symbols, zero, zero)[0]


def _jump_floor(seed: int, count: int = 4_000) -> float:
    """Every state before the window, weighted by how often it occurs, is run through the window's blocks."""
    symbols, _ = JUMPS.batch(count, 64, seed)
    zero = np.zeros(count, np.int64)
    _, skip, register = _run(symbols, zero, zero)
    weights = np.bincount(skip * 2 + register, minlength=2 * LONGEST_JUMP) / count
    windows, _ = JUMPS.batch(count, WINDOW, seed + 1)
    votes = np.zeros((count, JUMPS.labels))
    for state, weight in enumerate(weights):
        labels, _, _ = _run(windows, np.full(count, state // 2), np.full(count, state % 2))
        votes[np.arange(count), labels[:, -1]] += weight
    shares = votes.mean(axis=0)
    chosen = (votes / shares).argmax(axis=1)  # the best choice where every label counts the same
    return float(votes[np.arange(count), chosen] @ (1 / shares)[chosen] / count / JUMPS.labels)


SHELL = Task("shell", (len(SWAPS),), CUPS, (1.0,) * CUPS)
JUMPS = Task("jumps", (LONGEST_JUMP, LONGEST_JUMP, 2), 3, (1.0, 15.0, 15.0))
"""One block in 8.5 runs, and half of those with either register."""
TASKS = {task.name: task for task in (SHELL, JUMPS)}
_LABELS = {"shell": _ball, "jumps": _halts}
