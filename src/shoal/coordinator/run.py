"""What every operation of the coordinator works with: settings, keys, secrets, clock, disk, and presence."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import ShoalConfig
from shoal.coordinator.batching.timing import LeaseTiming
from shoal.coordinator.presence import Presence
from shoal.coordinator.store.bucket import S3Bucket
from shoal.errors import RefusedError
from shoal.identity import Keypair
from shoal.metrics import EventLog
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.rollouts import RolloutLimits

MIN_FREE_BYTES = 256 << 20
"""With less free disk space no work is given out or taken in, so that store and ledger can still be written."""


@dataclass(frozen=True)
class Run:
    config: ShoalConfig
    descriptor: RunDescriptor
    keypair: Keypair
    secret: bytes
    role_keys: dict[str, str]
    submissions: Path
    presence: Presence
    """What was heard of whom; it changes, as `timing` does."""
    clock: Callable[[], float] = time.time
    bucket: S3Bucket | None = None
    """Where rollouts are kept instead of `submissions`."""
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    min_free_bytes: int = MIN_FREE_BYTES
    metrics: EventLog = field(default_factory=EventLog)
    is_live: bool = True
    """False while only its files are looked at."""
    timing: LeaseTiming | None = None
    """Leases are given just in time; without it, at once."""

    @property
    def slot_tokens(self) -> int:
        """The most tokens that one slot can ask for."""
        rollouts = self.descriptor.rollouts
        return rollouts.tasks_per_slot * rollouts.group_size * rollouts.max_new_tokens

    @property
    def largest_file_bytes(self) -> int:
        """That is taken in: what a slot can need, if the owner does not allow less."""
        return min(self.config.coordinator.max_upload_bytes, RolloutLimits.of(self.descriptor).file_bytes)

    def file_of(self, submission_id: str) -> Path:
        return self.submissions / f"{submission_id}.parquet"

    def known_free_bytes(self) -> int | None:
        """None for a disk that cannot be read."""
        try:
            return self.free_bytes(self.submissions)
        except OSError:
            return None

    def trace_of(self, submission_id: str) -> Path:
        """What an audit saw of it, for the owner's page."""
        return self.submissions / f"{submission_id}.trace"

    def has_space(self) -> bool:
        """A disk that cannot be read counts as free: the upload then fails with the reason."""
        free_bytes = self.known_free_bytes()
        return free_bytes is None or free_bytes >= self.min_free_bytes


def disk_full() -> RefusedError:
    hint = "The owner must free disk space; nothing is lost, your work can be uploaded until its lease ends."
    return RefusedError("disk_full", "The coordinator's disk is full.", hint=hint, status=503)
