"""What every operation of the coordinator works with: settings, keys, secrets, clock, and who was seen when.

Presence lives in memory on purpose: a heartbeat per worker and few seconds must not cost a durable write. After a restart
everybody counts as just seen, so that a short outage forgets nobody. Processes that share a database exchange it (`presence`).
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import ShoalConfig
from shoal.coordinator.bucket import Bucket
from shoal.errors import RefusedError
from shoal.identity import Keypair
from shoal.metrics import EventLog
from shoal.protocol import api
from shoal.protocol.descriptor import RunDescriptor

MAX_RELAYS = 64
MIN_FREE_BYTES = 256 << 20
"""With less free disk space no work is given out or taken in, so that store and ledger can still be written."""
RELAY_MEMORY_S = 600.0
CLOCK_SLACK_S = 2.0
"""Hosts of one database may disagree by so much about the time."""

Stamp = tuple[float, str]
"""Signed time and nonce of a request that costs no durable write."""


def is_news(stamp: Stamp, newest: Stamp) -> bool:
    return stamp[0] > newest[0] or (stamp[0] == newest[0] and stamp[1] != newest[1])


@dataclass
class Presence:
    seen_at: float
    activity: str = ""
    tokens_generated: int = 0
    bytes_received: int = 0
    newest: Stamp = (0.0, "")

    def note(self, body: api.HeartbeatBody, stamp: Stamp) -> None:
        self.activity, self.newest = body.activity, stamp
        self.tokens_generated, self.bytes_received = body.tokens_generated, body.bytes_received


@dataclass
class RelayPresence:
    seen_at: float
    body: api.RelayBody
    newest: Stamp = (0.0, "")


@dataclass
class Context:
    config: ShoalConfig
    descriptor: RunDescriptor
    keypair: Keypair
    secret: bytes
    role_keys: dict[str, str]
    submissions: Path
    clock: Callable[[], float] = time.time
    bucket: Bucket | None = None
    """Where rollouts are kept instead of `submissions`."""
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    min_free_bytes: int = MIN_FREE_BYTES
    metrics: EventLog = field(default_factory=EventLog)
    presence: dict[str, Presence] = field(default_factory=dict)
    relays: dict[str, RelayPresence] = field(default_factory=dict)
    is_shared: bool = False
    """Whether other coordinator processes serve this run too."""
    heard: set[str] = field(default_factory=set)
    """Keys that this process heard since it last told the others."""
    exchanged_at: float = 0.0

    @property
    def slot_tokens(self) -> int:
        """The most tokens that one slot can ask for."""
        rollouts = self.descriptor.rollouts
        return rollouts.tasks_per_slot * rollouts.group_size * rollouts.max_new_tokens

    def seen(self, key: str) -> Presence:
        presence = self.presence.setdefault(key, Presence(self.clock()))
        presence.seen_at = self.clock()
        if self.is_shared:
            self.heard.add(key)
        return presence

    def hear(self, key: str, body: api.HeartbeatBody, stamp: Stamp) -> None:
        """Takes a heartbeat in, unless it was heard before or a newer one was: a replay keeps nobody alive."""
        known = self.presence.get(key)
        if known is None or is_news(stamp, known.newest):
            self.seen(key).note(body, stamp)

    def is_present(self, key: str) -> bool:
        presence = self.presence.get(key)
        return presence is not None and self.clock() - presence.seen_at <= self.config.coordinator.gone_after_s

    def silent(self) -> list[str]:
        """Keys that have said nothing for too long."""
        return [key for key in list(self.presence) if not self.is_present(key)]

    def note_relay(self, key: str, body: api.RelayBody, stamp: Stamp) -> None:
        """Keeps who announced itself lately, and its newest word; an open list must end somewhere."""
        now = self.clock()
        for silent in [known for known, relay in self.relays.items() if now - relay.seen_at > RELAY_MEMORY_S]:
            del self.relays[silent]
        if key not in self.relays and len(self.relays) >= MAX_RELAYS:
            hint = "The list frees a place when a relay falls silent."
            raise RefusedError("too_many_relays", f"{MAX_RELAYS} relays serve this run.", hint=hint, status=409)
        if key not in self.relays or is_news(stamp, self.relays[key].newest):
            self.relays[key] = RelayPresence(now, body, stamp)

    def forget(self, key: str) -> None:
        """A key that is banned or gone is not present."""
        self.presence.pop(key, None)

    def file_of(self, submission_id: str) -> Path:
        return self.submissions / f"{submission_id}.parquet"

    def has_space(self) -> bool:
        """A disk that cannot be asked is found out by the upload, which says what is wrong with it."""
        try:
            return self.free_bytes(self.submissions) >= self.min_free_bytes
        except OSError:
            return True

    def require_space(self) -> None:
        if not self.has_space():
            hint = "The owner must free disk space; nothing is lost, your work can be uploaded until its lease ends."
            raise RefusedError("disk_full", "The coordinator's disk is full.", hint=hint, status=503)

    def require_owner(self, key: str) -> None:
        if key != self.descriptor.run_key:
            hint = "Sign with the run key, RUN/keys/run.key."
            raise RefusedError("owner", "Only the run's owner may do this.", hint=hint, status=403)

    def require_role(self, key: str, role: str) -> None:
        if self.role_keys.get(key) != role:
            raise RefusedError("role", f"Only the run's {role} may do this.", hint="Use that role's key.", status=403)
