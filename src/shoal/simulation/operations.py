"""What actors of a simulation ask of a coordinator: the operations of its API, without HTTP and signatures.

`LocalCoordinator` answers with the store of a run, `memory.MemoryCoordinator` with tables in memory. Both call the same rules.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.config import ShoalConfig
from shoal.coordinator.rules.deliveries import Pace
from shoal.protocol import api


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    submission_id: str
    worker: str
    version: int
    tokens: int
    reward: float
    """Of its first sample, by its task."""


class Operations(Protocol):
    config: ShoalConfig

    def register(self, key: str, tokens_per_s: float = 1e6) -> None: ...

    def lease(self, key: str, request_id: str, held_versions: Sequence[int]) -> api.LeaseAnswer: ...

    def give_back(self, key: str, lease_id: str) -> None: ...

    def submit(self, key: str, lease_id: str, content: bytes) -> None: ...

    def beat(self, keys: Iterable[str]) -> None:
        """These keys, all that are there, send a heartbeat."""
        ...

    def leave(self, key: str) -> None:
        """The key sends nothing more."""
        ...

    def rejoin(self, key: str) -> None: ...

    def claim(self, validator: str, request_id: str) -> api.Claim | None: ...

    def verdict(self, body: api.VerdictBody) -> bool: ...

    def record(self, step: int) -> object:
        """The trainer accepts the batch of the step."""
        ...

    def publish(self, version: int, stage_s: float = 0.0, waited_s: float = 0.0, size_bytes: int = 1) -> None:
        """A version is out: what it took to stage, and how long its trainer had waited for the batch."""
        ...

    def maintain(self) -> None:
        """What time alone brings about; once a second."""
        ...

    def step(self) -> int:
        """The current step: as many batches are formed."""
        ...

    def trained(self, step: int) -> Sequence[TrainedGroup]:
        """The groups of the batch of a step."""
        ...

    def is_reliable(self, key: str) -> bool:
        """Whether batches wait for the slots of this key."""
        ...

    def pace(self) -> Pace: ...

    def close(self) -> None: ...


MakeCoordinator = Callable[[ShoalConfig, Callable[[], float], bytes], Operations]
