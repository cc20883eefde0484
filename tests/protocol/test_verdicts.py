import pytest

from shoal.protocol.verdicts import REASONS, Reason, Weight, heaviest, weight


def test_every_reason_has_a_weight_and_a_sentence() -> None:
    assert set(REASONS) == set(Reason)
    assert all(text and not text.endswith(".") for _, text in REASONS.values())


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([], None),
        ([Reason.VALIDATOR_CRASH], Weight.FAULT),
        ([Reason.VALIDATOR_CRASH, Reason.LOGPROBS], Weight.ANOMALY),
        ([Reason.LOGPROBS, Reason.REWARD, Reason.FILE_GONE], Weight.PROOF),
    ],
)
def test_the_heaviest_reason_decides(reasons: list[Reason], expected: Weight | None) -> None:
    assert heaviest(reasons) is expected


def test_nobody_is_blamed_for_what_the_swarm_lost() -> None:
    innocent = (Reason.VERSION_GONE, Reason.FILE_GONE, Reason.VALIDATOR_CRASH, Reason.NUMERICS_UNKNOWN)
    assert {weight(reason) for reason in innocent} == {Weight.FAULT}


def test_only_exact_verifiers_prove_a_false_reward() -> None:
    assert weight(Reason.REWARD) is Weight.PROOF
    assert weight(Reason.REWARD_TOLERANT) is Weight.ANOMALY
