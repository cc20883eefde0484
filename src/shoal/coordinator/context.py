"""What every operation of the coordinator works with: settings, keys, secrets, clock, and who was seen when.

Presence lives in memory on purpose: a heartbeat per worker and few seconds must not cost a durable write. After a restart
everybody counts as just seen, so that a short outage forgets nobody.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import ShoalConfig
from shoal.errors import RefusedError
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.descriptor import RunDescriptor


@dataclass
class Presence:
    seen_at: float
    activity: str = ""
    tokens_generated: int = 0
    bytes_received: int = 0


@dataclass
class RelayPresence:
    seen_at: float
    body: api.RelayBody


@dataclass
class Context:
    config: ShoalConfig
    descriptor: RunDescriptor
    keypair: Keypair
    secret: bytes
    role_keys: dict[str, str]
    submissions: Path
    clock: Callable[[], float] = time.time
    presence: dict[str, Presence] = field(default_factory=dict)
    relays: dict[str, RelayPresence] = field(default_factory=dict)

    @property
    def slot_tokens(self) -> int:
        """The most tokens that one slot can ask for."""
        rollouts = self.descriptor.rollouts
        return rollouts.tasks_per_slot * rollouts.group_size * rollouts.max_new_tokens

    def seen(self, key: str) -> Presence:
        presence = self.presence.setdefault(key, Presence(self.clock()))
        presence.seen_at = self.clock()
        return presence

    def is_present(self, key: str) -> bool:
        presence = self.presence.get(key)
        return presence is not None and self.clock() - presence.seen_at <= self.config.coordinator.gone_after_s

    def file_of(self, submission_id: str) -> Path:
        return self.submissions / f"{submission_id}.parquet"

    def require_role(self, key: str, role: str) -> None:
        if self.role_keys.get(key) != role:
            raise RefusedError("role", f"Only the run's {role} may do this.", hint="Use that role's key.", status=403)
