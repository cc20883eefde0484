"""A batch is proposed, screened and only then recorded; what the trainer finds improbable is audited, not trained on."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import GroupRow
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import Swarm, ledger_kinds, refusal, running, small_config

IMPROBABLE = -700.0
"""As groups of random tokens have it: log-probability −13.7 per token against −0.24."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """Batches of 4 groups, slots of 2; every key has earned the floor, and nothing is drawn."""
    training: dict[str, object] = {"groups_per_step": 4, "oversampling": 8.0}
    config = small_config(run={"steps": 9}, training=training, trust={"audit_floor": 0.0})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        yield swarm


def join_proven(swarm: Swarm, *names: str) -> list[CoordinatorClient]:
    clients = swarm.join(*names)
    for client in clients:
        swarm.ask(client)
    swarm.write(lambda connection: connection.execute("UPDATE workers SET state='active', clean_audits=1000000"))
    return clients


def propose(swarm: Swarm, *names: str) -> api.BatchRecord:
    """One slot of each key, until the batch of the step is proposed."""
    for client in join_proven(swarm, *names):
        swarm.produce(client)
    batch = swarm.client("trainer").batch(0, 0).batch
    assert batch is not None
    assert batch.state == "proposed"
    return batch


def report(swarm: Swarm, batch: api.BatchRecord, *improbable: str) -> api.BatchRecord:
    values = {one.group_id: IMPROBABLE if one.group_id in improbable else 0.3 for one in batch.groups}
    body = api.ScreeningBody(step=batch.step, attempt=batch.attempt, statistics=values)
    return swarm.client("trainer").screen(body)


def states(swarm: Swarm) -> dict[str, str]:
    return {row.group_id: str(row.state) for row in swarm.read(lambda connection: select(connection, GroupRow))}


def names(batch: api.BatchRecord) -> list[str]:
    return [group.group_id for group in batch.groups]


def test_a_probable_batch_is_recorded_as_it_was_proposed(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "bob")
    recorded = report(swarm, proposed)
    assert (recorded.state, recorded.attempt, names(recorded)) == ("recorded", 0, names(proposed))
    assert swarm.client("trainer").batch(0, 0).batch == recorded
    assert set(states(swarm).values()) == {"consumed"}


def test_an_improbable_group_is_audited_and_not_trained_on(swarm: Swarm) -> None:
    """It was trained on before: log-probability −13.7 per token, gradient norm ×15."""
    proposed = propose(swarm, "ann", "eve")
    bad = names(proposed)[2]
    recorded = report(swarm, proposed, bad)
    assert recorded.state == "recorded"
    assert names(recorded) == [name for name in names(proposed) if name != bad]
    assert recorded.dropped["withheld"] == 1
    assert swarm.state_of("eve") == "active", "the check alone penalises no worker"
    claim = swarm.claim()
    assert (claim.worker_key, claim.audit_groups) == (keypair("eve").public, [0, 1])
    entry = json.loads(str(swarm.one("SELECT body FROM ledger WHERE kind='recorded'")["body"]))
    assert entry["groups"] == names(recorded)


def test_a_forger_is_banned_by_the_audit_and_its_held_back_group_is_withdrawn(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "eve")
    bad = names(proposed)[2]
    report(swarm, proposed, bad)
    swarm.reject(Reason.SAMPLING)
    assert swarm.state_of("eve") == "banned"
    assert states(swarm)[bad] == "withdrawn"
    assert ledger_kinds(swarm).count("ban") == 1


def test_an_honest_group_that_was_held_back_is_trained_later_without_a_second_doubt(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "bob")
    held = names(proposed)[0]
    report(swarm, proposed, held)
    swarm.accept()
    assert states(swarm)[held] == "accepted"
    swarm.publish(1)
    for client in join_proven(swarm, "cid", "dan"):
        swarm.produce(client)
    following = swarm.client("trainer").batch(1, 0).batch
    assert following is not None
    assert held in names(following)
    assert next(group for group in following.groups if group.group_id == held).logprobs_verified
    assert held in names(report(swarm, following, held)), "an audit has shown that it is what its seed selects"


def test_lost_places_are_filled_with_groups_that_wait(swarm: Swarm) -> None:
    ann, bob, cid = join_proven(swarm, "ann", "bob", "cid")
    for client in (ann, bob, cid):
        swarm.work(client)
    for _ in range(3):
        swarm.accept(useful=2)
    proposed = swarm.client("trainer").batch(0, 0).batch
    assert proposed is not None
    again = report(swarm, proposed, *names(proposed)[:2])
    assert (again.state, again.attempt) == ("proposed", 1)
    assert names(again) == [*names(proposed)[2:], "0/2/0", "0/2/1"]
    assert report(swarm, proposed) == again, "statistics of an old list change nothing"
    final = report(swarm, again)
    assert (final.state, names(final)) == ("recorded", names(again))


def test_a_batch_that_loses_everything_is_recorded_empty_and_the_run_goes_on(swarm: Swarm) -> None:
    proposed = propose(swarm, "eve", "mallory")
    assert names(report(swarm, proposed, *names(proposed))) == []
    swarm.publish(1)
    for _ in range(2):
        swarm.reject(Reason.SAMPLING)
    for client in join_proven(swarm, "ann", "bob"):
        swarm.produce(client)
    following = swarm.client("trainer").batch(1, 0).batch
    assert following is not None
    assert len(following.groups) == 4


def test_a_lost_answer_is_given_again(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "bob")
    assert report(swarm, proposed, names(proposed)[0]) == report(swarm, proposed, names(proposed)[0])


def test_groups_of_a_key_that_is_banned_meanwhile_leave_the_proposal(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "eve")
    body = api.BanBody(worker=keypair("eve").public, reason="spam")
    swarm.client("run").ban(body)
    recorded = report(swarm, proposed)
    assert (recorded.state, names(recorded)) == ("recorded", names(proposed)[:2])


def test_statistics_must_cover_the_whole_proposal(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "bob")
    body = api.ScreeningBody(step=0, attempt=0, statistics={names(proposed)[0]: 0.0})
    assert refusal(lambda: swarm.client("trainer").screen(body)) == "malformed"
    body = api.ScreeningBody(step=7, attempt=0, statistics={})
    assert refusal(lambda: swarm.client("trainer").screen(body)) == "unknown_batch"
    assert refusal(lambda: swarm.client("ann").screen(body)) == "role"


def test_a_version_needs_a_recorded_batch(swarm: Swarm) -> None:
    propose(swarm, "ann", "bob")
    body = api.VersionBody(version=1, manifest_digest="1" * 64, weights_digest="1" * 64, bytes_total=1)
    assert refusal(lambda: swarm.client("trainer").publish(body)) == "version_order"


def test_files_of_held_back_groups_are_kept(swarm: Swarm) -> None:
    proposed = propose(swarm, "ann", "bob")
    report(swarm, proposed, names(proposed)[0])
    swarm.accept()
    assert states(swarm)[names(proposed)[0]] == "accepted"
    assert (swarm.run.submissions / f"{proposed.groups[0].submission_id}.parquet").exists()
