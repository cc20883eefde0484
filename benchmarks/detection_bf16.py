"""What the sequential test makes of work in bfloat16: honest submissions, and cheats that hide behind its rounding.

    python benchmarks/detection_bf16.py --model bundled|smollm2 [--honest 1000] [--texts 12] [--minutes 10]

Workers compute in bfloat16, the judge in float32. Everything is kept in pieces below --work; a run that was stopped goes on where
it was (exit code 75 while pieces are left).
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.coarse.draws import HONEST, WORKERS, Draws, forced, generated  # noqa: E402
from benchmarks.coarse.models import POLICIES  # noqa: E402

AGAIN = 75
FIRST_HONEST, FIRST_TEXT, FIRST_CHECK = 100_000, 300_000, 400_000
SHAPES = (256, 64, 33, 7)
"""Rows per batch of honest workers, in turn."""


class Store:
    """Draws of one piece of work, each in a file."""

    def __init__(self, directory: Path, minutes: float) -> None:
        self.directory, self._end = directory, time.monotonic() + 60 * minutes
        self._longest_s = 0.0

    def get(self, name: str, make: Callable[[], Mapping[str, Draws]]) -> dict[str, Draws]:
        path = self.directory / f"{name}.npz"
        if not path.exists():
            if self._longest_s and time.monotonic() + self._longest_s > self._end:
                print(f"Stopped before {name!r}: run the same command again to go on.", file=sys.stderr)
                raise SystemExit(AGAIN)
            begun = time.monotonic()
            arrays = {
                f"{kind}/{field}": array for kind, draws in make().items() for field, array in draws.save().items()
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp.npz")
            np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
            temporary.replace(path)
            self._longest_s = max(self._longest_s, time.monotonic() - begun)
            print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        found: dict[str, dict[str, np.ndarray]] = {}
        with np.load(path) as file:
            for key in file:
                kind, _, field = key.rpartition("/")
                found.setdefault(kind, {})[field] = file[key]
        return {kind: Draws(**arrays) for kind, arrays in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(POLICIES), default="bundled")
    parser.add_argument("--texts", type=int, default=2, help="pieces of text that every kind of worker draws after")
    parser.add_argument("--slots", type=int, default=4, help="slots of one piece")
    parser.add_argument(
        "--tokens", type=int, default=0, help="longest completion of a text; that of the slots without it"
    )
    parser.add_argument("--honest", type=int, default=0, help="pieces of honest submissions that an engine samples")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop before a piece that would end later")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "detection_bf16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = options.work / options.model
    root.mkdir(parents=True, exist_ok=True)
    policy, store = POLICIES[options.model](root), Store(root / "pieces", options.minutes)
    judge = policy.engine("true", "float32")
    for piece in range(options.texts):
        first = FIRST_TEXT + piece * options.slots
        slots = range(first, first + options.slots)
        store.get(
            f"text-{first}-{options.slots}-{options.tokens}",
            lambda s=slots: forced(policy, WORKERS, judge, s, options.tokens),
        )
    for piece in range(options.honest):
        first = FIRST_HONEST + piece * options.slots
        slots = range(first, first + options.slots)
        shape = SHAPES[piece % len(SHAPES)]
        store.get(
            f"honest-{first}-{options.slots}",
            lambda s=slots, n=shape: {HONEST: generated(policy, policy.engine("true", "bfloat16", n), judge, s)},
        )


if __name__ == "__main__":
    main()
