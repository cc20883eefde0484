"""Answers gathered in batches, each a file of its own, so that a killed run loses only the batches that were under way.

`plan.json` says what the batches are answers to. A directory that holds answers to something else is refused, never mixed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.evaluation.answers import Answer, read_answers, write_answers
from shoal.files import write_atomic

PLAN_FILE = "plan.json"


class Journal:
    def __init__(self, directory: Path, plan: Mapping[str, Any]) -> None:
        """Opens or makes the journal of this plan."""
        self.directory = directory
        path = directory / PLAN_FILE
        plan = json.loads(json.dumps(plan))
        if not path.exists():
            write_atomic(path, json.dumps(plan, indent=2).encode() + b"\n")
            return
        found = json.loads(path.read_bytes())
        if changed := sorted(key for key in plan.keys() | found.keys() if plan.get(key) != found.get(key)):
            raise ConfigError(
                f"{directory} holds answers made with another {changed[0]}: "
                f"{found.get(changed[0])!r}, not {plan.get(changed[0])!r}.",
                hint="Give the same settings to go on, or another directory to start again.",
            )

    def done(self) -> set[int]:
        """Batches that are whole."""
        return {int(path.stem.removeprefix("batch-")) for path in self.directory.glob("batch-*.parquet")}

    def add(self, batch: int, answers: list[Answer]) -> None:
        write_answers(self._path(batch), answers)

    def answers(self) -> Iterator[Answer]:
        """Everything so far, in the order of the batches; one batch in memory at a time."""
        for batch in sorted(self.done()):
            yield from read_answers(self._path(batch))

    def _path(self, batch: int) -> Path:
        return self.directory / f"batch-{batch:06d}.parquet"
