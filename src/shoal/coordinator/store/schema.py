"""The tables of the store, as numbered migrations in SQL that SQLite and PostgreSQL both understand.

A new store runs all of them, an older one those that it lacks, each in one transaction with its number. A migration that was
released never changes; the next change of the schema is a new one. A store of a newer release is refused, not guessed at.
"""

from shoal.coordinator.store.database import Connection, Database
from shoal.errors import ShoalError

FIRST = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE workers (
  key TEXT PRIMARY KEY, name TEXT NOT NULL, engine TEXT NOT NULL, numerics_class TEXT NOT NULL,
  tokens_per_s DOUBLE PRECISION NOT NULL, registered_at DOUBLE PRECISION NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '', clean_audits BIGINT NOT NULL DEFAULT 0, anomalies BIGINT NOT NULL DEFAULT 0,
  drift DOUBLE PRECISION NOT NULL DEFAULT 0, accepted BIGINT NOT NULL DEFAULT 0, rejected BIGINT NOT NULL DEFAULT 0,
  credit_held BIGINT NOT NULL DEFAULT 0, credit_released BIGINT NOT NULL DEFAULT 0, banned_at DOUBLE PRECISION);
CREATE INDEX workers_by_state ON workers (state, key);
CREATE TABLE nonces (
  key TEXT NOT NULL, nonce TEXT NOT NULL, expires_at DOUBLE PRECISION NOT NULL, PRIMARY KEY (key, nonce)) WITHOUT ROWID;
CREATE INDEX nonces_by_expiry ON nonces (expires_at);
CREATE TABLE slots (
  step BIGINT NOT NULL, slot BIGINT NOT NULL, state TEXT NOT NULL, lease_id TEXT, attempts BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (step, slot)) WITHOUT ROWID;
CREATE INDEX slots_by_state ON slots (state, step, slot);
CREATE TABLE leases (
  lease_id TEXT PRIMARY KEY, request_id TEXT NOT NULL, worker TEXT NOT NULL, step BIGINT NOT NULL, slot BIGINT NOT NULL,
  policy_version BIGINT NOT NULL, manifest_digest TEXT NOT NULL, issued_at DOUBLE PRECISION NOT NULL,
  expires_at DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, UNIQUE (worker, request_id));
CREATE INDEX leases_by_expiry ON leases (state, expires_at);
CREATE INDEX leases_by_slot ON leases (step, slot, worker);
CREATE INDEX leases_by_worker ON leases (worker, state);
CREATE TABLE submissions (
  submission_id TEXT PRIMARY KEY, lease_id TEXT NOT NULL UNIQUE, worker TEXT NOT NULL, digest TEXT NOT NULL,
  size_bytes BIGINT NOT NULL, signature TEXT NOT NULL, received_at DOUBLE PRECISION NOT NULL, audit BIGINT NOT NULL,
  state TEXT NOT NULL, claim_id TEXT, claimed_by TEXT, claim_request TEXT, claim_expires DOUBLE PRECISION,
  tries BIGINT NOT NULL DEFAULT 0, judged_at DOUBLE PRECISION, verdict TEXT);
CREATE INDEX submissions_by_state ON submissions (state, received_at);
CREATE INDEX submissions_by_worker ON submissions (worker, state);
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, submission_id TEXT NOT NULL, worker TEXT NOT NULL, step BIGINT NOT NULL, slot BIGINT NOT NULL,
  number BIGINT NOT NULL, policy_version BIGINT NOT NULL, useful BIGINT NOT NULL, tokens BIGINT NOT NULL,
  rewards TEXT NOT NULL, task_rewards TEXT NOT NULL, logprobs_verified BIGINT NOT NULL,
  state TEXT NOT NULL, batch_step BIGINT, position BIGINT);
CREATE INDEX groups_by_state ON groups (state, step, slot, number);
CREATE INDEX groups_by_batch ON groups (batch_step, position);
CREATE INDEX groups_by_submission ON groups (submission_id);
CREATE TABLE batches (
  step BIGINT PRIMARY KEY, formed_at DOUBLE PRECISION NOT NULL, groups BIGINT NOT NULL, generated BIGINT NOT NULL,
  dropped TEXT NOT NULL, ages TEXT NOT NULL);
CREATE TABLE versions (
  version BIGINT PRIMARY KEY, manifest_digest TEXT NOT NULL, weights_digest TEXT NOT NULL, bytes_total BIGINT NOT NULL,
  published_at DOUBLE PRECISION NOT NULL, report TEXT NOT NULL);
CREATE TABLE evaluations (version BIGINT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, body TEXT NOT NULL);
CREATE TABLE ledger (
  seq BIGINT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
  previous TEXT NOT NULL, hash TEXT NOT NULL, signature TEXT NOT NULL);
"""

AUDIT_DRAWS_AND_RETRIES = """
ALTER TABLE submissions ADD COLUMN audit_step BIGINT;
ALTER TABLE submissions ADD COLUMN audit_rate DOUBLE PRECISION NOT NULL DEFAULT 1;
ALTER TABLE submissions ADD COLUMN numerics_class TEXT NOT NULL DEFAULT '';
ALTER TABLE submissions ADD COLUMN faults BIGINT NOT NULL DEFAULT 0;
ALTER TABLE submissions ADD COLUMN retry_at DOUBLE PRECISION NOT NULL DEFAULT 0;
"""

TASK_STATISTICS = """
CREATE TABLE task_stats (
  task_id TEXT PRIMARY KEY, groups BIGINT NOT NULL, samples BIGINT NOT NULL, solved BIGINT NOT NULL, useful BIGINT NOT NULL);
"""

TALLIES = """
ALTER TABLE leases ADD COLUMN proven BIGINT NOT NULL DEFAULT 1;
DROP INDEX leases_by_worker;
CREATE INDEX leases_by_worker ON leases (worker, step, state);
CREATE INDEX leases_held ON leases (worker) WHERE state='leased';
CREATE INDEX leases_by_issue ON leases (proven, issued_at, worker);
CREATE TABLE tallies (step BIGINT NOT NULL, name TEXT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (step, name)) WITHOUT ROWID;
INSERT INTO tallies SELECT step, state, COUNT(*) FROM slots GROUP BY step, state;
CREATE TABLE waiting (
  step BIGINT NOT NULL, policy_version BIGINT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (step, policy_version)) WITHOUT ROWID;
CREATE INDEX waiting_by_version ON waiting (policy_version);
INSERT INTO waiting SELECT step, policy_version, COUNT(*) FROM groups WHERE state='accepted' GROUP BY step, policy_version;
CREATE TABLE presence (
  key TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL, activity TEXT NOT NULL, tokens_generated BIGINT NOT NULL,
  bytes_received BIGINT NOT NULL) WITHOUT ROWID;
CREATE INDEX presence_by_time ON presence (seen_at);
CREATE TABLE relays (key TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX relays_by_time ON relays (seen_at);
"""

RETENTION = """
ALTER TABLE submissions ADD COLUMN collected_at DOUBLE PRECISION;
CREATE INDEX submissions_by_collection ON submissions (collected_at, received_at);
ALTER TABLE workers ADD COLUMN memory_bytes BIGINT NOT NULL DEFAULT 0;
ALTER TABLE workers ADD COLUMN link_bytes_per_s DOUBLE PRECISION NOT NULL DEFAULT 0;
"""

NONCES_IN_ORDER = """
ALTER TABLE nonces RENAME TO old_nonces;
CREATE TABLE nonces (
  at DOUBLE PRECISION NOT NULL, key TEXT NOT NULL, nonce TEXT NOT NULL, PRIMARY KEY (at, key, nonce)) WITHOUT ROWID;
"""
"""Nonces of an older release stay valid in their own table until they run out."""

ENGINE_NAMES = """
ALTER TABLE workers DROP COLUMN engine;
"""
"""The numerics class begins with the engine's name."""

MIGRATIONS: dict[int, str] = {
    2: FIRST,
    3: AUDIT_DRAWS_AND_RETRIES,
    4: TASK_STATISTICS,
    6: TALLIES,
    7: RETENTION,
    8: NONCES_IN_ORDER,
    9: ENGINE_NAMES,
}
"""By the schema version that each leads to, in order."""
SCHEMA_VERSION = max(MIGRATIONS)


class SchemaError(ShoalError):
    code = "schema"
    permanent = True


def migrate(connection: Connection, database: Database) -> None:
    """Brings the schema up to date; several processes that start at once do it once."""
    database.begin_write(connection)
    try:
        version = database.schema_version(connection)
        if version > SCHEMA_VERSION:
            raise SchemaError(
                f"{database.name} was written by a newer release (schema {version}, this one knows {SCHEMA_VERSION}).",
                hint="Upgrade shoal on this host.",
            )
        if 0 < version < min(MIGRATIONS):
            raise SchemaError(
                f"{database.name} was written by a release that is too old (schema {version}).",
                hint="Start a new run, or finish this one with that release.",
            )
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
