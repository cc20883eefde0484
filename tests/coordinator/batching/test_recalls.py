"""A batch whose training diverges is recalled, audited in full and proposed again without what fails."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import Swarm, refusal, running, small_config

from .test_screening import join_proven, names, propose, report, states


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    training: dict[str, object] = {"groups_per_step": 4, "oversampling": 8.0}
    config = small_config(run={"steps": 9}, training=training, trust={"audit_floor": 0.0})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        yield swarm


def recall(swarm: Swarm, attempt: int | None = 0, step: int = 0) -> int:
    body = api.RecallBody(step=step, attempt=attempt, reason="kl_update is 7")
    return swarm.client("trainer").recall(body).groups


def waiting(swarm: Swarm) -> api.BatchAnswer:
    return swarm.client("trainer").batch(0, 0)


def test_every_group_is_audited_and_the_clean_ones_are_proposed_again(swarm: Swarm) -> None:
    recorded = report(swarm, propose(swarm, "ann", "eve"))
    assert recall(swarm) == 4
    answer = waiting(swarm)
    assert (answer.batch, answer.waiting_for) == (None, "the audit of 4 groups of step 0, whose batch was recalled")
    claims = [swarm.claim(), swarm.claim()]
    assert [claim.audit_groups for claim in claims] == [[0, 1], [0, 1]]
    for claim in claims:
        if claim.worker_key == keypair("eve").public:
            swarm.reject(Reason.SAMPLING, claim=claim)
        else:
            swarm.accept(claim)
    again = waiting(swarm).batch
    assert again is not None
    assert (again.state, again.attempt, names(again)) == ("proposed", 1, names(recorded)[:2])
    assert all(group.logprobs_verified for group in again.groups)
    assert (swarm.state_of("ann"), swarm.state_of("eve")) == ("active", "banned")
    final = report(swarm, again, *names(again))
    assert (final.state, names(final)) == ("recorded", names(again)), "audited groups are not held back"
    swarm.publish(1)


def test_the_ledger_says_what_was_recalled_and_why(swarm: Swarm) -> None:
    recorded = report(swarm, propose(swarm, "ann", "bob"))
    recall(swarm)
    entry = json.loads(str(swarm.one("SELECT body FROM ledger WHERE kind='recalled'")["body"]))
    assert (entry["step"], entry["groups"], entry["reason"]) == (0, names(recorded), "kl_update is 7")


def test_a_repeated_request_changes_nothing(swarm: Swarm) -> None:
    report(swarm, propose(swarm, "ann", "bob"))
    assert recall(swarm) == recall(swarm) == 4
    for _ in range(2):
        swarm.accept()
    assert recall(swarm) == 0, "the attempt is over"
    assert waiting(swarm).batch is not None


def test_honest_work_that_diverges_is_not_recalled_a_second_time(swarm: Swarm) -> None:
    report(swarm, propose(swarm, "ann", "bob"))
    recall(swarm)
    for _ in range(2):
        swarm.accept()
    again = waiting(swarm).batch
    assert again is not None
    report(swarm, again)
    assert refusal(lambda: recall(swarm, again.attempt)) == "all_audited"


def test_what_a_version_was_trained_on_stays(swarm: Swarm) -> None:
    propose(swarm, "ann", "bob")
    swarm.publish(1)
    assert refusal(lambda: recall(swarm)) == "batch_trained"
    assert set(states(swarm).values()) == {"consumed"}


def test_no_version_is_published_on_a_batch_that_was_recalled(swarm: Swarm) -> None:
    report(swarm, propose(swarm, "ann", "bob"))
    recall(swarm)
    body = api.VersionBody(version=1, manifest_digest="1" * 64, weights_digest="1" * 64, bytes_total=1)
    assert refusal(lambda: swarm.client("trainer").publish(body)) == "version_order"


def test_a_file_that_no_validator_can_decide_is_left_out(swarm: Swarm) -> None:
    report(swarm, propose(swarm, "ann", "bob"))
    recall(swarm)
    swarm.write(
        lambda connection: connection.execute(
            "UPDATE submissions SET state='quarantined' WHERE worker=?", (keypair("bob").public,)
        )
    )
    swarm.accept()
    again = waiting(swarm).batch
    assert again is not None
    assert len(again.groups) == 2


def test_the_owner_may_do_the_same_by_hand_and_nobody_else(swarm: Swarm) -> None:
    propose(swarm, "ann", "bob")
    body = api.RecallBody(step=0, reason="odd answers")
    assert refusal(lambda: swarm.client("trainer").recall_by_hand(body)) == "owner"
    assert refusal(lambda: swarm.client("ann").recall(body)) == "role"
    assert swarm.client("run").recall_by_hand(body).groups == 4


def test_the_next_step_goes_on_meanwhile(swarm: Swarm) -> None:
    report(swarm, propose(swarm, "ann", "bob"))
    recall(swarm)
    for client in join_proven(swarm, "cid", "dan"):
        swarm.work(client)
    claims = [swarm.claim() for _ in range(4)]
    for claim in claims:
        swarm.accept(claim)
    following = swarm.client("trainer").batch(1, 0).batch
    assert following is not None
