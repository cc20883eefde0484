import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrustConfig, build_config
from shoal.coordinator.rules.trust import (
    ANOMALIES_TO_QUARANTINE,
    LossRule,
    TrustEvent,
    TrustRecord,
    after,
    audit_order,
    audit_rate,
    audited_groups,
    earned_state,
    groups_to_audit,
    is_usable,
    rounding,
)

CONFIG = TrustConfig(probation_audits=3, audit_floor=0.1)
SECRET = bytes(32)


def run(record: TrustRecord, *events: TrustEvent) -> TrustRecord:
    for event in events:
        record = after(record, event, CONFIG)
    return record


@pytest.mark.parametrize(
    ("start", "event", "end"),
    [
        (("registered", 0, 0), "asked", ("probation", 0, 0)),
        (("registered", 0, 0), "silent", ("gone", 0, 0)),
        (("registered", 0, 0), "returned", ("registered", 0, 0)),
        (("registered", 0, 0), "unbanned", ("registered", 0, 0)),
        (("registered", 0, 0), "proof", ("banned", 0, 0)),
        (("registered", 0, 0), "anomaly", ("suspect", 0, 1)),
        (("probation", 0, 0), "asked", ("probation", 0, 0)),
        (("active", 9, 0), "asked", ("active", 9, 0)),
        (("suspect", 1, 1), "asked", ("suspect", 1, 1)),
        (("quarantined", 1, 3), "asked", ("quarantined", 1, 3)),
        (("gone", 2, 0), "asked", ("gone", 2, 0)),
        (("banned", 2, 0), "asked", ("banned", 2, 0)),
        (("probation", 0, 0), "clean_audit", ("probation", 1, 0)),
        (("probation", 2, 0), "clean_audit", ("active", 3, 0)),
        (("probation", 2, 0), "clean_pass", ("probation", 2, 0)),
        (("probation", 2, 0), "anomaly", ("suspect", 0, 1)),
        (("probation", 2, 0), "proof", ("banned", 2, 0)),
        (("probation", 2, 0), "silent", ("gone", 2, 0)),
        (("active", 9, 0), "clean_audit", ("active", 10, 0)),
        (("active", 9, 0), "clean_pass", ("active", 9, 0)),
        (("active", 9, 0), "anomaly", ("suspect", 0, 1)),
        (("active", 9, 0), "proof", ("banned", 9, 0)),
        (("active", 9, 0), "silent", ("gone", 9, 0)),
        (("active", 9, 0), "returned", ("active", 9, 0)),
        (("active", 9, 0), "unbanned", ("active", 9, 0)),
        (("suspect", 0, 1), "clean_audit", ("suspect", 1, 1)),
        (("suspect", 2, 1), "clean_audit", ("active", 3, 0)),
        (("suspect", 2, 2), "clean_audit", ("suspect", 0, 1)),
        (("suspect", 2, 1), "anomaly", ("suspect", 0, 2)),
        (("suspect", 2, 2), "anomaly", ("quarantined", 0, 3)),
        (("suspect", 2, 1), "proof", ("banned", 2, 1)),
        (("suspect", 2, 1), "silent", ("gone", 2, 1)),
        (("quarantined", 0, 3), "clean_pass", ("quarantined", 0, 3)),
        (("quarantined", 1, 3), "clean_audit", ("quarantined", 2, 3)),
        (("quarantined", 2, 3), "clean_audit", ("suspect", 0, 2)),
        (("quarantined", 2, 4), "clean_audit", ("quarantined", 0, 3)),
        (("quarantined", 2, 3), "anomaly", ("quarantined", 0, 4)),
        (("quarantined", 2, 3), "proof", ("banned", 2, 3)),
        (("quarantined", 2, 3), "silent", ("gone", 2, 3)),
        (("gone", 2, 0), "returned", ("probation", 2, 0)),
        (("gone", 3, 0), "returned", ("active", 3, 0)),
        (("gone", 0, 1), "returned", ("suspect", 0, 1)),
        (("gone", 0, 3), "returned", ("quarantined", 0, 3)),
        (("gone", 2, 0), "clean_audit", ("gone", 3, 0)),
        (("gone", 2, 0), "clean_pass", ("gone", 2, 0)),
        (("gone", 2, 0), "anomaly", ("suspect", 0, 1)),
        (("gone", 2, 0), "proof", ("banned", 2, 0)),
        (("gone", 2, 0), "silent", ("gone", 2, 0)),
        (("banned", 2, 1), "clean_audit", ("banned", 2, 1)),
        (("banned", 2, 1), "clean_pass", ("banned", 2, 1)),
        (("banned", 2, 1), "anomaly", ("banned", 2, 1)),
        (("banned", 2, 1), "proof", ("banned", 2, 1)),
        (("banned", 2, 1), "silent", ("banned", 2, 1)),
        (("banned", 2, 1), "returned", ("banned", 2, 1)),
        (("banned", 2, 1), "unbanned", ("probation", 0, 0)),
    ],
)
def test_each_edge(start: tuple[str, int, int], event: TrustEvent, end: tuple[str, int, int]) -> None:
    assert run(TrustRecord(*start), event) == TrustRecord(*end)  # type: ignore[arg-type]  # states are literals


def test_clean_work_leads_out_of_quarantine() -> None:
    anomaly: tuple[TrustEvent, ...] = ("anomaly",)
    clean: tuple[TrustEvent, ...] = ("clean_audit",)
    record = run(TrustRecord("active", 9), *anomaly * ANOMALIES_TO_QUARANTINE)
    assert record.state == "quarantined"
    assert run(record, *clean * 3).state == "suspect"
    assert run(record, *clean * 8).state == "suspect"
    assert run(record, *clean * 9) == TrustRecord("active", 3)


events = st.sampled_from(["clean_audit", "clean_pass", "anomaly", "silent", "returned"])


@given(st.lists(events, max_size=40))
def test_going_away_and_coming_back_never_improves_a_state(history: list[TrustEvent]) -> None:
    record = run(TrustRecord("probation"), *history)
    assert run(record, "silent", "returned").state == earned_state(record, CONFIG)
    if record.state != "gone":
        assert record.state == earned_state(record, CONFIG)


def test_work_of_quarantined_and_banned_keys_is_not_used_even_when_they_are_gone() -> None:
    assert is_usable(TrustRecord("gone", 0, 0), CONFIG)
    assert is_usable(TrustRecord("suspect", 0, 2), CONFIG)
    assert not is_usable(TrustRecord("quarantined", 0, 3), CONFIG)
    assert not is_usable(TrustRecord("gone", 0, 3), CONFIG)
    assert not is_usable(TrustRecord("banned", 9, 0), CONFIG)


@pytest.mark.parametrize(
    ("record", "rate"),
    [
        (TrustRecord("probation", 2), 1.0),
        (TrustRecord("suspect", 2, 1), 1.0),
        (TrustRecord("quarantined", 2, 3), 1.0),
        (TrustRecord("gone", 99), 1.0),
        (TrustRecord("active", 3), 1.0),
        (TrustRecord("active", 6), 0.5),
        (TrustRecord("active", 300), 0.1),
    ],
)
def test_the_audit_rate_of_a_proven_key_falls_to_the_floor(record: TrustRecord, rate: float) -> None:
    assert audit_rate(record, CONFIG) == rate


def test_the_audit_draw_follows_the_rate_the_secret_and_the_digest() -> None:
    digests = [f"{number:064x}" for number in range(2000)]
    drawn = [audited_groups(SECRET, digest, 0.1, 8) for digest in digests]
    assert 1480 < sum(map(len, drawn)) < 1720, "a tenth of 16,000 groups"
    assert drawn == [audited_groups(SECRET, digest, 0.1, 8) for digest in digests]
    assert drawn != [audited_groups(b"\1" * 32, digest, 0.1, 8) for digest in digests]
    assert all(audited_groups(SECRET, digest, 1.0, 8) == tuple(range(8)) for digest in digests)
    assert not any(audited_groups(SECRET, digest, 0.0, 8) for digest in digests)


def test_groups_of_one_file_are_drawn_independently() -> None:
    """Whole files used to be drawn: a tenth of them in full, nine tenths not at all."""
    drawn = [audited_groups(SECRET, f"{number:064x}", 0.1, 8) for number in range(2000)]
    touched = sum(1 for groups in drawn if groups)
    assert 1060 < touched < 1220, "1 − 0.9^8 = 57 % of the files"
    both = sum(1 for groups in drawn if {0, 1} <= set(groups))
    assert both < 45, "two given groups of a file: 1 % of the files"


def test_a_key_that_forges_every_group_loses_one_to_the_draw_within_a_few_groups() -> None:
    """73 groups were consumed in the median when files of eight groups were drawn."""
    unseen = []
    for key in range(200):
        flags = [
            group in audited_groups(SECRET, f"{key:032x}{file:032x}", 0.1, 8)
            for file in range(40)
            for group in range(8)
        ]
        unseen.append(flags.index(True))
    assert sorted(unseen)[100] <= 8


def test_an_audit_of_a_part_of_a_submission_counts_as_that_part() -> None:
    record = TrustRecord("probation")
    for _ in range(8):
        record = after(record, "clean_audit", CONFIG, 1 / 3)
    assert record.state == "probation"
    assert record.clean_audits == pytest.approx(8 / 3)
    assert after(record, "clean_audit", CONFIG, 1 / 3).state == "active", "thirds add up to three whole submissions"


def test_cheating_loses_in_expectation_exactly_from_the_smallest_stake_on() -> None:
    rule = LossRule(audit_rate=0.1, detection_power=0.99, stake_tokens=0, gain_tokens=2048)
    enough = rule.smallest_stake()
    assert LossRule(0.1, 0.99, enough, 2048).holds
    assert not LossRule(0.1, 0.99, enough - 1, 2048).holds
    assert "stake 0 tokens" in str(rule)


def test_cheating_in_one_group_is_what_must_not_pay() -> None:
    config = build_config({"rollouts": {"tasks_per_slot": 8}, "trust": {"stake_tokens": 50_000}})
    rule = LossRule.of(config)
    assert rule.gain_tokens == config.rollouts.group_size * config.rollouts.max_new_tokens
    caught = rule.audit_rate * rule.detection_power

    def gain_over_loss(groups: int) -> float:
        passed = (1 - caught) ** groups
        return groups * passed / (1 - passed)

    ratios = [gain_over_loss(groups) for groups in range(1, 9)]
    assert ratios == sorted(ratios, reverse=True)


def test_without_audits_no_stake_is_enough() -> None:
    assert not LossRule(0.0, 1.0, 10**9, 1).holds


@given(
    st.sets(st.integers(0, 7)),
    st.permutations(range(8)),
    st.sets(st.integers(0, 7)),
    st.integers(min_value=0, max_value=9),
)
def test_no_more_useful_groups_than_the_limit_stay_without_an_audit(
    drawn: set[int], order: list[int], useful: set[int], limit: int
) -> None:
    audited = groups_to_audit(
        sorted(drawn), order, useful, [limit if count == len(useful) else 0 for count in range(9)]
    )
    assert drawn <= set(audited)
    assert len(useful - set(audited)) == min(limit, len(useful - drawn))
    assert set(audited) - drawn <= useful, "a group without a signal is not trained on"


def test_without_limits_nothing_beyond_the_draw_is_audited() -> None:
    assert groups_to_audit([2], range(8), {1, 2, 3}, []) == [2]


def test_coins_are_even_and_follow_secret_and_file() -> None:
    coins = [rounding(SECRET, f"{number:064x}") for number in range(2000)]
    assert all(0.0 <= coin < 1.0 for coin in coins)
    assert 0.47 < sum(coins) / len(coins) < 0.53
    assert len({*coins, *(rounding(b"x" * 32, f"{number:064x}") for number in range(2000))}) == 4000


def test_the_groups_that_a_higher_rate_would_draw_are_audited_first() -> None:
    digest = f"{7:064x}"
    order = audit_order(SECRET, digest, 8)
    for rate in (0.1, 0.3, 0.6, 1.0):
        drawn = audited_groups(SECRET, digest, rate, 8)
        assert set(order[: len(drawn)]) == set(drawn)
