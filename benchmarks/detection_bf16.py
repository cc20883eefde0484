"""What audits and the sequential test make of work in bfloat16: honest submissions, and cheats that hide behind its rounding.

    python benchmarks/detection_bf16.py --model bundled|smollm2 [--honest 40 --texts 12 --checks 2 --length 4] [--minutes 10]
    .venv-vllm/bin/python benchmarks/detection_bf16.py --model smollm2 --vllm 12 --checks 1 --slots 16

Workers compute in bfloat16 with logits in float32, the scorer in float32 throughout. Pieces: `honest` are submissions that the
embedded engine samples in batches of several shapes, `text` the draws of every cheat after the prefixes of a common text (one
prefill each), `check` a cheat that really generates, `length` honest draws at late positions. The first half of the honest pieces
sets the limits, as a calibration does; the others are audited by them. `tokens_to_ban` counts audited tokens until the
coordinator's rules ban, with true proofs (only draws count) and with the cheat's own. With --vllm everybody computes on vLLM: the
report is of that class alone, with limits of its own, and every cheat really generates. Pieces are kept below --work; a run that
was stopped goes on where it was (exit code 75 while pieces are left). The report has all pieces that are there.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.coarse import report  # noqa: E402
from benchmarks.coarse.draws import (  # noqa: E402
    CHEATS,
    HONEST,
    ROUNDED,
    WORKERS,
    Draws,
    Worker,
    forced,
    generated,
    text_of,
)
from benchmarks.coarse.models import POLICIES, Policy, long_texts  # noqa: E402
from shoal.policy import TorchEngine  # noqa: E402

AGAIN = 75
FIRST_HONEST, FIRST_TEXT, FIRST_CHECK, FIRST_VLLM, FIRST_VLLM_CHECK = 100_000, 300_000, 400_000, 500_000, 700_000
SHAPES = {"bundled": (64, 16, 33, 128, 256, 512), "smollm2": (64, 16, 33, 128)}
"""Rows per batch of honest workers, in turn; a piece has as many submissions as fill them."""
CHECKED = ("int8", "int4", "temperature_x0.95")
VLLM = "vllm"
VLLM_CHECKED = tuple(name for name, kind in CHEATS.items() if kind.dtype == "bfloat16" and not kind.cache)
"""Those that need nothing but other weights or another temperature."""
POSITIONS = {"bundled": (32, 128, 512, 1000, 2000, 3000, 4000), "smollm2": (32, 128, 256, 512, 768, 1000)}


class Store:
    """Draws of pieces of work, each piece in a file."""

    def __init__(self, directory: Path, minutes: float) -> None:
        self._directory, self._end = directory, time.monotonic() + 60 * minutes
        self._longest_s = 0.0

    def make(self, name: str, make: Callable[[], Mapping[str, Draws]]) -> None:
        path = self._directory / f"{name}.npz"
        if path.exists():
            return
        if self._longest_s and time.monotonic() + self._longest_s > self._end:
            say(f"Stopped before {name!r}: run the same command again to go on.")
            raise SystemExit(AGAIN)
        begun = time.monotonic()
        arrays = {f"{kind}/{field}": array for kind, draws in make().items() for field, array in draws.save().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
        temporary.replace(path)
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        say(f"{name}: {time.monotonic() - begun:.0f} s")

    def read(self, prefix: str, kind: str) -> list[dict[str, np.ndarray]]:
        """Of every piece whose name begins so, in order."""
        found = []
        for path in sorted(self._directory.glob(f"{prefix}-*.npz")):
            with np.load(path) as file:
                fields = [key for key in file if key.rpartition("/")[0] == kind]
                if fields:
                    found.append({key.rpartition("/")[2]: file[key] for key in fields})
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(POLICIES), default="bundled")
    parser.add_argument("--honest", type=int, default=2, help="pieces of honest submissions")
    parser.add_argument("--texts", type=int, default=1, help="pieces of text that every cheat draws after")
    parser.add_argument("--checks", type=int, default=0, help="pieces of each of some cheats that really generate")
    parser.add_argument("--length", type=int, default=0, help="pieces at late positions")
    parser.add_argument(
        "--vllm", type=int, default=0, help="pieces of honest submissions on vLLM, and no others of torch"
    )
    parser.add_argument("--slots", type=int, default=4, help="submissions of one piece, at least")
    parser.add_argument("--tokens", type=int, default=0, help="longest completion of a text; without it the slots'")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop before a piece that would end later")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "detection_bf16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = options.work / options.model
    root.mkdir(parents=True, exist_ok=True)
    policy, store = POLICIES[options.model](root), Store(root / "pieces", options.minutes)
    if options.vllm:
        make_vllm(policy, store, options)
        print(json.dumps(vllm_summary(policy.name, store)))
    else:
        make_pieces(policy, store, options)
        print(json.dumps(summary(policy.name, store)))


def make_pieces(policy: Policy, store: Store, options: argparse.Namespace) -> None:
    scorer = policy.engine("true", "float32")
    for slots in pieces(options.texts, FIRST_TEXT, options.slots):
        store.make(
            f"text-{slots[0]}-{options.slots}-{options.tokens}",
            lambda s=slots: forced(policy, WORKERS, scorer, text_of(policy, scorer, s, options.tokens), len(s)),  # type: ignore[misc]
        )
    for rows, slots in honest_pieces(policy, options.honest, options.slots):
        store.make(f"honest-{slots[0]}-{len(slots)}", lambda s=slots, n=rows: honest_piece(policy, scorer, s, n))  # type: ignore[misc]
    for slots in pieces(options.checks, FIRST_CHECK, options.slots):
        for name in CHECKED:
            store.make(
                f"check-{name}-{slots[0]}-{options.slots}",
                lambda s=slots, n=name: {n: cheat_piece(policy, scorer, s, CHEATS[n])},  # type: ignore[misc]
            )
    for number in range(options.length):
        store.make(f"length-{number}", lambda n=number: length_piece(policy, n))  # type: ignore[misc]


def pieces(count: int, first: int, size: int) -> list[range]:
    return [range(first + at * size, first + (at + 1) * size) for at in range(count)]


def honest_pieces(policy: Policy, count: int, size: int, first: int = FIRST_HONEST) -> Iterator[tuple[int, range]]:
    """Rows per batch and slots of each piece."""
    per_slot = len(policy.items(first))
    for rows in islice(cycle(SHAPES[policy.name]), count):
        slots = range(first, first + max(size, -(-rows // per_slot)))
        yield rows, slots
        first = slots.stop


def honest_piece(policy: Policy, scorer: TorchEngine, slots: Sequence[int], rows: int) -> dict[str, Draws]:
    return {HONEST: generated(policy, policy.engine("true", "bfloat16", rows), scorer, slots)}


def cheat_piece(policy: Policy, scorer: TorchEngine, slots: Sequence[int], cheat: Worker) -> Draws:
    return generated(policy, policy.engine(cheat.weights, cheat.dtype), scorer, slots, cheat.heat)


def length_piece(policy: Policy, number: int) -> dict[str, Draws]:
    long, text = long_texts(policy, number)
    return forced(long, {HONEST: Worker()}, long.engine("true", "float32"), text, 1)


def make_vllm(policy: Policy, store: Store, options: argparse.Namespace) -> None:
    worker, most = LazyVllm(policy), max(SHAPES[policy.name])
    for rows, slots in honest_pieces(policy, options.vllm, options.slots, FIRST_VLLM):
        store.make(f"{VLLM}-{slots[0]}-{len(slots)}", lambda s=slots, n=rows: {HONEST: worker.piece(s, Worker(), n)})  # type: ignore[misc]
    for slots in pieces(options.checks, FIRST_VLLM_CHECK, options.slots):
        for name in VLLM_CHECKED:
            store.make(
                f"{VLLM}_check-{name}-{slots[0]}-{options.slots}",
                lambda s=slots, n=name: {n: worker.piece(s, CHEATS[n], most)},  # type: ignore[misc]
            )


class LazyVllm:
    """Workers on vLLM, which takes long to start, one after the other, and the scorer beside them."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._weights = policy, "true"

    @cached_property
    def _engines(self) -> tuple[Any, TorchEngine]:
        from shoal.policy.vllm.engine import VllmEngine

        # Before the scorer: vLLM looks through all modules of the process and stumbles over those of a compiler.
        ends, rows = self._policy.workload.codec.eos_token_ids, max(SHAPES[self._policy.name])
        worker = VllmEngine(self._policy.true, eos_token_ids=ends, dtype="bfloat16", max_batch=rows, max_tokens=512)
        return worker, self._policy.engine("true", "float32")

    def piece(self, slots: Sequence[int], kind: Worker, rows: int) -> Draws:
        worker, scorer = self._engines
        if kind.weights != self._weights:
            worker.load(self._policy.weights(kind.weights))
            self._weights = kind.weights
        worker.max_batch = rows
        return generated(self._policy, worker, scorer, slots, kind.heat)


def summary(name: str, store: Store) -> dict[str, Any]:
    honest = store.read("honest", HONEST)
    first, others = honest[: len(honest) // 2], honest[len(honest) // 2 :]
    calibrating = Draws.joined(first)
    bounds = report.Bounds.of(calibrating)
    found = report.audits(Draws.joined(others), bounds)
    whole = Draws.joined(honest)
    kinds = {kind: Draws.joined(parts) for kind in WORKERS if (parts := store.read("text", kind))}
    rounded = store.read("text", HONEST + ROUNDED)
    return {
        "benchmark": "detection in bfloat16",
        "model": name,
        "machine": platform.processor() or platform.machine(),
        "limits": limits_report(bounds),
        "calibrating_submissions": len(np.unique(calibrating.submissions)),
        **report.honest_report(found),
        "honest_fit": report.fit_table(whole, bounds.scale_likely),
        "cheats": {
            kind: report.cheat_report(report.audits(draws, bounds), found, draws) for kind, draws in kinds.items()
        },
        "rounded_logits": rounded_report(Draws.joined(rounded), kinds[HONEST]) if rounded else None,
        "generated_cheats": {
            kind: report.cheat_report(report.audits(Draws.joined(parts), bounds), found, Draws.joined(parts))
            for kind in CHECKED
            if (parts := store.read(f"check-{kind}", kind))
        },
        "by_position": (
            report.by_position(Draws.joined(length), POSITIONS[name])
            if (length := store.read("length", HONEST))
            else []
        ),
    }


def vllm_summary(name: str, store: Store) -> dict[str, Any]:
    honest = store.read(VLLM, HONEST)
    first, others = honest[: len(honest) // 2], honest[len(honest) // 2 :]
    calibrating = Draws.joined(first)
    bounds = report.Bounds.of(calibrating)
    found = report.audits(Draws.joined(others), bounds)
    whole = Draws.joined(honest)
    cheats = {kind: Draws.joined(parts) for kind in VLLM_CHECKED if (parts := store.read(f"{VLLM}_check-{kind}", kind))}
    return {
        "benchmark": "detection in bfloat16 on vLLM",
        "model": name,
        "machine": platform.processor() or platform.machine(),
        "limits": limits_report(bounds),
        "calibrating_submissions": len(np.unique(calibrating.submissions)),
        **report.honest_report(found),
        "all_honest": report.honest_report(report.audits(whole, bounds)),
        "honest_fit": report.fit_table(whole, bounds.scale_likely),
        "cheats": {
            kind: report.cheat_report(report.audits(draws, bounds), found, draws) for kind, draws in cheats.items()
        },
    }


def limits_report(bounds: report.Bounds) -> dict[str, float]:
    return {name: round(value, 4) for name, value in vars(bounds).items() if isinstance(value, float)}


def rounded_report(rounded: Draws, wide: Draws) -> dict[str, Any]:
    """What rounding the logits to bf16 would add to honest errors."""
    return {
        name: {
            "scale_likely": round(report.Bounds.of(draws).scale_likely, 4),
            "flips_per_1000": round(1000 * float((draws.margins > report.NOISE).mean()), 2),
            "margin_max": round(float(draws.margins.max()), 4),
        }
        for name, draws in (("rounded", rounded), ("float32", wide))
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
