"""What must hold when a swarm has ended, whatever happened to it: read from its store, its files and the process table.

Each check yields one sentence per violation; none is the goal.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from end_to_end.chaos import CHEATER, HONEST, Outcome
from shoal.broadcast.manifest import digest_weights
from shoal.broadcast.wire import tensor_entry
from shoal.coordinator import ledger
from shoal.coordinator.batching import steps
from shoal.files import digest_bytes, digest_file
from shoal.identity import Keypair
from shoal.policy.directory import resolve_model
from shoal.protocol import api
from shoal.training import Trainer
from shoal.training.service import TrainerService

SLOTS_BY_STATE = (
    "SELECT step, CASE WHEN deferred=1 THEN 'deferred ' ELSE '' END || state AS state, COUNT(*) AS n FROM slots"
    " GROUP BY step, deferred, state"
)
WAITING_GROUPS = (
    "SELECT step, policy_version, deferred, COUNT(*) FROM groups WHERE state='accepted'"
    " GROUP BY step, policy_version, deferred"
)
EXPIRED_CHOICES = (
    "SELECT lease_id FROM submissions JOIN leases USING (lease_id)"
    " WHERE policy_version < (SELECT COUNT(*) FROM batches WHERE formed_at < decided_at) - ?"
    " AND policy_version < (SELECT MAX(version) FROM versions WHERE published_at <= issued_at)"
)
SHARED_SLOTS = (
    "SELECT DISTINCT leases.worker AS worker FROM leases JOIN submissions USING (lease_id) WHERE EXISTS (SELECT 1 FROM leases"
    " AS other JOIN submissions AS file ON file.lease_id=other.lease_id WHERE other.step=leases.step"
    " AND other.slot=leases.slot AND other.lease_id <> leases.lease_id)"
)
TEMPORARY_NAMES = (".tmp-*", "*.tmp", "*.part")


class Remains:
    """The store of a run that has ended, opened for reading."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.directory = outcome, outcome.directory
        self.config = outcome.directory.config()
        self.connection = sqlite3.connect(self.directory.store)
        self.connection.row_factory = sqlite3.Row
        keypair = self.directory.existing_key("coordinator")
        extent = ledger.whole(self.connection)
        lines = [*ledger.page(self.connection, 0, extent.entries), ledger.seal(keypair, "run", extent, 0.0)]
        self.entries, _ = ledger.verify_export(lines, keypair.public)

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        return self.connection.execute(sql, values).fetchall()

    def bodies(self, kind: str) -> list[dict[str, object]]:
        return [json.loads(entry.body) for entry in self.entries if entry.kind == kind]


def violations(outcome: Outcome, *, repeat_training: bool = True) -> list[str]:
    """Everything that does not hold; a ledger that does not verify is the only thing said about itself."""
    found = list(_outside(outcome))
    try:
        remains = Remains(outcome)
    except ledger.LedgerError as error:
        return [*found, f"the ledger does not verify: {error}"]
    for check in (*CHECKS, *([_training_can_be_repeated] if repeat_training else [])):
        found += check(remains)
    remains.connection.close()
    return found


def _outside(outcome: Outcome) -> Iterator[str]:
    if not outcome.finished:
        yield f"the run did not finish within {outcome.plan.deadline_s:.0f} s"
    if outcome.kills != outcome.plan.kills:
        yield f"{outcome.kills} kills happened, {outcome.plan.kills} were asked for"
    for command in outcome.survivors:
        yield f"a process outlived the swarm: {command[:200]}"
    for path in leaked_files(outcome):
        yield f"a temporary file was left: {path}"


def leaked_files(outcome: Outcome) -> list[Path]:
    root = outcome.directory.root.parent
    named = [path for pattern in TEMPORARY_NAMES for path in root.rglob(pattern)]
    return sorted({*named, *(path for path in outcome.temporary.rglob("*") if path.is_file())})


def _store_is_sound(remains: Remains) -> Iterator[str]:
    for row in remains.rows("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield f"the store is damaged: {row[0]}"


def _steps_are_whole(remains: Remains) -> Iterator[str]:
    """Each step has one batch and each batch one version, in order."""
    wanted = remains.outcome.plan.steps
    batches = [body["step"] for body in remains.bodies("recorded")]
    versions = [body["version"] for body in remains.bodies("version")]
    if batches != list(range(wanted)):
        yield f"the ledger has batches of steps {batches}"
    if versions != list(range(wanted + 1)):
        yield f"the ledger has versions {versions}"


def _groups_are_consumed_once(remains: Remains) -> Iterator[str]:
    """The ledger's batches and the store name the same groups, each once, each accepted, none too old or too new."""
    in_ledger: dict[str, int] = {}
    for body in remains.bodies("recorded"):
        groups, step = body["groups"], body["step"]
        assert isinstance(groups, list)
        assert isinstance(step, int)
        for group in groups:
            if group in in_ledger:
                yield f"group {group} is in the batches of steps {in_ledger[group]} and {step}"
            in_ledger[group] = step
    stored = {row["group_id"]: row["batch_step"] for row in remains.rows("SELECT * FROM groups WHERE state='consumed'")}
    if stored != in_ledger:
        yield f"store and ledger disagree about consumed groups: {sorted(stored.items() ^ in_ledger.items())}"
    level = remains.config.training.async_level
    for row in remains.rows("SELECT * FROM groups WHERE state='consumed'"):
        if not 0 <= row["batch_step"] - row["policy_version"] <= level:
            yield f"group {row['group_id']} of version {row['policy_version']} is in step {row['batch_step']}"


def _no_group_is_lost(remains: Remains) -> Iterator[str]:
    """Each accepted submission that counts has all its groups, and a group that no batch holds has its reason."""
    per_slot = remains.config.rollouts.tasks_per_slot
    oldest = remains.outcome.plan.steps - 1 - remains.config.training.async_level
    counting = _counting(remains)
    for row in _accepted(remains):
        if row["lease_id"] not in counting:
            continue
        found = remains.rows("SELECT 1 FROM groups WHERE submission_id=?", row["submission_id"])
        if len(found) != per_slot:
            yield f"submission {row['submission_id']} was accepted with {len(found)} of {per_slot} groups"
    for row in remains.rows("SELECT * FROM groups WHERE state='expired'"):
        if row["policy_version"] >= oldest:
            yield f"group {row['group_id']} expired although it was young enough for the last step"
    banned = {body["worker"] for body in remains.bodies("ban")}
    for row in remains.rows("SELECT * FROM groups WHERE state='withdrawn'"):
        if row["worker"] not in banned:
            yield f"group {row['group_id']} was withdrawn although its worker is not banned"


def _uploads_are_kept(remains: Remains) -> Iterator[str]:
    """What a worker has submitted is in the store, with the bytes that were signed, and was settled."""
    for row in remains.rows("SELECT * FROM submissions"):
        path = remains.directory.submissions / f"{row['submission_id']}.parquet"
        if not path.exists() or digest_file(path) != row["digest"]:
            yield f"the bytes of submission {row['submission_id']} are not those that were signed"
    files = {path.stem for path in remains.directory.submissions.iterdir()}
    for name in files - {row["submission_id"] for row in remains.rows("SELECT submission_id FROM submissions")}:
        yield f"the upload {name} belongs to no submission"
    root = remains.directory.root.parent
    for name in (*HONEST, CHEATER):
        key = Keypair.load(root / name / "worker.key").public
        stored = Counter(
            (row["step"], row["slot"])
            for row in remains.rows(
                "SELECT step, slot FROM submissions JOIN leases USING (lease_id) WHERE submissions.worker=?", key
            )
        )
        reported = Counter(
            (event["step"], event["slot"]) for event in _events(root / name / "events.jsonl", "submitted")
        )
        for place in reported - stored:
            yield f"{name} reported that step {place[0]} slot {place[1]} was submitted, the store does not have it"


def _events(path: Path, kind: str) -> Iterator[dict[str, int]]:
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if event["event"] == kind:
            yield event


def _balances_follow_from_verdicts(remains: Remains) -> Iterator[str]:
    """One ledger entry per verdict; credit is what accepted verdicts counted, minus what bans slashed."""
    level = remains.config.training.async_level
    decided = Counter(digest_bytes(row["verdict"].encode()) for row in _decided(remains))
    if decided != Counter(body["verdict"] for body in remains.bodies("verdict")):
        yield "the verdicts of the store are not those of the ledger"
    earned: Counter[str] = Counter()
    counting, expired = _counting(remains), {row["lease_id"] for row in remains.rows(EXPIRED_CHOICES, level)}
    for row in _accepted(remains):
        if row["lease_id"] in counting - expired:
            earned[row["worker"]] += sum(group["tokens"] for group in json.loads(row["verdict"])["groups"])
    accounts = ledger.balances(remains.entries)
    if sum(sum(account.values()) for account in accounts.values()) != earned.total():
        yield "the credit of all workers is not what their verdicts say: a slot is paid once"
    shared = {row["worker"] for row in remains.rows(SHARED_SLOTS)}
    for row in remains.rows("SELECT * FROM workers"):
        account = accounts.get(row["key"], {"held": 0, "released": 0, "slashed": 0})
        if (account["held"], account["released"]) != (row["credit_held"], row["credit_released"]):
            yield f"the ledger gives {row['name']} {account}, the store {row['credit_held']}, {row['credit_released']}"
        if row["key"] not in shared and sum(account.values()) != earned[row["key"]]:
            yield f"{row['name']} has {sum(account.values())} tokens of credit, its verdicts say {earned[row['key']]}"


def _counting(remains: Remains) -> set[str]:
    """Leases whose files fill their slots; another file of the same slot does not count."""
    return {row["lease_id"] for row in remains.rows("SELECT lease_id FROM slots WHERE state IN ('resolved','void')")}


def _no_honest_worker_is_penalised(remains: Remains) -> Iterator[str]:
    for row in remains.rows("SELECT * FROM workers"):
        if row["name"] in HONEST and (row["state"] == "banned" or row["rejected"] or row["anomalies"]):
            yield f"{row['name']} is {row['state']} with {row['rejected']} rejections: {row['reason']}"
    for body in remains.bodies("quarantine"):
        yield f"submission {body['submission']} was quarantined: {body['why']}"


def _counts_are_those_of_the_rows(remains: Remains) -> Iterator[str]:
    """What the coordinator counts beside its tables, so that it need not look through them."""
    slots = {(row["step"], row["state"]): row["n"] for row in remains.rows(SLOTS_BY_STATE)}
    tallies = {(row["step"], row["name"]): row["n"] for row in remains.rows("SELECT * FROM tallies WHERE n <> 0")}
    states = {state for _, state in slots}
    if slots != {place: n for place, n in tallies.items() if place[1] in states}:
        yield "the coordinator's counts of slots are not those of its slots"
    waiting = {tuple(row) for row in remains.rows("SELECT step, policy_version, deferred, n FROM waiting WHERE n <> 0")}
    if waiting != {tuple(row) for row in remains.rows(WAITING_GROUPS)}:
        yield "the coordinator's counts of waiting groups are not those of its groups"


def _training_can_be_repeated(remains: Remains) -> Iterator[str]:
    """A trainer that nobody killed makes the same bytes from the recorded batches: each was trained on, once, in order."""
    config, descriptor, directory = remains.config, remains.directory.descriptor(), remains.directory

    class Records:
        """Replaces the coordinator: the batches and files of the store."""

        def batch(self, step: int, wait_s: float, epoch: int) -> api.BatchAnswer:
            return api.BatchAnswer(batch=steps.batch_record(remains.connection, step))

        def submission_file(self, submission_id: str, digest: str) -> bytes:
            return (directory.submissions / f"{submission_id}.parquet").read_bytes()

    torch.set_num_threads(1)
    trainer = Trainer(
        config.training,
        resolve_model(config.model.path),
        work_dir=directory.root.parent / "repeated",
        temperature=config.rollouts.temperature,
        seed=config.run.seed,
        max_new_tokens=config.rollouts.max_new_tokens,
    )
    service = TrainerService(config, descriptor, trainer, Records(), None)  # type: ignore[arg-type]  # stand-in
    published = {row["version"]: row["weights_digest"] for row in remains.rows("SELECT * FROM versions")}
    for version in range(len(published)):
        if version:
            service.step()  # no checkpoint is ever written here: the killed trainers wrote some at odd times
        if digest_weights(tensor_entry(tensor) for tensor in trainer.wire_tensors()) != published[version]:
            yield f"version {version} does not follow from the recorded batches"
            return


def _decided(remains: Remains) -> list[sqlite3.Row]:
    return remains.rows("SELECT * FROM submissions WHERE state='decided'")


def _accepted(remains: Remains) -> list[sqlite3.Row]:
    """Submissions that were accepted and used; none of this swarm is ever in quarantine."""
    return [row for row in _decided(remains) if json.loads(row["verdict"])["accepted"]]


CHECKS: tuple[Callable[[Remains], Iterator[str]], ...] = (
    _store_is_sound,
    _steps_are_whole,
    _groups_are_consumed_once,
    _no_group_is_lost,
    _uploads_are_kept,
    _balances_follow_from_verdicts,
    _no_honest_worker_is_penalised,
    _counts_are_those_of_the_rows,
)
