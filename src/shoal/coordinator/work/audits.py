"""What is audited beyond the draw: files in doubt, and what one key may not bring into a batch without an audit.

Runs inside one transaction of the store.
"""

import json

from shoal.coordinator.rules.unaudited import limit_of_key
from shoal.coordinator.run import Run
from shoal.coordinator.states import GroupState, SubmissionState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import number, update
from shoal.coordinator.store.tables import SubmissionRow
from shoal.protocol import api


def audit_in_full(connection: Connection, run: Run, row: SubmissionRow) -> bool:
    """Sends a file to an audit of all its groups; false if it had one, or is waiting for one already."""
    everything = list(range(run.descriptor.rollouts.tasks_per_slot))
    if row.groups_to_audit == everything:
        return False
    waiting = {"state": SubmissionState.PENDING, "claim_id": None, "retry_at": 0.0}
    update(connection, row, **waiting, audit_groups=json.dumps(everything), audit_rate=1.0)
    return True


def was_audited_in_full(run: Run, row: SubmissionRow) -> bool:
    """Whether the file was accepted after an audit of all its groups."""
    if row.state is not SubmissionState.DECIDED or row.verdict is None:
        return False
    verdict = api.VerdictBody.model_validate_json(row.verdict)
    return verdict.accepted and len(verdict.audited_groups) == run.descriptor.rollouts.tasks_per_slot


def left_of_key(connection: Connection, run: Run, key: str) -> int:
    """How many more useful groups of this key may stay without an audit: its part of a batch, less what waits or is checked."""
    waiting = number(
        connection,
        f"SELECT COUNT(*) AS n FROM groups WHERE worker=? AND state='{GroupState.ACCEPTED}' AND logprobs_verified=0",
        (key,),
    )
    promised = number(
        connection,
        f"SELECT SUM(unaudited_limit) AS n FROM submissions WHERE worker=? AND state='{SubmissionState.CLAIMED}'",
        (key,),
    )
    return max(0, limit_of_key(run.config.training, run.config.trust) - waiting - promised)
