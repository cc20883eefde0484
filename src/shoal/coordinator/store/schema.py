"""The tables of the store, as numbered migrations in SQL that SQLite and PostgreSQL both understand.

A new store runs all of them, an older one those that it lacks, each in one transaction with its number. A migration that was
released never changes; the next change of the schema is a new one. A store of a newer release is refused, not guessed at.
`tables` has the same columns as records.
"""

from shoal.coordinator.states import LeaseState, SlotState
from shoal.coordinator.store.database import Connection, Database
from shoal.errors import ShoalError

FIRST = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE workers (
  key TEXT PRIMARY KEY, name TEXT NOT NULL, numerics_class TEXT NOT NULL, tokens_per_s DOUBLE PRECISION NOT NULL,
  memory_bytes BIGINT NOT NULL, link_bytes_per_s DOUBLE PRECISION NOT NULL, registered_at DOUBLE PRECISION NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL, clean_audits DOUBLE PRECISION NOT NULL, anomalies BIGINT NOT NULL,
  drift DOUBLE PRECISION NOT NULL, accepted BIGINT NOT NULL, rejected BIGINT NOT NULL, credit_held BIGINT NOT NULL,
  credit_released BIGINT NOT NULL, banned_at DOUBLE PRECISION, in_time DOUBLE PRECISION NOT NULL,
  missed DOUBLE PRECISION NOT NULL, failures BIGINT NOT NULL, failed_at DOUBLE PRECISION NOT NULL,
  work_s DOUBLE PRECISION NOT NULL, lag_s DOUBLE PRECISION NOT NULL, delivered_at DOUBLE PRECISION NOT NULL,
  newest_used BIGINT NOT NULL, tokens DOUBLE PRECISION NOT NULL, busy_s DOUBLE PRECISION NOT NULL,
  slot_tokens DOUBLE PRECISION NOT NULL, received_at DOUBLE PRECISION NOT NULL, drift_sums TEXT NOT NULL);
CREATE INDEX workers_by_state ON workers (state, key);
CREATE INDEX workers_by_delivery ON workers (delivered_at);
CREATE TABLE presence (
  key TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL, activity TEXT NOT NULL, tokens_generated BIGINT NOT NULL,
  bytes_received BIGINT NOT NULL) WITHOUT ROWID;
CREATE INDEX presence_by_time ON presence (seen_at);
CREATE TABLE relays (
  key TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL, address TEXT NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX relays_by_time ON relays (seen_at);
CREATE TABLE nonces (
  at DOUBLE PRECISION NOT NULL, key TEXT NOT NULL, nonce TEXT NOT NULL, PRIMARY KEY (at, key, nonce)) WITHOUT ROWID;
CREATE TABLE slots (
  epoch BIGINT NOT NULL, step BIGINT NOT NULL, slot BIGINT NOT NULL, state TEXT NOT NULL, lease_id TEXT, attempts BIGINT NOT NULL,
  policy_version BIGINT NOT NULL, numerics_class TEXT NOT NULL, deferred BIGINT NOT NULL, due_at DOUBLE PRECISION NOT NULL,
  PRIMARY KEY (epoch, step, slot)) WITHOUT ROWID;
CREATE INDEX slots_by_state ON slots (state, epoch, step, slot);
CREATE INDEX slots_by_due ON slots (epoch, step, due_at) WHERE state='{SlotState.LEASED}' AND deferred=0;
CREATE TABLE tallies (
  epoch BIGINT NOT NULL, step BIGINT NOT NULL, name TEXT NOT NULL, n BIGINT NOT NULL,
  PRIMARY KEY (epoch, step, name)) WITHOUT ROWID;
CREATE TABLE leases (
  lease_id TEXT PRIMARY KEY, request_id TEXT NOT NULL, worker TEXT NOT NULL, step BIGINT NOT NULL, slot BIGINT NOT NULL,
  policy_version BIGINT NOT NULL, manifest_digest TEXT NOT NULL, issued_at DOUBLE PRECISION NOT NULL,
  expires_at DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, by_active_key BIGINT NOT NULL, epoch BIGINT NOT NULL,
  attempt BIGINT NOT NULL, UNIQUE (worker, request_id));
CREATE INDEX leases_by_expiry ON leases (state, expires_at);
CREATE INDEX leases_by_slot ON leases (epoch, step, slot, worker);
CREATE INDEX leases_by_worker ON leases (worker, epoch, step, state);
CREATE INDEX leases_held ON leases (worker) WHERE state='{LeaseState.LEASED}';
CREATE INDEX leases_by_issue ON leases (by_active_key, issued_at, worker);
CREATE TABLE submissions (
  submission_id TEXT PRIMARY KEY, lease_id TEXT NOT NULL UNIQUE, worker TEXT NOT NULL, digest TEXT NOT NULL,
  size_bytes BIGINT NOT NULL, signature TEXT NOT NULL, received_at DOUBLE PRECISION NOT NULL, audit_groups TEXT NOT NULL,
  audit_step BIGINT NOT NULL, audit_rate DOUBLE PRECISION NOT NULL, useful_rate DOUBLE PRECISION NOT NULL,
  numerics_class TEXT NOT NULL, state TEXT NOT NULL,
  claim_id TEXT, claimed_by TEXT, claim_request TEXT, claim_expires DOUBLE PRECISION, tries BIGINT NOT NULL,
  faults BIGINT NOT NULL, retry_at DOUBLE PRECISION NOT NULL, decided_at DOUBLE PRECISION, verdict TEXT,
  collected_at DOUBLE PRECISION, unaudited_limit BIGINT NOT NULL, audit_epoch BIGINT NOT NULL,
  audit_attempt BIGINT NOT NULL, position BIGINT NOT NULL, paid BIGINT NOT NULL);
CREATE INDEX submissions_by_state ON submissions (state, received_at);
CREATE INDEX submissions_by_worker ON submissions (worker, state);
CREATE INDEX submissions_by_collection ON submissions (collected_at, received_at);
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, submission_id TEXT NOT NULL, worker TEXT NOT NULL, step BIGINT NOT NULL, slot BIGINT NOT NULL,
  number BIGINT NOT NULL, policy_version BIGINT NOT NULL, useful BIGINT NOT NULL, tokens BIGINT NOT NULL,
  rewards TEXT NOT NULL, task_rewards TEXT NOT NULL, logprobs_verified BIGINT NOT NULL,
  state TEXT NOT NULL, deferred BIGINT NOT NULL, batch_step BIGINT, position BIGINT, epoch BIGINT NOT NULL);
CREATE INDEX groups_by_state ON groups (state, step, slot, number);
CREATE INDEX groups_by_batch ON groups (batch_step, position);
CREATE INDEX groups_by_submission ON groups (submission_id);
CREATE INDEX groups_by_worker ON groups (worker, state);
CREATE TABLE waiting (
  step BIGINT NOT NULL, policy_version BIGINT NOT NULL, deferred BIGINT NOT NULL, n BIGINT NOT NULL,
  PRIMARY KEY (step, policy_version, deferred)) WITHOUT ROWID;
CREATE INDEX waiting_by_version ON waiting (policy_version);
CREATE TABLE task_stats (
  task_id TEXT PRIMARY KEY, groups BIGINT NOT NULL, samples BIGINT NOT NULL, solved BIGINT NOT NULL, useful BIGINT NOT NULL);
CREATE TABLE batches (
  step BIGINT PRIMARY KEY, formed_at DOUBLE PRECISION NOT NULL, groups BIGINT NOT NULL, generated BIGINT NOT NULL,
  dropped TEXT NOT NULL, ages TEXT NOT NULL, state TEXT NOT NULL, attempt BIGINT NOT NULL, epoch BIGINT NOT NULL,
  useful BIGINT NOT NULL, reward_mean DOUBLE PRECISION, task_reward_mean DOUBLE PRECISION);
CREATE INDEX batches_by_state ON batches (state, step);
CREATE TABLE versions (
  version BIGINT PRIMARY KEY, manifest_digest TEXT NOT NULL, weights_digest TEXT NOT NULL, bytes_total BIGINT NOT NULL,
  published_at DOUBLE PRECISION NOT NULL, report TEXT NOT NULL, epoch BIGINT NOT NULL);
CREATE TABLE evaluations (version BIGINT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, body TEXT NOT NULL);
CREATE TABLE rewinds (
  epoch BIGINT PRIMARY KEY, version BIGINT NOT NULL, newest_before BIGINT NOT NULL, groups BIGINT NOT NULL,
  audits BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL, reason TEXT NOT NULL);
CREATE TABLE ledger (
  seq BIGINT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
  previous TEXT NOT NULL, hash TEXT NOT NULL, signature TEXT NOT NULL);
"""

MIGRATIONS: dict[int, str] = {19: FIRST}
"""By the schema version that each leads to, in order."""


class SchemaError(ShoalError):
    """A database of another run or of a newer release."""

    code = "schema"
    permanent = True


def schema_version() -> int:
    """The version that this release writes."""
    return max(MIGRATIONS)


def migrate(connection: Connection, database: Database) -> None:
    """Brings the schema up to date; several processes that start at once do it once."""
    database.begin_write(connection)
    try:
        version = database.schema_version(connection)
        _require_known(version, database.name)
        for number, script in sorted(MIGRATIONS.items()):
            if number > version:
                for statement in script.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
                database.set_schema_version(connection, number)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _require_known(version: int, name: str) -> None:
    if version > schema_version():
        raise SchemaError(
            f"{name} was written by a newer release (schema {version}, this one knows {schema_version()}).",
            hint="Upgrade shoal on this host.",
        )
    if 0 < version < min(MIGRATIONS):
        raise SchemaError(
            f"{name} was written by a release that is too old (schema {version}).",
            hint="Start a new run, or finish this one with that release.",
        )
