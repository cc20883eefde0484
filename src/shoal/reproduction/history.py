"""What a verified ledger says was trained: per step its groups, files and resulting weights. Pure.

A recalled batch is gone, a rewind voids every later step and version; what comes after in the ledger replaces what came before.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.coordinator.ledger import Entry
from shoal.protocol.steps import StepId, group_name, step_of


@dataclass(frozen=True)
class RecordedFile:
    """A rollout file with the verdict that the ledger records."""

    digest: str
    worker: str
    step: StepId
    slot: int
    version: int
    accepted: bool
    audited: frozenset[int]
    """Numbers of the groups."""
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step} slot {self.slot}"


@dataclass(frozen=True)
class TrainedGroup:
    group_id: str
    number: int
    file: RecordedFile


@dataclass(frozen=True)
class TrainedStep:
    step: int
    groups: tuple[TrainedGroup, ...]
    unknown: tuple[str, ...] = ()
    """Groups that no accepted file has."""


@dataclass
class History:
    steps: dict[int, TrainedStep] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    """Version → digest of its weights."""
    files: dict[str, RecordedFile] = field(default_factory=dict)
    """By digest; the last verdict counts."""
    secrets: dict[StepId, bytes] = field(default_factory=dict)
    """Of steps whose batch is recorded."""

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> "History":
        made, counting = cls(), dict[str, RecordedFile]()
        for entry in entries:
            made._take(entry.kind, json.loads(entry.body), counting)
        return made

    def _take(self, kind: str, body: dict[str, Any], counting: dict[str, RecordedFile]) -> None:
        if kind == "verdict":
            file = _recorded_file(body)
            self.files[file.digest] = file
            if file.accepted and body["use"] in ("counts", "confirmed"):
                numbers = range(int(body["groups"]))
                counting.update({group_name(file.step, file.slot, number): file for number in numbers})
        elif kind == "recorded":
            identity = step_of(body)
            self.secrets[identity] = bytes.fromhex(body["step_secret"])
            known = [TrainedGroup(name, _number(name), counting[name]) for name in body["groups"] if name in counting]
            unknown = tuple(name for name in body["groups"] if name not in counting)
            self.steps[identity.step] = TrainedStep(identity.step, tuple(known), unknown)
        elif kind == "recalled":
            self.steps.pop(int(body["step"]), None)
        elif kind == "version":
            self.weights[int(body["version"])] = str(body["weights"])
        elif kind == "rewound":
            last = int(body["version"])
            self.steps = {step: trained for step, trained in self.steps.items() if step < last}
            self.weights = {version: digest for version, digest in self.weights.items() if version <= last}

    def in_training(self) -> list[int]:
        """Recorded steps at the end whose version is not there yet: a run that goes on, or was stopped in the middle."""
        last = max(self.weights, default=-1)
        return sorted(step for step in self.steps if step >= last)

    def secret_of(self, file: RecordedFile) -> bytes | None:
        """A step that was begun again publishes the secret of its last attempt only."""
        return self.secrets.get(file.step)


def _recorded_file(body: dict[str, Any]) -> RecordedFile:
    return RecordedFile(
        digest=body["file"],
        worker=body["worker"],
        step=step_of(body),
        slot=int(body["slot"]),
        version=int(body["version"]),
        accepted=bool(body["accepted"]),
        audited=frozenset(map(int, body["audited"])),
        reasons=tuple(body["reasons"]),
    )


def _number(group_id: str) -> int:
    return int(group_id.rpartition("/")[2])
