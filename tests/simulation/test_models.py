"""Messages that are made without a check are those of pydantic."""

import pytest

from shoal.protocol import api
from shoal.simulation.memory.models import made

LEASE = {
    "lease_id": "a" * 32,
    "step": 3,
    "slot": 7,
    "slot_seed": "b" * 64,
    "policy_version": 2,
    "manifest_digest": "",
    "expires_at": 12.5,
}
GROUP = {"group": 0, "task_id": "t", "useful": True, "tokens": 9, "rewards": [1.0], "task_rewards": [1.0]}


@pytest.mark.parametrize(("kind", "values"), [(api.Lease, LEASE), (api.GroupVerdict, GROUP), (api.LeaseAnswer, {})])
def test_a_message_that_is_made_is_the_one_that_pydantic_constructs(
    kind: type[api.Lease | api.GroupVerdict | api.LeaseAnswer], values: dict[str, object]
) -> None:
    ours, theirs = made(kind, **values), kind.model_construct(**values)  # type: ignore[arg-type]
    assert ours == theirs
    assert ours.model_dump() == theirs.model_dump()
    assert ours.model_copy(update=values) == theirs


def test_what_is_made_cannot_be_changed() -> None:
    lease = made(api.Lease, **LEASE)
    with pytest.raises(ValueError, match="frozen"):
        lease.step = 4
