"""A scenario measured from a run: the speeds, lengths, shares and times that its store and its files show.

So a trial of ten minutes can be simulated with more workers, more validators or another trainer. Only what was accepted counts, and
the first steps do not. What engine a worker has is found by `engines`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise
from statistics import fmean, median, pstdev
from typing import Any

from shoal.config import ShoalConfig
from shoal.coordinator.states import LeaseState, SubmissionState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.records import open_store
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import GroupRow, LeaseRow, SubmissionRow, VersionRow, WorkerRow
from shoal.errors import ConfigError
from shoal.protocol import api
from shoal.protocol.rollouts import RolloutLimits, read_rollouts
from shoal.rundir import RunDirectory
from shoal.simulation.swarm.engines import SWAP_S, Work, covered_s, fitted_engine, replayed_engine
from shoal.simulation.swarm.spec import SwarmSpec, build_scenario

WARM_UP = 3
FEWEST_STEPS = 6
READ_FILES = 256
READ_BYTES = 1 << 28
"""Rollout files are read from the newest one on, until one of both is reached."""
LOCAL_MBIT_S = 10_000.0
"""Of a worker that had to fetch nothing: it runs beside the relay."""
MOST_CLASSES = 24
KEPT_SETTINGS = {
    "rollouts": ("group_size", "tasks_per_slot", "max_new_tokens"),
    "training": ("async_level", "groups_per_step", "oversampling"),
    "coordinator": ("lease_s", "just_in_time", "gone_after_s"),
    "trust": ("probation_audits", "audit_floor", "stake_tokens", "key_share", "unaudited_share", "probation_share"),
    "validation": ("claim_s",),
}
"""What the rules of a run decide by."""


@dataclass(frozen=True)
class Contents:
    """What the rollout files that were read contain."""

    prompts: Sequence[int]
    """Tokens of each prompt."""
    lengths: Mapping[str, Sequence[int]]
    """Sampled tokens of each completion, by submission, in the order in which they entered the engine."""


@dataclass(frozen=True)
class Trial:
    """Rows of the store, since the end of the warm-up."""

    config: ShoalConfig
    versions: Sequence[VersionRow]
    files: Sequence[SubmissionRow]
    leases: Mapping[str, LeaseRow]
    groups: Sequence[GroupRow]
    workers: Mapping[str, WorkerRow]
    contents: Contents

    @property
    def lengths(self) -> list[int]:
        return list(chain.from_iterable(self.contents.lengths.values()))

    @property
    def prompts(self) -> Sequence[int]:
        return self.contents.prompts


def measured_scenario(directory: RunDirectory, steps: int = 100) -> SwarmSpec:
    return build_scenario(measure(directory, steps))


def measure(directory: RunDirectory, steps: int = 100) -> dict[str, Any]:
    """The scenario as a tree of plain values."""
    with open_store(directory) as store:
        tables = store.read(read_tables)
    config, since = directory.config(), _measured_since(tables.versions)
    files = [row for row in tables.files if row.received_at >= since]
    return describe(tables, config, _read(directory, files)) | {
        "run": {"name": f"as measured in {directory.root.name}", "steps": steps}
    }


def describe(tables: "TrialTables", config: ShoalConfig, contents: Contents) -> dict[str, Any]:
    """What the store shows, with the lengths that the files show."""
    since = _measured_since(tables.versions)
    recent = [row for row in tables.files if row.received_at >= since]
    names = {row.submission_id for row in recent}
    groups = [row for row in tables.groups if row.submission_id in names]
    versions = tables.versions[WARM_UP:]
    trial = Trial(config, versions, recent, tables.leases, groups, tables.workers, contents)
    reports = [json.loads(row.report) for row in versions]
    return {
        "run": {},
        "settings": _settings(config),
        "work": _work(trial),
        "weights": _weights(reports, versions),
        "trainer": _trainer(reports, versions),
        "validators": _validators(trial),
        "origin": {"up_mbit_s": LOCAL_MBIT_S},
        "workers": _workers(trial),
    }


def _measured_since(versions: Sequence[VersionRow]) -> float:
    if len(versions) < WARM_UP + FEWEST_STEPS:
        raise ConfigError(
            f"This run has trained {max(0, len(versions) - 1)} steps; at least {WARM_UP + FEWEST_STEPS} are needed.",
            hint="Let the trial go on, or make its steps smaller.",
        )
    return versions[WARM_UP].published_at


@dataclass(frozen=True)
class TrialTables:
    versions: list[VersionRow]
    files: list[SubmissionRow]
    leases: dict[str, LeaseRow]
    groups: list[GroupRow]
    workers: dict[str, WorkerRow]


def read_tables(connection: Connection) -> TrialTables:
    decided = f"WHERE state='{SubmissionState.DECIDED}' ORDER BY received_at"
    return TrialTables(
        select(connection, VersionRow, "ORDER BY version"),
        select(connection, SubmissionRow, decided),
        {row.lease_id: row for row in select(connection, LeaseRow, f"WHERE state='{LeaseState.SUBMITTED}'")},
        select(connection, GroupRow, ""),
        {row.key: row for row in select(connection, WorkerRow, "")},
    )


def _read(directory: RunDirectory, files: Sequence[SubmissionRow]) -> Contents:
    limits, size_bytes = RolloutLimits.of(directory.descriptor()), 0
    prompts, lengths = list[int](), dict[str, list[int]]()
    for file in reversed(files[-READ_FILES:]):
        path = directory.submissions / f"{file.submission_id}.parquet"
        size_bytes += file.size_bytes
        if size_bytes > READ_BYTES and lengths:
            break
        if path.exists():
            rows = read_rollouts(path.read_bytes(), limits)[1]
            prompts += [len(row.input_tokens) for row in rows]
            entered = sorted(rows, key=lambda row: (-row.target_length, row.group, row.sample))
            lengths[file.submission_id] = [row.sampled_count for row in entered]
    if not lengths:
        raise ConfigError("No rollout file of this run is left.", hint="Raise coordinator.keep_rollouts_s for a trial.")
    return Contents(prompts, lengths)


def _settings(config: ShoalConfig) -> dict[str, dict[str, Any]]:
    tree = config.model_dump(mode="json")
    return {section: {name: tree[section][name] for name in names} for section, names in KEPT_SETTINGS.items()}


def _work(trial: Trial) -> dict[str, float]:
    logs = [math.log(max(1, length)) for length in trial.lengths]
    tokens = sum(group.tokens for group in trial.groups) or 1
    return {
        "median_tokens": _rounded(math.exp(fmean(logs))),
        "spread": _rounded(pstdev(logs)),
        "prompt_tokens": _rounded(fmean(trial.prompts)),
        "useful_share": _rounded(max(0.01, fmean(group.useful for group in trial.groups))),
        "bytes_per_token": _rounded(sum(file.size_bytes for file in trial.files) / tokens),
    }


def _weights(reports: Sequence[Mapping[str, Any]], versions: Sequence[VersionRow]) -> dict[str, float]:
    followed = median(row.bytes_total for row in versions)
    full = max(float(reports[-1].get("weights_bytes", 0.0)), followed)
    return {"full_bytes": full, "delta_bytes": followed if followed < full else 0.0}


def _trainer(reports: Sequence[Mapping[str, Any]], versions: Sequence[VersionRow]) -> dict[str, float]:
    intervals = [after.published_at - before.published_at for before, after in pairwise(versions)]
    waits = [float(one.get("time_wait_batch_s", 0.0)) for one in reports[1:]]
    fetches = [float(one.get("time_fetch_s", 0.0)) for one in reports[1:]]
    busy = (sum(intervals) - sum(waits) - sum(fetches)) / len(intervals)
    return {
        "step_s": _rounded(max(1e-3, busy)),
        "stage_s": _rounded(fmean(float(one.get("time_stage_s", 0.0)) for one in reports)),
        "batch_s": _rounded(fmean(fetches)),
    }


def _validators(trial: Trial) -> dict[str, float]:
    """A file without an audit costs `file_s`; what audited ones take longer is the audit."""
    size = trial.config.rollouts.group_size
    seconds, tokens = [], []
    for file in trial.files:
        verdict = api.VerdictBody.model_validate_json(file.verdict or "{}")
        read = sum(group.tokens for group in verdict.groups if group.group in verdict.audited_groups)
        tokens.append(read + len(verdict.audited_groups) * size * fmean(trial.prompts))
        seconds.append(verdict.seconds)
    plain = [one for one, read in zip(seconds, tokens, strict=True) if not read] or [0.0]
    file_s = fmean(plain)
    audit_s = sum(max(0.0, one - file_s) for one, read in zip(seconds, tokens, strict=True) if read)
    return {
        "count": len({file.claimed_by for file in trial.files}) or 1,
        "file_s": _rounded(file_s),
        "audit_tokens_per_s": _rounded(sum(tokens) / audit_s) if audit_s > 0 else 1e6,
    }


def _workers(trial: Trial) -> list[dict[str, Any]]:
    by_key: dict[str, list[SubmissionRow]] = {}
    for file in trial.files:
        by_key.setdefault(file.worker, []).append(file)
    found = [_worker(trial, trial.workers[key], files) for key, files in by_key.items() if len(files) > 1]
    if not found:
        raise ConfigError("No worker has delivered two files since the warm-up.", hint="Let the trial go on.")
    found.sort(key=lambda one: float(one["tokens_per_s"]))
    return _named_apart(found if len(found) <= MOST_CLASSES else _binned(found))


def _named_apart(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contributors choose the names of their workers: several may have the same one, or one that no terminal should print."""
    names: list[str] = []
    for one in found:
        plain = "".join(letter for letter in str(one["name"]) if letter.isprintable())[:60] or "worker"
        again = (f"{plain} {number}" for number in count(2))
        names.append(plain if plain not in names else next(name for name in again if name not in names))
    return [one | {"name": name} for one, name in zip(found, names, strict=True)]


def _worker(trial: Trial, worker: WorkerRow, files: Sequence[SubmissionRow]) -> dict[str, Any]:
    spans = [
        (trial.leases[file.lease_id].issued_at, file.received_at) for file in files if file.lease_id in trial.leases
    ]
    tokens = sum(group.tokens for group in trial.groups if group.worker == worker.key)
    tokens_per_s = tokens / max(1e-6, covered_s(spans))
    slot_s = fmean(end - begin for begin, end in spans)
    samples = trial.config.rollouts.tasks_per_slot * trial.config.rollouts.group_size
    engine = replayed_engine(_replayed(trial, files)) or fitted_engine(trial.lengths, samples, tokens_per_s, slot_s)
    return {
        "name": worker.name,
        "count": 1,
        "tokens_per_s": _rounded(engine.tokens_per_s),
        "rows": engine.rows,
        "down_mbit_s": _rounded(worker.link_bytes_per_s * 8e-6) or LOCAL_MBIT_S,
        "up_mbit_s": LOCAL_MBIT_S if engine.deliver_s else _rounded(worker.link_bytes_per_s * 8e-6) or LOCAL_MBIT_S,
        "swap_s": SWAP_S,
        "deliver_s": _rounded(engine.deliver_s),
    }


def _replayed(trial: Trial, files: Sequence[SubmissionRow]) -> list[Work]:
    """The files of a worker that were read, with their leases."""
    return [
        Work(lease.issued_at, file.received_at, lease.policy_version, trial.contents.lengths[file.submission_id])
        for file in files
        if file.submission_id in trial.contents.lengths and (lease := trial.leases.get(file.lease_id)) is not None
    ]


def _binned(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours in speed as one class."""
    size = -(-len(found) // MOST_CLASSES)
    bins = [found[start : start + size] for start in range(0, len(found), size)]
    return [one[len(one) // 2] | {"count": len(one), "name": f"like {one[len(one) // 2]['name']}"} for one in bins]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def to_toml(tree: Mapping[str, Any]) -> str:
    """The scenario as a file to edit; JSON is TOML for these values."""
    lines = ["# Measured from a run; edit and simulate again."]
    for name, section in tree.items():
        if name == "settings":
            for part, values in section.items():
                lines += ["", f"[settings.{part}]", *_lines(values)]
        elif isinstance(section, list):
            for one in section:
                lines += ["", f"[[{name}]]", *_lines(one)]
        else:
            lines += ["", f"[{name}]", *_lines(section)]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
