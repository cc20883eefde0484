"""The identity of a step and of a version, and the secrets that follow from it.

A step is (epoch, step, attempt): a rewind raises the epoch, a batch that is begun again raises the attempt. Its secret derives
from the random run secret and all three numbers, so work of a voided step never fits its repetition. The secret is committed to
in the ledger before the step begins and published when its batch can no longer change: anyone can check past work, no one can
predict future work, and the coordinator cannot choose a secret afterwards.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from blake3 import blake3

SECRET_BYTES = 32
NUMBER_BYTES = 8
STEP_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,15}\.[0-9]{1,15})?$"


class StepId(NamedTuple):
    """Ordered as steps follow each other; JSON writes it as a list of three numbers."""

    epoch: int = 0
    step: int = 0
    attempt: int = 0

    def next(self) -> "StepId":
        """The step that follows once the batch of this one is recorded."""
        return StepId(self.epoch, self.step + 1, 0)

    def fields(self) -> dict[str, int]:
        """As a ledger entry names it."""
        return self._asdict()

    def __str__(self) -> str:
        notes = [f"{name} {value}" for name, value in (("epoch", self.epoch), ("attempt", self.attempt)) if value]
        return f"{self.step} ({', '.join(notes)})" if notes else f"{self.step}"

    def to_bytes(self) -> bytes:
        return b"".join(value.to_bytes(NUMBER_BYTES, "big") for value in self)


class VersionId(NamedTuple):
    """A version of the policy; after a rewind the same number may name other weights."""

    epoch: int
    number: int
    digest: str
    """Of its manifest."""


class Rewind(NamedTuple):
    """An epoch began with this version: later ones of earlier epochs are void."""

    epoch: int
    version: int


def is_void(epoch: int, number: int, rewinds: Iterable[Rewind]) -> bool:
    """Whether a version, or a checkpoint of its number, that was made in `epoch` is on the line no longer."""
    return any(rewind.epoch > epoch and number > rewind.version for rewind in rewinds)


def step_of(fields: Mapping[str, Any]) -> StepId:
    """The step that a ledger entry names."""
    return StepId(*(int(fields[name]) for name in StepId._fields))


def group_name(step: StepId, slot: int, number: int) -> str:
    """The name of a group in batches; a repeated step has names of its own."""
    place = f"{step.step}" if not (step.epoch or step.attempt) else f"{step.epoch}.{step.step}.{step.attempt}"
    return f"{place}/{slot}/{number}"


def step_named(place: str) -> StepId:
    """The step in the name of a group; the text fits STEP_PATTERN."""
    numbers = [int(part) for part in place.split(".")]
    return StepId(*numbers) if len(numbers) > 1 else StepId(0, numbers[0], 0)


def secret_commitment(run_secret: bytes) -> str:
    """Of the whole run; it is in the descriptor."""
    return blake3(run_secret, derive_key_context="shoal/1 commitment of the run secret").hexdigest()


def step_secret(run_secret: bytes, step: StepId) -> bytes:
    return blake3(b"step" + step.to_bytes(), key=run_secret).digest()


def step_commitment(step: StepId, secret: bytes) -> str:
    """Fixes the secret of a step without showing it."""
    return blake3(step.to_bytes() + secret, derive_key_context="shoal/1 commitment of a step secret").hexdigest()
