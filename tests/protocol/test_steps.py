import json

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.steps import StepId, secret_commitment, step_commitment, step_of, step_secret

RUN_SECRET = bytes(range(32))
NUMBERS = st.integers(0, 1 << 53)
STEPS = st.builds(StepId, NUMBERS, NUMBERS, NUMBERS)


@given(one=STEPS, other=STEPS)
def test_every_epoch_step_and_attempt_has_its_own_secret_and_commitment(one: StepId, other: StepId) -> None:
    secrets = [step_secret(RUN_SECRET, step) for step in (one, other)]
    assert (secrets[0] == secrets[1]) == (one == other)
    assert (step_commitment(one, secrets[0]) == step_commitment(other, secrets[0])) == (one == other)


def test_neighbouring_identities_share_no_secret() -> None:
    steps = [StepId(epoch, step, attempt) for epoch in range(4) for step in range(4) for attempt in range(4)]
    assert len({step_secret(RUN_SECRET, step) for step in steps}) == len(steps)


def test_a_commitment_does_not_show_its_secret_and_fits_no_other() -> None:
    secret = step_secret(RUN_SECRET, StepId(step=3))
    commitment = step_commitment(StepId(step=3), secret)
    assert secret.hex() not in commitment
    assert commitment != step_commitment(StepId(step=3), secret[::-1])


@given(step=STEPS)
def test_a_step_is_read_back_from_an_entry(step: StepId) -> None:
    assert step_of(json.loads(json.dumps(step.fields()))) == step
    assert StepId(*json.loads(json.dumps(step))) == step


def test_steps_follow_each_other_in_order() -> None:
    steps = [StepId(0, 4), StepId(0, 4, 1), StepId(0, 5), StepId(1, 2), StepId(1, 3)]
    assert sorted(steps) == steps
    assert StepId(1, 4, 2).next() == StepId(1, 5, 0)
    assert [str(step) for step in (StepId(0, 4), StepId(1, 4, 2))] == ["4", "4 (epoch 1, attempt 2)"]


def test_the_commitment_of_a_run_belongs_to_one_secret() -> None:
    assert secret_commitment(RUN_SECRET) != secret_commitment(RUN_SECRET[::-1])
