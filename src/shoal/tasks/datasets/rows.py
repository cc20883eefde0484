"""Rows of a dataset, one at a time, wherever it lives: JSONL, Parquet or Arrow files, a saved dataset, or the Hugging Face hub.

Nothing is held in memory but the row at hand. A revision of a hub dataset is always a commit, so that the same name never means
two datasets.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.errors import ConfigError, UnavailableError, one_line
from shoal.tasks.json_objects import as_object, parse_object

Rows = Iterator[dict[str, Any]]
HUB_PREFIX = "hf:"
LOCAL_SUFFIXES = {".jsonl", ".json", ".parquet", ".arrow"}
BATCH_ROWS = 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubDataset:
    """`hf:ORG/NAME` or `hf:ORG/NAME@REVISION`."""

    name: str
    revision: str

    @classmethod
    def parse(cls, source: str) -> "HubDataset":
        name, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
        return cls(name, revision)

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def source(self) -> str:
        return f"{HUB_PREFIX}{self.name}@{self.revision}"


def pin(dataset: HubDataset) -> HubDataset:
    """The same dataset with its branch or tag replaced by the commit it points at now."""
    if dataset.is_pinned:
        return dataset
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().dataset_info(dataset.name, revision=dataset.revision or None)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise UnavailableError(
            f"The hub does not say which commit {dataset.name} is at: {one_line(error)}.",
            hint="Name the commit: hf:ORG/NAME@COMMIT.",
        ) from None
    return HubDataset(dataset.name, str(info.sha))


def hub_rows(dataset: HubDataset, split: str) -> Rows:
    """Memory-mapped by `datasets`, downloaded once per machine; the split may begin with a configuration, as in `main/train`."""
    import datasets

    subset, _, name = split.rpartition("/")
    try:
        loaded = datasets.load_dataset(dataset.name, subset or None, split=name, revision=dataset.revision or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UnavailableError(
            f"The dataset {dataset.name} cannot be loaded: {one_line(error)}.",
            hint="Look at tasks.split, and at the network.",
        ) from None
    yield from loaded


def local_files(path: Path, split: str) -> list[Path]:
    """The files of a local source: itself, or those of a directory that name the split, or else all of it."""
    if path.is_file():
        return [path]
    found = sorted(
        file for file in path.rglob("*") if file.suffix in LOCAL_SUFFIXES and file.name != "dataset_info.json"
    )
    found = [file for file in found if file.name != "state.json"]
    named = [file for file in found if split in file.relative_to(path).as_posix()]
    if not found:
        kinds = ", ".join(sorted(LOCAL_SUFFIXES))
        raise ConfigError(
            f"There are no tasks in {path}.", hint=f"Give a file or a directory of files of kind {kinds}."
        )
    return named or found


def file_rows(path: Path) -> Rows:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _arrow_rows(path) if path.suffix == ".arrow" else _json_rows(path)


def _parquet_rows(path: Path) -> Rows:
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} is not a Parquet file: {one_line(error)}.") from None
    for batch in file.iter_batches(BATCH_ROWS):
        yield from batch.to_pylist()


def _arrow_rows(path: Path) -> Rows:
    """A file as `datasets` or Shoal itself writes it: the stream or the file format."""
    try:
        source = pa.memory_map(str(path))
        opened = pa.ipc.open_file(source) if source.read(6) == b"ARROW1" else pa.ipc.open_stream(_rewound(source))
        batches = (
            (opened.get_batch(index) for index in range(opened.num_record_batches))
            if isinstance(opened, pa.ipc.RecordBatchFileReader)
            else iter(opened)
        )
        for batch in batches:
            for start in range(0, len(batch), BATCH_ROWS):
                yield from batch.slice(start, BATCH_ROWS).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} is not an Arrow file: {one_line(error)}.") from None


def _rewound(source: pa.NativeFile) -> pa.NativeFile:
    source.seek(0, os.SEEK_SET)
    return source


def _json_rows(path: Path) -> Rows:
    """One object per line; a file that begins with a bracket is one array (as DeepScaleR is published)."""
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(1) == "[":
                yield from _json_array(path)
                return
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield parse_object(line, f"Line {number} of {path}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}.") from None


def _json_array(path: Path) -> Rows:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    for number, value in enumerate(tree):
        yield as_object(value, f"Entry {number} of {path}")
