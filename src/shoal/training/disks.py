"""Which ranks share a disk, and what of a checkpoint lies where.

Ranks of one node, or of nodes with a shared file system, see each other's files; the lowest of them leads: it makes, renames and
removes directories. Every rank writes its own parts of a checkpoint to its disk. On several disks each has the parts of its ranks,
the list of all parts, and what all ranks have in common, so that the same ranks can resume without the disks of the others.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shoal.errors import ShoalError, first_line
from shoal.files import TEMPORARY_PREFIX
from shoal.training.model.distributed import World

Value = TypeVar("Value")
LIST_FILE, COMMON_FILE = ".metadata", "common.pt"
"""Torch's list of all parts; what is the same on every rank."""


class CheckpointError(ShoalError):
    """A checkpoint that is missing or does not fit."""

    code = "checkpoint"
    permanent = False


@dataclass(frozen=True)
class Disk:
    """One rank's view of the disk that it writes checkpoints to."""

    world: World
    ranks: tuple[int, ...] = (0,)
    """Ranks that see the same files."""
    group: Any = None

    @classmethod
    def find(cls, directory: Path, world: World) -> "Disk":
        """Every rank leaves a mark and looks for those of the others. All ranks must call this."""
        if world.size == 1:
            return cls(world)
        # Writing goes on while the ranks train: its agreements must not mix with theirs.
        group = dist.new_group(backend="gloo")
        mark = f"{TEMPORARY_PREFIX}mark-{world.share(secrets.token_hex(8))}-"
        directory.mkdir(parents=True, exist_ok=True)
        own = directory / f"{mark}{world.rank}"
        own.touch()
        world.barrier()
        # By name, not by listing: a network file system may answer a listing from a cache that is older than the marks.
        seen = [rank for rank in range(world.size) if (directory / f"{mark}{rank}").exists()]
        world.barrier()
        own.unlink()
        return cls(world, tuple(seen), group)

    @property
    def leads(self) -> bool:
        return self.world.rank == self.ranks[0]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see the same files."""
        return len(self.ranks) == self.world.size

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank."""
        if self.world.size == 1:
            return [value]
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, act: Callable[[], Value]) -> list[Value]:
        """What each rank's action returned; if one fails all do, with its reason."""
        result, failure, cause = None, "", None
        try:
            result = act()
        except (OSError, ShoalError, RuntimeError, ValueError) as error:
            if self.world.size == 1:
                raise
            failure, cause = f"rank {self.world.rank}: {first_line(error)}", error
        outcomes = self.gather((result, failure))
        if failures := [text for _, text in outcomes if text]:
            raise CheckpointError(f"The checkpoint was not completed by {'; '.join(failures[:3])}") from cause
        return [value for value, _ in outcomes]  # type: ignore[misc]  # without a failure every action has a result


def part_sizes(directory: Path) -> dict[str, int]:
    """How long each file of a checkpoint must at least be, by its name."""
    sizes: dict[str, int] = {}
    for place in FileSystemReader(directory).read_metadata().storage_data.values():
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def own_parts(names: Sequence[str], rank: int) -> list[str]:
    return [name for name in names if name.startswith(f"__{rank}_")]


def missing_parts(directory: Path, sizes: dict[str, int], names: Sequence[str]) -> list[str]:
    """Those of `names` that are not there, or shorter than they must be."""
    return [name for name in names if not _is_whole(directory / name, sizes[name])]


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size >= size
    except OSError:
        return False


def choose_step(found: Sequence[dict[int, str]]) -> int | None:
    """The step that all ranks resume at, from what each can read: "" or what is wrong with it, by step. None: there is none.

    A step that only some disks have was cut off by a kill between two renames; the one before is then on all of them.
    """
    steps = sorted({step for one in found for step in one}, reverse=True)
    for step in steps:
        wrong = [f"rank {rank}: {one[step]}" for rank, one in enumerate(found) if one.get(step)]
        if wrong:
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be read by {len(wrong)} ranks: {'; '.join(wrong[:3])}.",
                hint="Without a shared disk every rank must find its own parts: start as many ranks as wrote it, each on the node "
                "that it was on (`--node-rank` with `--master-addr` keeps the order), or copy the directories of that step from "
                "all nodes into one, on every node. To resume from an older step remove this one on every node.",
            )
        if all(step in one for one in found):
            return step
    if steps:
        lacking = [str(rank) for rank, one in enumerate(found) if not one]
        raise CheckpointError(
            f"Ranks {', '.join(lacking) or 'of some nodes'} have no checkpoint, others have that of step {steps[0]}.",
            hint="Start the trainer on the nodes that wrote it, or copy its directory to the nodes that lack it.",
        )
    return None
