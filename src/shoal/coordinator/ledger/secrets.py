"""Secrets of steps: fixed by a commitment in the ledger before the step begins, published with its batch.

Runs inside one transaction of the store. Two steps are always committed ahead: the current one and the one after it, so that a
commitment is never younger than the entry that opens its step.
"""

import json

from shoal.coordinator.ledger import held_back
from shoal.coordinator.ledger.chain import append
from shoal.coordinator.run import Run
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.protocol.steps import StepId, step_commitment, step_secret


def commit_ahead(connection: Connection, run: Run, current: StepId) -> None:
    """Commits to the secrets of the current step and of the next one, unless that was done."""
    commit(connection, run, current, current.next())


def commit(connection: Connection, run: Run, *steps: StepId) -> None:
    """Fixes secrets in advance. A step of a new epoch or attempt is committed before the entry that opens it."""
    committed = _committed(connection)
    for step in steps:
        if step not in committed:
            commitment = step_commitment(step, step_secret(run.secret, step))
            append(connection, run.keypair, run.clock(), "commitment", **step.fields(), commitment=commitment)
            committed.append(step)
    _keep(connection, committed)


def publish(connection: Connection, run: Run, step: StepId) -> str:
    """The secret of a step whose batch can no longer change, for the entry that says so."""
    held_back.release(connection, step)
    _keep(connection, [other for other in _committed(connection) if other > step])
    return step_secret(run.secret, step).hex()


def begin_epoch(connection: Connection, run: Run, first: StepId) -> list[list[object]]:
    """Commits to the first steps of a new epoch; returns the secrets of voided steps, which nothing is drawn under any more."""
    voided = [step for step in _committed(connection) if step.epoch < first.epoch]
    commit_ahead(connection, run, first)
    held_back.release(connection, first)
    _keep(connection, [step for step in _committed(connection) if step.epoch == first.epoch])
    return [[*step, step_secret(run.secret, step).hex()] for step in voided]


def _committed(connection: Connection) -> list[StepId]:
    """Steps that are committed and not yet published; a voided one stays until a later one is published."""
    return [StepId(*numbers) for numbers in json.loads(meta.read(connection, "committed") or "[]")]


def _keep(connection: Connection, steps: list[StepId]) -> None:
    meta.write(connection, "committed", json.dumps(steps))
