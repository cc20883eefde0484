"""Actions are runs of keys: single keys, runs of arrows and spaces, and words of the training text.

The keys of a session are cut greedily, the longest entry first. The input of an action is the frame before its first key.
Single code points are always entries, so every sequence of keys has actions, and the keys of its actions are the sequence
again.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.tasks.editor import ARROWS, CODE_POINTS, TextError

LONGEST_RUN = 15
WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]+")


@dataclass(frozen=True)
class ActionTable:
    """The entries in the order of their ids."""

    entries: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)
    _longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        singles = {chr(code) for code in range(CODE_POINTS)}
        if len(set(self.entries)) != len(self.entries) or not singles <= set(self.entries) or "" in self.entries:
            raise TextError("A table of actions needs every single code point, and no entry twice or empty.")
        object.__setattr__(self, "_ids", {entry: number for number, entry in enumerate(self.entries)})
        object.__setattr__(self, "_longest", max(map(len, self.entries)))

    def __len__(self) -> int:
        return len(self.entries)

    def encode(self, keys: str) -> list[int]:
        """The actions of a sequence of keys."""
        found, at = [], 0
        while at < len(keys):
            action = next(
                number
                for length in range(min(self._longest, len(keys) - at), 0, -1)
                if (number := self._lookup(keys[at : at + length])) is not None
            )
            found.append(action)
            at += len(self.entries[action])
        return found

    def decode(self, actions: Sequence[int]) -> str:
        return "".join(self.entries[action] for action in actions)

    def _lookup(self, keys: str) -> int | None:
        number = self._ids.get(keys)
        if number is None and len(keys) == 1:
            raise TextError(f"The key {keys!r} is not ASCII.")
        return number


def build_table(texts: Iterable[str], size: int = 512) -> ActionTable:
    """Single code points, runs of arrows and spaces, and the words that save the most keys in these texts."""
    singles = [chr(code) for code in range(CODE_POINTS)]
    runs = [key * count for key in (*ARROWS, " ") for count in range(2, LONGEST_RUN + 1)]
    if size < len(singles) + len(runs):
        raise TextError(f"A table of {size} actions is too small for {len(singles)} keys and {len(runs)} runs.")
    counts = Counter(word for text in texts for word in WORD.findall(text) if word.isascii())
    saved = {word: count * (len(word) - 1) for word, count in counts.items()}
    words = sorted(saved, key=lambda word: (-saved[word], word))[: size - len(singles) - len(runs)]
    return ActionTable((*singles, *runs, *words))
