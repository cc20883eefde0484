"""The rollouts of a run as a dataset, and the evidence from which others repeat the run.

`rollouts/` holds Parquet files that `datasets` loads: one row per completion with its messages, tokens, mask of sampled tokens,
reward, verdict and policy version. `evidence/` is laid out like a run directory: descriptor, settings, ledger, machine, and the
files as workers signed them. Rows are written submission by submission; files that cannot be read, as a cheater may send, are left
out of the dataset and stay in the evidence.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.config import ShoalConfig, to_toml
from shoal.errors import IntegrityError, ShoalError
from shoal.files import write_atomic
from shoal.metrics import Report
from shoal.protocol.segments import sampled_places
from shoal.rundir import RunDirectory

if TYPE_CHECKING:
    from shoal.inspection import Record, Recording
    from shoal.protocol.rollouts import Rollout
    from shoal.tasks.workload import Workload

Value = TypeVar("Value")
ROLLOUTS, EVIDENCE = "rollouts", "evidence"
ROWS_PER_FILE = 100_000
MACHINE_FILE = "machine.json"


def write_dataset(directory: RunDirectory, folder: Path, report: Report) -> int:
    """Every completion that is still here; how many."""
    from shoal.inspection import open_recording

    try:
        recording = open_recording([directory.root])
    except ShoalError as error:
        report(f"no rollouts are exported: {error.message.rstrip('.')}")
        return 0
    rows = 0
    for number, table in enumerate(_tables(_rows(recording, recording.workload(), report))):
        folder.mkdir(parents=True, exist_ok=True)
        _write_table(folder / f"train-{number:05d}.parquet", table)
        rows += len(table)
    return rows


def _rows(recording: "Recording", workload: "Workload | None", report: Report) -> Iterator[dict[str, Any]]:
    unreadable = 0
    for submission in recording.submissions:
        try:
            rows = [_row(record, workload) for record in replace(recording, submissions=[submission]).records()]
        except (IntegrityError, OSError, ValueError, OverflowError):  # a cheater may write any number and any length
            unreadable += 1
            continue
        yield from rows
    if unreadable:
        report(f"{unreadable} files could not be read and are not in the dataset")


def _row(record: "Record", workload: "Workload | None") -> dict[str, Any]:
    header, rollout = record.header, record.rollout
    verdict = record.verdict
    return {
        "messages": [*_prompt(record, workload), *_turns(record)],
        "tokens": [*rollout.input_tokens, *rollout.output_tokens],
        "mask": over_row(rollout, 0, [1] * rollout.sampled_count),
        "logprobs": over_row(rollout, 0.0, rollout.output_logprobs),
        "reward": record.reward,
        "task_reward": record.task_reward,
        "verdict": "none" if verdict is None else "accepted" if verdict.accepted else "rejected",
        "reasons": [] if verdict is None else [str(reason) for reason in verdict.reasons],
        "audited": verdict is not None and rollout.group in verdict.audited_groups,
        "state": record.state,
        "version": header.policy_version,
        "step": header.step,
        "batch_step": record.batch_step,
        "slot": header.slot,
        "group": rollout.group,
        "sample": rollout.sample,
        "task_id": rollout.task_id,
        "target_length": rollout.target_length,
        "finish_reason": rollout.finish_reason,
        "worker": header.worker_key,
        "run_id": header.run_id,
    }


def _turns(record: "Record") -> list[dict[str, str]]:
    """What the policy said, and what an environment answered in between."""
    return [
        {"role": "tool" if number % 2 else "assistant", "content": text} for number, text in enumerate(record.segments)
    ]


def over_row(rollout: "Rollout", given: Value, sampled: Sequence[Value]) -> list[Value]:
    """One value per token of prompt and output: that of each sampled token, `given` for the others."""
    values = [given] * (len(rollout.input_tokens) + len(rollout.output_tokens))
    for place, value in zip(sampled_places(rollout.segment_lengths), sampled, strict=True):
        values[len(rollout.input_tokens) + place] = value
    return values


def _prompt(record: "Record", workload: "Workload | None") -> list[dict[str, str]]:
    """The chat that was asked; where the tasks are not known, the text of the prompt's tokens."""
    from shoal.inspection.records import task_of

    task = task_of(record.rollout, workload) if workload is not None else None
    if task is None or workload is None:
        return [{"role": "user", "content": record.prompt}]
    return workload.codec.messages(task, record.rollout.target_length, workload.style)


def _tables(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    table: list[dict[str, Any]] = []
    for row in rows:
        table.append(row)
        if len(table) == ROWS_PER_FILE:
            yield table
            table = []
    if table:
        yield table


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number, whole = pa.string(), pa.float64(), pa.int64()
    message = pa.struct([("role", text), ("content", text)])
    kinds = {
        **dict.fromkeys(("reward", "task_reward"), number),
        **dict.fromkeys(("version", "step", "batch_step", "slot", "group", "sample", "target_length"), whole),
        **dict.fromkeys(("verdict", "state", "task_id", "finish_reason", "worker", "run_id"), text),
        "messages": pa.list_(message),
        "tokens": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float32()),
        "reasons": pa.list_(text),
        "audited": pa.bool_(),
    }
    schema = pa.schema([(name, kinds[name]) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")


def write_evidence(directory: RunDirectory, folder: Path, ledger: bytes) -> int:
    """What `shoal reproduce` needs; how many rollout files."""
    copy = RunDirectory(folder)
    for source, target in (
        (directory.descriptor_file, copy.descriptor_file),
        (directory.trainer / MACHINE_FILE, copy.trainer / MACHINE_FILE),
    ):
        if source.is_file():
            write_atomic(target, source.read_bytes())
    write_atomic(copy.run_file, to_toml(public_settings(directory.config())).encode())
    write_atomic(copy.ledger_file, ledger)
    copied = 0
    for source in sorted(directory.submissions.glob("*.parquet")):
        copied += _copy(source, copy.submissions / source.name)
    descriptor = directory.descriptor()
    for reference in (*descriptor.model_files.values(), *descriptor.task_files):
        _copy(directory.origin / "shards" / reference.digest, copy.origin / "shards" / reference.digest)
    return copied


def public_settings(config: ShoalConfig) -> ShoalConfig:
    """Without what concerns nobody else: the address of a database may hold its password."""
    coordinator = config.coordinator.model_copy(update={"store": "sqlite"})
    run = config.run.model_copy(update={"dir": Path()})
    return config.model_copy(update={"coordinator": coordinator, "run": run})


def _copy(source: Path, target: Path) -> int:
    """Retention may remove a file while it is being copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        return 0
    return 1
