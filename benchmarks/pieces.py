"""Long benchmarks in pieces: what was measured is kept in a file, and a benchmark that was stopped goes on where it was.

A piece is one run with a name. With a limit on minutes no piece begins that would probably not end in time: the script ends with
exit code 75 and says how many pieces are left; the same command measures the next ones.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

AGAIN = 75
"""Exit code of a benchmark that has pieces left."""


class Pieces:
    def __init__(self, file: Path, minutes: float | None = None) -> None:
        self._file, self._started = file, time.monotonic()
        self._limit_s = minutes * 60 if minutes else None
        self._longest_s = 0.0
        self.known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The piece, measured now if it is not known."""
        if name not in self.known:
            self._stop_if_late(name)
            begun = time.monotonic()
            self.known[name] = make()
            self._longest_s = max(self._longest_s, time.monotonic() - begun)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.known))
            temporary.replace(self._file)
            print(f"{name}: {json.dumps(self.known[name])}", file=sys.stderr, flush=True)
        return self.known[name]

    def _stop_if_late(self, name: str) -> None:
        used_s = time.monotonic() - self._started
        if self._limit_s is not None and self._longest_s and used_s + self._longest_s > self._limit_s:
            print(f"Stopped before {name!r}: run the same command again to go on.", file=sys.stderr, flush=True)
            raise SystemExit(AGAIN)


def add_flags(parser: argparse.ArgumentParser, default: Path) -> None:
    parser.add_argument(
        "--pieces", type=Path, default=default, help="Keeps what was measured; remove it to begin again."
    )
    parser.add_argument("--minutes", type=float, help="Stop before a piece that would end later; run again to go on.")


def of(arguments: argparse.Namespace, settings: Sequence[object]) -> Pieces:
    """Pieces of other settings are not mixed: these become part of the file's name."""
    file: Path = arguments.pieces
    words = "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in settings)
    return Pieces(file.with_name(f"{file.stem}-{words}.json"), arguments.minutes)
