"""Published secrets are held to commitments that are older than their steps."""

from typing import Any

from shoal.coordinator.ledger.findings import Finding
from shoal.coordinator.ledger.secret_check import SecretCheck
from shoal.coordinator.rules.trust import audited_groups, rounding
from shoal.coordinator.rules.unaudited import limit_of_file
from shoal.protocol.steps import StepId, step_commitment, step_secret

RUN_SECRET = bytes(range(32))
FILE = "ab" * 32
Entry = tuple[str, dict[str, Any]]


def commitment(step: StepId, secret: bytes | None = None) -> Entry:
    fixed = step_commitment(step, secret or step_secret(RUN_SECRET, step))
    return "commitment", {**step.fields(), "commitment": fixed}


def recorded(step: StepId, secret: bytes | None = None) -> Entry:
    return "recorded", {**step.fields(), "groups": [], "step_secret": (secret or step_secret(RUN_SECRET, step)).hex()}


def verdict(step: StepId, *, drawn: list[int] | None = None, rate: float = 0.5, position: int = 0) -> Entry:
    expected = list(audited_groups(step_secret(RUN_SECRET, step), FILE, rate, 8))
    body = {"file": FILE, "groups": 8, "position": position, "audit_rate": rate, "audit_step": list(step)}
    body |= {"useful": [], "audited": expected, "useful_rate": 0.5}
    return "verdict", {**step.fields(), **body, "audit_drawn": expected if drawn is None else drawn}


def useful(entry: Entry, audited: list[int]) -> Entry:
    """All groups of the file are useful, and only these were audited."""
    kind, body = entry
    return kind, body | {"useful": list(range(8)), "audited": audited}


def findings(*entries: Entry) -> list[Finding]:
    check = SecretCheck()
    return [one for seq, (kind, body) in enumerate(entries) for one in check.take(seq, kind, body)]


def test_useful_groups_that_were_not_audited_beyond_the_draw_are_located() -> None:
    limit = limit_of_file(0.5, 8, rounding(step_secret(RUN_SECRET, ZERO), FILE))
    assert limit in (4, 5)
    enough, few = list(range(8 - limit)), list(range(7 - limit))
    assert not findings(commitment(ZERO), useful(verdict(ZERO), enough), recorded(ZERO))
    found = findings(commitment(ZERO), useful(verdict(ZERO), few), recorded(ZERO))
    assert found == [Finding(1, f"{limit + 1} of 8 useful groups were not audited, the draw allows {limit}")]


ZERO, ONE, TWO = (StepId(step=number) for number in range(3))
AGAIN = StepId(epoch=1, step=1)


def test_secrets_that_were_committed_to_in_time_pass() -> None:
    assert not findings(
        commitment(ZERO), commitment(ONE), verdict(ZERO), recorded(ZERO), commitment(TWO), verdict(ONE), recorded(ONE)
    )


def test_another_secret_than_the_committed_one_is_located() -> None:
    found = findings(commitment(ZERO), commitment(ONE), recorded(ZERO), recorded(ONE, bytes(32)))
    assert found == [Finding(3, "the secret of step 1 is not the one that entry 1 commits to")]


def test_a_commitment_made_after_the_step_began_is_located() -> None:
    found = findings(commitment(ZERO), recorded(ZERO), commitment(ONE), recorded(ONE))
    assert found == [Finding(3, "the secret of step 1 was committed to in entry 2, after the step began")]
    proposed = ("proposed", ZERO.fields())
    assert findings(commitment(ZERO), proposed, commitment(ONE), recorded(ZERO), recorded(ONE)) != []
    assert not findings(commitment(ZERO), commitment(ONE), proposed, recorded(ZERO), recorded(ONE))


def test_a_rewound_step_has_a_commitment_of_its_own_before_the_rewind() -> None:
    begun = [commitment(ZERO), commitment(ONE), recorded(ZERO), commitment(TWO), recorded(ONE)]
    rewound = ("rewound", AGAIN.fields() | {"step_secrets": [[*TWO, recorded(TWO)[1]["step_secret"]]]})
    assert not findings(*begun, commitment(AGAIN), rewound, verdict(AGAIN), recorded(AGAIN))
    late = findings(*begun, rewound, commitment(AGAIN), recorded(AGAIN))
    assert late == [Finding(7, "the secret of step 1 (epoch 1) was committed to in entry 6, after the step began")]


def test_a_missing_a_second_and_a_repeated_secret_are_located() -> None:
    assert findings(recorded(ZERO)) == [Finding(0, "the secret of step 0 was never committed to")]
    assert findings(commitment(ZERO), commitment(ZERO))[0].entry == 1
    assert findings(commitment(ZERO), recorded(ZERO), recorded(ZERO))[0] == Finding(
        2, "the secret of step 0 is published a second time"
    )


def test_a_draw_is_repeated_whether_its_secret_comes_later_or_came_before() -> None:
    lie = verdict(ZERO, drawn=[3], rate=0.0)
    assert findings(commitment(ZERO), lie, recorded(ZERO))[0].entry == 1
    assert findings(commitment(ZERO), recorded(ZERO), lie)[0].entry == 2
    assert findings(verdict(ZERO))[0].text.endswith("which nothing commits to")


def test_a_file_that_came_when_the_secret_was_public_is_located() -> None:
    late = verdict(ZERO, position=2)
    assert findings(commitment(ZERO), recorded(ZERO), late) == [
        Finding(2, "the file arrived when the secret of step 0, which drew its audit, was public")
    ]
    assert not findings(commitment(ZERO), recorded(ZERO), verdict(ZERO, position=1))


def test_draws_of_groups_are_repeated_too() -> None:
    right = list(audited_groups(step_secret(RUN_SECRET, ZERO), FILE, 0.5, 8))
    assert not findings(commitment(ZERO), verdict(ZERO, drawn=right), recorded(ZERO))
    assert findings(commitment(ZERO), verdict(ZERO, drawn=right[1:]), recorded(ZERO))[0].entry == 1


def test_draws_whose_secret_is_not_public_are_counted() -> None:
    check = SecretCheck()
    for seq, (kind, body) in enumerate([commitment(ZERO), verdict(ZERO), verdict(ZERO)]):
        list(check.take(seq, kind, body))
    assert (check.waiting, check.repeated) == (2, 0)
