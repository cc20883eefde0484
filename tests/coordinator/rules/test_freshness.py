"""When work waits for a newer version, and that the trainer never pays for it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.freshness import FEWEST_CYCLES, MARGIN, MEMORY, Cycle, Timing, TimingView, decide

FAST = Cycle(fill_s=2.0, train_s=10.0)
TRAINS_SINCE = 100.0


def view(
    step: int = 12,
    newest: int = 10,
    *,
    now: float = TRAINS_SINCE,
    cycles: list[Cycle] | None = None,
    async_level: int = 2,
    is_waiting: bool = True,
) -> TimingView:
    return TimingView(
        step, newest, async_level, TRAINS_SINCE, now, [FAST] * 5 if cycles is None else cycles, is_waiting=is_waiting
    )


def test_a_fast_swarm_waits_for_the_version_before_the_step() -> None:
    decision = decide(view())
    assert (decision.reason, decision.oldest_version) == ("waits_for_version", 11)
    # The batch is needed when two steps are trained, and filling takes 2 s with a margin.
    assert decision.latest_start == pytest.approx(TRAINS_SINCE + 20.0 - 2.0 * MARGIN)


def test_with_the_newest_version_out_keys_that_lack_it_still_wait_for_it() -> None:
    decision = decide(view(step=11))
    assert (decision.reason, decision.oldest_version) == ("waits_for_version", 10)


def test_work_is_never_held_for_a_version_that_only_a_waiting_trainer_could_make() -> None:
    assert decide(view(step=11, cycles=[Cycle(0.001, 1000.0)] * 5)).oldest_version == 10


@pytest.mark.parametrize("cycles", [[], [FAST], [FAST] * (FEWEST_CYCLES - 1)])
def test_work_is_leased_at_once_until_enough_cycles_were_measured(cycles: list[Cycle]) -> None:
    decision = decide(view(cycles=cycles))
    assert (decision.reason, decision.oldest_version, decision.has_time) == ("measuring", 10, False)


@pytest.mark.parametrize("step", [9, 10])
def test_work_is_leased_at_once_while_the_trainer_has_no_batch(step: int) -> None:
    decision = decide(view(step=step))
    assert (decision.reason, decision.oldest_version) == ("trainer_waits", step - 2)


def test_a_swarm_that_needs_the_time_gets_it() -> None:
    slow = [Cycle(fill_s=9.0, train_s=10.0)] * 5
    assert decide(view(cycles=slow)) == Timing(10, "swarm_too_slow", useful_share=0.5)


def test_one_slow_step_ends_the_waiting_until_it_is_forgotten() -> None:
    stalled = Cycle(fill_s=30.0, train_s=10.0)
    assert decide(view(cycles=[stalled, *[FAST] * (MEMORY - 1)])).reason == "swarm_too_slow"
    assert decide(view(cycles=[stalled, *[FAST] * MEMORY])).reason == "waits_for_version"


def test_steps_that_were_begun_ahead_do_not_count_as_slow_fillings() -> None:
    """The swarm filled the step before them too."""
    ahead = replace(FAST, fill_s=9.0, was_begun_ahead=True)
    assert decide(view(cycles=[FAST, ahead, FAST, ahead])) == decide(view(cycles=[FAST] * 4))
    assert decide(view(cycles=[ahead] * 5)).reason == "swarm_too_slow", "with nothing else to go by"


def test_a_swarm_at_the_limit_does_not_change_at_every_step() -> None:
    near = [Cycle(fill_s=7.0, train_s=10.0)] * 5
    assert decide(view(cycles=near, is_waiting=True)).is_waiting
    assert not decide(view(cycles=near, is_waiting=False)).is_waiting


def test_publishing_beside_the_next_step_leaves_less_time() -> None:
    publishing = [Cycle(fill_s=2.0, train_s=10.0, publish_s=4.0)] * 5
    decision = decide(view(cycles=publishing))
    assert decision.latest_start == pytest.approx(TRAINS_SINCE + 20.0 - 4.0 - 2.0 * MARGIN)
    assert decide(view(cycles=[Cycle(2.0, 10.0, publish_s=8.0)] * 5)).reason == "swarm_too_slow"


def test_from_the_latest_start_on_any_version_will_do() -> None:
    latest = decide(view()).latest_start
    assert latest is not None
    assert decide(view(now=latest - 0.1)).oldest_version == 11
    assert decide(view(now=latest)).oldest_version == 10
    assert decide(view(now=latest)).reason == "late"


def test_with_a_wide_window_work_waits_for_the_newest_version_that_comes_in_time() -> None:
    decision = decide(view(step=14, async_level=4, cycles=[Cycle(fill_s=6.0, train_s=10.0)] * 5))
    assert decision.oldest_version == 13
    late = decide(view(step=14, async_level=4, now=TRAINS_SINCE + 33.0, cycles=[Cycle(6.0, 10.0)] * 5))
    assert late.reason == "late"


seconds = st.floats(0.0, 1000.0)
some_cycles = st.lists(st.builds(Cycle, seconds, seconds, seconds), max_size=8)


@given(
    step=st.integers(0, 20),
    newest=st.integers(0, 20),
    async_level=st.integers(0, 5),
    now=st.floats(0.0, 10_000.0),
    cycles=some_cycles,
    is_waiting=st.booleans(),
)
def test_leases_wait_only_inside_the_window_and_only_while_the_batch_can_still_be_filled_in_time(
    step: int, newest: int, async_level: int, now: float, cycles: list[Cycle], is_waiting: bool
) -> None:
    seen = view(step, newest, now=now, cycles=cycles, async_level=async_level, is_waiting=is_waiting)
    decision = decide(seen)
    oldest = step - async_level
    assert oldest <= decision.oldest_version <= max(oldest, step - 1)
    if decision.oldest_version > oldest:
        recent = cycles[-MEMORY:]
        assert len(recent) >= FEWEST_CYCLES
        assert step > newest, "a trainer without a batch gets work at once"
        fastest = min(cycle.train_s for cycle in recent)
        slowest = max(cycle.fill_s for cycle in recent)
        assert now + slowest <= TRAINS_SINCE + (step - newest) * fastest, "work would come too late"


def test_the_usual_share_of_useful_groups_is_that_of_the_last_cycles_whatever_was_decided() -> None:
    cycles = [Cycle(2.0, 10.0, generated_groups=20, useful_groups=useful) for useful in (18, 19, 20, 18, 19)]
    in_time, late, waited_for = (
        view(cycles=cycles),
        view(cycles=cycles, now=TRAINS_SINCE + 19.0),
        view(10, 10, cycles=cycles),
    )
    slow = view(cycles=[replace(cycle, train_s=1.0) for cycle in cycles])
    decisions = [decide(one) for one in (in_time, late, waited_for, slow)]
    assert [one.reason for one in decisions] == ["waits_for_version", "late", "trainer_waits", "swarm_too_slow"]
    assert [one.useful_share for one in decisions] == [pytest.approx(95 / 102)] * 4
    assert [one.has_time for one in decisions] == [True, False, False, False]


def test_the_first_cycle_already_tells_the_usual_share_and_without_one_there_is_none() -> None:
    first = Cycle(2.0, 10.0, generated_groups=38, useful_groups=19)
    assert decide(view(cycles=[first])).useful_share == 0.5
    assert decide(view(cycles=[])).useful_share is None


@pytest.mark.parametrize(("useful", "generated"), [(0, 0), (0, 1000), (1000, 1000)])
def test_the_usual_share_is_never_0_or_1(useful: int, generated: int) -> None:
    """A share of 0 would ask for endless work, and a share of 1 for none when a group fails."""
    cycles = [Cycle(2.0, 10.0, generated_groups=generated, useful_groups=useful)] * 5
    share = decide(view(cycles=cycles)).useful_share
    assert share is not None
    assert 0 < share < 1
