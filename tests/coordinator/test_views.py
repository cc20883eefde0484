from pathlib import Path

from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.swarm import Clock, Swarm, running, small_config


def test_an_empty_run_has_a_status(swarm: Swarm) -> None:
    status = swarm.client("anyone").status()
    assert (status.run_id, status.run_state, status.step, status.newest_version) == ("run-1", "running", 0, -1)
    assert (status.workers, status.recent_verdicts, status.age_histogram) == ([], [], {})
    assert status.slots_open == 3
    assert status.ledger_entries == 4, "the run, its terms, and commitments to the secrets of two steps"


def test_the_status_tells_who_does_what(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, eve = swarm.join("ann", "eve")
    swarm.produce(ann, useful=1)
    swarm.work(eve)
    swarm.clock.advance(2)
    swarm.reject(Reason.REWARD)
    swarm.work(ann)
    ann.heartbeat(api.HeartbeatBody(activity="generating"))
    status = ann.status()
    by_name = {view.name: view for view in status.workers}
    assert (by_name["ann"].activity, by_name["ann"].last_seen_s) == ("generating", 0.0)
    assert (by_name["eve"].state, by_name["eve"].banned_at_s) == ("banned", 2.0)
    assert status.verdicts == {"accepted": 1, "rejected": 1, "quarantined": 0, "void": 0}
    assert (status.useful_groups, status.groups_needed, status.submissions_pending) == (1, 2, 1)
    latest = status.recent_verdicts[0]
    assert (latest.accepted, latest.reasons, latest.at_s, latest.step) == (False, ["reward"], 2.0, 0)


def test_the_history_tells_what_each_step_was_made_of(tmp_path: Path) -> None:
    with running(tmp_path, small_config(training={"groups_per_step": 1})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann, useful=2)
        swarm.clock.advance(3)
        swarm.publish(1)
        swarm.sweep()
        history = ann.history()
        assert [view.published_s for view in history.versions] == [0.0, 3.0]
        assert history.versions[0].report == {"bytes_total": 100}
        first, second = history.batches
        assert first == {
            "step": 0, "formed_s": 0.0, "groups": 1, "generated_groups": 2, "max_age": 0, "dropped_carried_over": 1,
        }  # fmt: skip
        assert (second["step"], second["max_age"]) == (1, 1)
        assert history.bans == []


def test_bans_are_part_of_the_history(swarm: Swarm) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    swarm.work(eve)
    swarm.reject(Reason.SAMPLING)
    assert [view.name for view in eve.history().bans] == ["eve"]


def test_the_clock_of_a_run_leaves_out_the_time_in_which_it_was_stopped(tmp_path: Path) -> None:
    clock, config = Clock(), small_config(training={"groups_per_step": 1})
    with running(tmp_path, config, clock) as swarm:
        clock.advance(10)
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        clock.advance(20)
        swarm.produce(ann, useful=2)
        swarm.sweep()
    clock.advance(3600)
    with running(tmp_path, config, clock) as swarm:
        assert swarm.client("anyone").status().uptime_s == 30.0
        clock.advance(5)
        swarm.publish(1)
        assert [view.published_s for view in swarm.client("anyone").history().versions] == [10.0, 35.0]
    clock.advance(7200)
    with running(tmp_path, config, clock) as swarm:
        clock.advance(1)
        assert swarm.client("anyone").status().uptime_s == 36.0


def test_two_starts_without_a_sign_of_life_between_leave_out_each_second_once(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(3):
        clock.advance(100)
        with running(tmp_path, small_config(), clock) as swarm:
            assert swarm.client("anyone").status().uptime_s == 0.0


def test_the_clock_of_a_finished_run_stands_still(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 1}, training={"groups_per_step": 1})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann, useful=2)
        swarm.sweep()
        swarm.clock.advance(4)
        swarm.publish(1)
        swarm.clock.advance(500)
        status = swarm.client("anyone").status()
        assert (status.run_state, status.uptime_s) == ("finished", 4.0)
