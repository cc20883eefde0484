"""What a slot means: worker, validator and auditor derive the same work from the slot seed.

run secret → step secret (`protocol.steps`) → slot seed → tasks, target lengths and one 64-bit sampling seed per sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3


@dataclass(frozen=True)
class TaskAssignment:
    """One group of a slot: G samples of one task."""

    group: int
    task_index: int
    target_length: int
    sampling_seeds: tuple[int, ...]


def slot_seed(secret_of_step: bytes, slot: int) -> bytes:
    return blake3(secret_of_step + slot.to_bytes(8, "big")).digest()


def environment_seed(seed_of_slot: bytes, group: int) -> int:
    """32 bits, as most generators take them; one world for all samples of a group."""
    seed = blake3(seed_of_slot + group.to_bytes(8, "big"), derive_key_context="shoal/1 environment of a group")
    return int.from_bytes(seed.digest(4), "big")


def assign(
    seed: bytes, *, task_count: int, tasks_per_slot: int, group_size: int, target_lengths: Sequence[int]
) -> tuple[TaskAssignment, ...]:
    """The groups of a slot. Tasks are distinct inside a slot as long as there are enough of them."""
    numbers = _Numbers(seed)
    tasks: list[int] = []
    while len(tasks) < tasks_per_slot:
        index = numbers.below(task_count)
        if index not in tasks or len(tasks) >= task_count:
            tasks.append(index)
    return tuple(
        TaskAssignment(
            group=group,
            task_index=index,
            target_length=target_lengths[numbers.below(len(target_lengths))] if target_lengths else 0,
            sampling_seeds=tuple(numbers.uint64() for _ in range(group_size)),
        )
        for group, index in enumerate(tasks)
    )


class _Numbers:
    """An endless stream of integers from the extendable output of BLAKE3, read a block at a time."""

    BLOCK_BYTES = 1024

    def __init__(self, seed: bytes) -> None:
        self._hasher = blake3(seed, derive_key_context="shoal/1 draws of a slot")
        self._block, self._offset = b"", 0

    def uint64(self) -> int:
        within = self._offset % self.BLOCK_BYTES
        if not within:
            self._block = self._hasher.digest(length=self.BLOCK_BYTES, seek=self._offset)
        self._offset += 8
        return int.from_bytes(self._block[within : within + 8], "big")

    def below(self, bound: int) -> int:
        return self.uint64() % bound
