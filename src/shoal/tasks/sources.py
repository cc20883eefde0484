"""From the `tasks` section of a run to its task sets, by the name of the source.

The same settings give the same sets on every machine: generators by seed, hub datasets by commit, files by content. Files are
read once into a memory-mapped table in the cache and opened from there afterwards. Which tasks of a dataset are held out is
decided by the hash of their prompts, so equal prompts are never on both sides.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from blake3 import blake3

from shoal.config import TasksConfig
from shoal.errors import ConfigError
from shoal.files import digest_file
from shoal.tasks.datasets import chain_sums
from shoal.tasks.datasets.columns import row_to_task
from shoal.tasks.datasets.rows import HUB_PREFIX, HubDataset, Rows, file_rows, hub_rows, local_files, pin
from shoal.tasks.datasets.table import Row, open_table, record_batches, write_table
from shoal.tasks.task import Task, TaskSet, TaskSets, as_row, canonical_json
from shoal.tasks.verifiers import gym

log = logging.getLogger(__name__)

GENERATED_COUNT = 20_000
LARGEST_HELDOUT_SHARE = 10
CACHE = Path("~/.cache/shoal/tasks")
READER_VERSION = 1
"""Raised when the same rows would become other tasks, so that old cache entries are not used."""

GENERATORS: dict[str, Callable[[int, int, int], TaskSets]] = {
    chain_sums.SOURCE: chain_sums.generate,
}


def load_tasks(config: TasksConfig, *, cache: Path | None = None) -> TaskSets:
    """Training and held-out tasks."""
    if config.source in GENERATORS:
        return GENERATORS[config.source](config.count or GENERATED_COUNT, config.heldout, config.seed)
    if config.source.startswith(gym.PREFIX):
        return gym.generate(config.source, config.count or GENERATED_COUNT, config.heldout, config.seed)
    return _cached(_dataset(config), config, (cache or CACHE).expanduser())


def tasks_to_measure(config: TasksConfig) -> list[Task]:
    """What a policy is measured on: every task of a dataset in the order of its rows, of a generator the held-out ones."""
    if not (is_local(config) or config.source.startswith(HUB_PREFIX)):
        return list(load_tasks(config).heldout)
    dataset = _dataset(config)
    found = (row_to_task(fields, number, dataset.name) for number, fields in enumerate(dataset.rows()))
    return [task for task in found if task is not None]


def pin_source(config: TasksConfig) -> TasksConfig:
    """The settings that new workers need: a branch becomes a commit, a path of the owner's disk its last name."""
    if config.source.startswith(HUB_PREFIX):
        return config.model_copy(update={"source": pin(HubDataset.parse(config.source)).source})
    return config.model_copy(update={"source": Path(config.source).name}) if is_local(config) else config


def is_local(config: TasksConfig) -> bool:
    """Whether the tasks are on the owner's disk, so that they have to be sent to others."""
    return not config.source.startswith((HUB_PREFIX, gym.PREFIX, "builtin:"))


@dataclass(frozen=True)
class _Dataset:
    name: str
    identity: str
    """What the rows depend on."""
    rows: Callable[[], Rows]


def _dataset(config: TasksConfig) -> _Dataset:
    if config.source.startswith(HUB_PREFIX):
        dataset = pin(HubDataset.parse(config.source))
        return _Dataset(dataset.name, dataset.source, lambda: hub_rows(dataset, config.split))
    path = Path(config.source).expanduser()
    if not is_local(config) or not path.exists():
        known = ", ".join(sorted(GENERATORS))
        raise ConfigError(
            f"There is no task source {config.source!r}.",
            hint=f"Known: {known}, reasoning-gym:NAME, hf:ORG/NAME, or a file.",
        )
    files = local_files(path, config.split)
    identity = " ".join(digest_file(file) for file in files)
    return _Dataset(path.name, identity, lambda: (row for file in files for row in file_rows(file)))


def _cached(dataset: _Dataset, config: TasksConfig, cache: Path) -> TaskSets:
    settings = config.model_dump(exclude={"source", "system_prompt", "length_instruction", "thinking"}, mode="json")
    key = canonical_json([READER_VERSION, dataset.name, dataset.identity, settings])
    directory = cache / blake3(key.encode()).hexdigest()[:32]
    train, heldout = directory / "train.arrow", directory / "heldout.arrow"
    if not (train.exists() and heldout.exists()):
        whole = directory / "whole.arrow"
        write_table(whole, record_batches(_task_rows(dataset, config.solve_rates)))
        _split(open_table(whole), config, dataset.name, train, heldout)
        whole.unlink()
    return TaskSets(train=TaskSet.open(train), heldout=TaskSet.open(heldout))


def _task_rows(dataset: _Dataset, band: tuple[float, float]) -> Iterator[Row]:
    skipped = 0
    for number, fields in enumerate(dataset.rows()):
        task = row_to_task(fields, number, dataset.name)
        if task is None:
            skipped += 1
        elif task.solve_rate is None or band[0] <= task.solve_rate <= band[1]:
            yield as_row(task)
    if skipped:
        log.warning("%d rows of %s have no answer that can be verified and were left out", skipped, dataset.name)


def _split(whole: pa.Table, config: TasksConfig, name: str, train: Path, heldout: Path) -> None:
    if len(whole) < 2:
        raise ConfigError(f"{name} has {len(whole)} usable tasks; at least 2 are needed.")
    ranks = _prompt_ranks(whole, config.seed)
    held = min(config.heldout, max(1, len(whole) // LARGEST_HELDOUT_SHARE))
    threshold = np.partition(ranks, held - 1)[held - 1]
    mask = ranks <= threshold
    kept = np.flatnonzero(~mask)[: config.count or None]
    if not len(kept):
        raise ConfigError(f"All tasks of {name} have the same prompt.")
    last = int(kept[-1])
    write_table(train, _filtered(whole.slice(0, last + 1), ~mask[: last + 1]))
    write_table(heldout, _filtered(whole, mask))


def _prompt_ranks(whole: pa.Table, seed: int) -> np.ndarray:
    salt = seed.to_bytes(8, "little", signed=True)
    prompts = (prompt for batch in whole.column("prompt").chunks for prompt in batch.to_pylist())
    return np.fromiter(
        (int.from_bytes(blake3(salt + prompt.encode()).digest(8), "little") for prompt in prompts),
        np.uint64,
        len(whole),
    )


def _filtered(table: pa.Table, mask: np.ndarray) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in table.to_batches():
        yield batch.filter(pa.array(mask[start : start + len(batch)]))
        start += len(batch)
