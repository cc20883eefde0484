"""Which entries of the ledger everybody may read: those before the first verdict of a step that is still open.

A verdict names its slot, the draw of its audit and the file whose credit it shares: while the step is open that would show who
works on the same slot and what is audited. An export of the entries before it is a whole ledger of its own, whose seal says how
many more there are. Runs inside a transaction of the store; the store remembers one entry per open step.
"""

import json

from shoal.coordinator.ledger.chain import Extent, hash_at, head
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.protocol.steps import StepId


def note_verdict(connection: Connection, *steps: StepId) -> None:
    """The next entry is a verdict of these steps: of its slot, and of the secret that drew its audit."""
    known, step = _first_verdicts(connection), max(steps)
    if step not in known:
        _keep(connection, known | {step: head(connection)[0]})


def release(connection: Connection, step: StepId) -> None:
    """The secret of this step is public, and no earlier step is open any more."""
    _keep(connection, {other: entry for other, entry in _first_verdicts(connection).items() if other > step})


def public_extent(connection: Connection, *, is_over: bool) -> Extent:
    """What everybody may read; of a run that is over, everything."""
    made, newest = head(connection)
    count = made if is_over else min(_first_verdicts(connection).values(), default=made)
    return Extent(count, hash_at(connection, count), made, newest)


def _first_verdicts(connection: Connection) -> dict[StepId, int]:
    found = json.loads(meta.read(connection, "open_verdicts") or "[]")
    return {StepId(*step): int(entry) for step, entry in found}


def _keep(connection: Connection, entries: dict[StepId, int]) -> None:
    meta.write(connection, "open_verdicts", json.dumps(list(entries.items())))
