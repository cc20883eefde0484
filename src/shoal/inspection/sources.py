"""Where records come from: the directory of a run, or rollout files alone.

A run directory knows verdicts, states and batches from the coordinator's store, and the run's tokenizer and tasks from its
descriptor. A rollout file finds the descriptor of its run in a directory above it; without one, a tokenizer must be named and
nobody can say why a reward was given. Nothing is changed, and no role has to run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.inspection.records import InspectionError, Record
from shoal.protocol import api
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.protocol.rollouts import RolloutLimits, read_rollouts
from shoal.protocol.segments import split_segments
from shoal.rundir import RunDirectory
from shoal.tasks import CODEC_FILES, TextCodec
from shoal.tasks.datasets.transfer import find_shard, tasks_of_run
from shoal.tasks.workload import Workload

if TYPE_CHECKING:
    from shoal.coordinator.store.tables import GroupRow

FOREIGN_LIMITS = RolloutLimits(
    rows=1 << 16, prompt_tokens=1 << 17, output_tokens=1 << 17, proof_bytes=1 << 21, segments=1 << 11
)
"""For files whose run is unknown: large enough for any run."""


@dataclass(frozen=True)
class Submission:
    """One rollout file and what the coordinator knows of it."""

    path: Path
    state: str = "recorded"
    verdict: api.VerdictBody | None = None
    worker_name: str = ""
    groups: Mapping[int, tuple[str, int | None]] = field(default_factory=dict)
    """Group → its state and the step of its batch."""


@dataclass(frozen=True)
class Recording:
    submissions: Sequence[Submission]
    codec: TextCodec
    descriptor: RunDescriptor | None = None
    directory: RunDirectory | None = None
    root: Path | None = None
    """Where the descriptor was found: shards of the run's files lie below it."""

    def records(self) -> Iterator[Record]:
        for submission in self.submissions:
            yield from self._read(submission)

    def workload(self) -> Workload | None:
        """Tasks and rewards of the run; none where the run is unknown or this release makes other tasks."""
        if self.descriptor is None:
            return None
        tasks = tasks_of_run(self.descriptor, self.root)
        if tasks is None or tasks.train.digest != self.descriptor.task_set_digest:
            return None
        return Workload(self.descriptor, self.codec, tasks)

    def _read(self, submission: Submission) -> Iterator[Record]:
        limits = RolloutLimits.of(self.descriptor) if self.descriptor else FOREIGN_LIMITS
        header, rollouts = read_rollouts(submission.path.read_bytes(), limits)
        for rollout in rollouts:
            state, batch_step = submission.groups.get(rollout.group, (submission.state, None))
            yield Record(
                header,
                rollout,
                prompt=self.codec.decode(rollout.input_tokens),
                text=self.codec.decode(rollout.output_tokens),
                segments=tuple(
                    self.codec.decode(part) for part in split_segments(rollout.output_tokens, rollout.segment_lengths)
                ),
                state=state,
                batch_step=batch_step,
                verdict=submission.verdict,
                worker_name=submission.worker_name,
            )


def open_recording(paths: Sequence[Path], *, tokenizer: Path | None = None) -> Recording:
    """A run directory, or rollout files and directories that hold some."""
    first = paths[0]
    if len(paths) == 1 and (first / "descriptor.json").is_file() and (first / "run.toml").is_file():
        return _open_run(RunDirectory(first))
    files = [file for path in paths for file in _rollout_files(path)]
    if not files:
        raise InspectionError(
            f"{', '.join(map(str, paths))} holds no rollout files.", hint="Name a run directory or *.parquet files."
        )
    above = next((folder for folder in files[0].resolve().parents if (folder / "descriptor.json").is_file()), None)
    descriptor = open_descriptor((above / "descriptor.json").read_bytes()) if above else None
    codec = TextCodec.from_directory(tokenizer) if tokenizer else codec_of_run(above, descriptor)
    return Recording([Submission(file) for file in files], codec, descriptor, root=above)


def _rollout_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    if not path.is_file():
        raise InspectionError(f"There is no {path}.", hint="Name a run directory or *.parquet files.")
    return [path]


def _open_run(directory: RunDirectory) -> Recording:
    descriptor = directory.descriptor()
    codec = codec_of_run(directory.root, descriptor)
    submissions = [known for known in _submissions(directory) if known.path.exists()]
    if not submissions:
        raise InspectionError(
            f"{directory.root} holds no rollouts yet.", hint="Workers bring them once the run goes on."
        )
    return Recording(submissions, codec, descriptor, directory, directory.root)


def codec_of_run(root: Path | None, descriptor: RunDescriptor | None) -> TextCodec:
    """The tokenizer that the run's origin serves, or that a worker fetched."""
    if root is None or descriptor is None:
        raise ConfigError(
            "The files lie in no run's directory, so their tokenizer is unknown.",
            hint="Name it with --tokenizer DIRECTORY.",
        )
    references = {name: descriptor.model_files[name] for name in CODEC_FILES if name in descriptor.model_files}
    found = {name: find_shard(root, reference) for name, reference in references.items()}
    return TextCodec.from_files({name: path.read_bytes() for name, path in found.items() if path is not None})


def _submissions(directory: RunDirectory) -> list[Submission]:
    """Everything uploaded so far, from the coordinator's store, whether it runs or not."""
    from shoal.coordinator.store import records
    from shoal.coordinator.store.database import Connection

    if not records.has_store(directory):
        raise InspectionError(f"{directory.root} has no coordinator's store.", hint="Name its *.parquet files instead.")

    def read(connection: Connection) -> list[Submission]:
        names, groups = records.worker_names(connection), _group_states(records.groups(connection))
        return [
            Submission(
                directory.submissions / f"{row.submission_id}.parquet",
                _state(row.state, verdict := _verdict(row.verdict)),
                verdict,
                names.get(row.worker, ""),
                groups.get(row.submission_id, {}),
            )
            for row in records.submissions(connection)
        ]

    with records.open_store(directory) as store:
        return store.read(read)


def _group_states(rows: "list[GroupRow]") -> dict[str, dict[int, tuple[str, int | None]]]:
    """By submission and number: the state of the group, and the step of its batch."""
    groups: dict[str, dict[int, tuple[str, int | None]]] = {}
    for row in rows:
        groups.setdefault(row.submission_id, {})[row.number] = (row.state, row.batch_step)
    return groups


def _state(state: str, verdict: api.VerdictBody | None) -> str:
    if verdict is not None and not verdict.accepted:
        return "rejected"
    return "waiting" if state in ("pending", "claimed") else state


def _verdict(text: str | None) -> api.VerdictBody | None:
    """A submission that was quarantined has a note in place of a verdict."""
    if text is None or "claim_id" not in json.loads(text):
        return None
    return api.VerdictBody.model_validate_json(text)
