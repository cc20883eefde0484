import pytest

from shoal.protocol.verdicts import REASONS, Reason, Severity, most_severe, severity


def test_every_reason_has_a_weight_and_a_sentence() -> None:
    assert set(REASONS) == set(Reason)
    assert all(text and not text.endswith(".") for _, text in REASONS.values())


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([], None),
        ([Reason.VALIDATOR_CRASH], Severity.FAULT),
        ([Reason.VALIDATOR_CRASH, Reason.LOGPROBS], Severity.ANOMALY),
        ([Reason.LOGPROBS, Reason.REWARD, Reason.FILE_GONE], Severity.PROOF),
    ],
)
def test_the_most_severe_reason_decides(reasons: list[Reason], expected: Severity | None) -> None:
    assert most_severe(reasons) is expected


def test_a_worker_is_not_penalised_for_what_the_swarm_lost() -> None:
    innocent = (Reason.VERSION_GONE, Reason.FILE_GONE, Reason.VALIDATOR_CRASH, Reason.NUMERICS_UNKNOWN)
    assert {severity(reason) for reason in innocent} == {Severity.FAULT}


def test_only_exact_verifiers_prove_a_false_reward() -> None:
    assert severity(Reason.REWARD) is Severity.PROOF
    assert severity(Reason.REWARD_TOLERANT) is Severity.ANOMALY
