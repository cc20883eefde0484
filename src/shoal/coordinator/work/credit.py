"""Credit for verified tokens: part of it is held as a stake, the rest is released. Runs inside one transaction of the store."""

from shoal.coordinator import ledger
from shoal.coordinator.rules import credit
from shoal.coordinator.run import Run
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import update
from shoal.coordinator.store.tables import SubmissionRow, WorkerRow


def add_credit(connection: Connection, run: Run, worker: WorkerRow, row: SubmissionRow, earned: int) -> None:
    """Counts an accepted file and pays for it."""
    held, released = credit.split_credit(worker.credit_held, earned, run.config.trust.stake_tokens)
    worker = update(connection, worker, accepted=worker.accepted + 1)
    _book(connection, run, worker, row, held, released)


def take_credit(connection: Connection, run: Run, worker: WorkerRow, row: SubmissionRow, tokens: int) -> None:
    """Takes back held credit that another file of the slot shares."""
    _book(connection, run, worker, row, -tokens, 0)


def _book(connection: Connection, run: Run, worker: WorkerRow, row: SubmissionRow, held: int, released: int) -> None:
    update(
        connection,
        worker,
        credit_held=worker.credit_held + held,
        credit_released=worker.credit_released + released,
    )
    ledger.append(
        connection,
        run.keypair,
        run.clock(),
        "credit",
        worker=worker.key,
        held=held,
        released=released,
        submission=row.submission_id,
    )
