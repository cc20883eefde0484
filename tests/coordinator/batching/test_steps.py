"""Versions, evaluations, and steps that time completes."""

import pytest

from shoal.errors import RefusedError
from shoal.protocol import api
from support.swarm import Swarm, ledger_kinds

PATIENCE_S = 60


def test_a_version_is_published_once(swarm: Swarm) -> None:
    first = swarm.publish(0)
    assert swarm.publish(0) == first
    assert ledger_kinds(swarm).count("version") == 1


@pytest.mark.parametrize("field", ["manifest_digest", "weights_digest"])
def test_a_number_never_gets_other_bytes(swarm: Swarm, field: str) -> None:
    swarm.publish(0)
    digest = f"{0:064x}"
    body = api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=100)
    with pytest.raises(RefusedError) as caught:
        swarm.client("trainer").publish(body.model_copy(update={field: "f" * 64}))
    assert (caught.value.code, caught.value.status) == ("version_conflict", 409)


@pytest.mark.parametrize("version", [1, 2, 7])
def test_versions_come_in_order_and_after_their_batch(swarm: Swarm, version: int) -> None:
    swarm.publish(0)
    with pytest.raises(RefusedError) as caught:
        swarm.publish(version)
    assert caught.value.code == "version_order"


def test_an_evaluation_is_recorded_once(swarm: Swarm) -> None:
    body = api.EvaluationBody(version=0, accuracy=0.25, problems=512, samples=1, mean_tokens=9.5, seconds=3)
    evaluator = swarm.client("evaluator")
    evaluator.report_evaluation(body)
    swarm.clock.advance(5)
    evaluator.report_evaluation(body.model_copy(update={"accuracy": 0.9}))
    assert [(view.accuracy, view.at_s) for view in evaluator.history().evaluations] == [(0.25, 0.0)]


def test_time_alone_completes_a_step_that_a_lost_slot_held_back(swarm: Swarm) -> None:
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    swarm.lease(bob)
    swarm.produce(ann)
    trainer = swarm.client("trainer")
    assert trainer.batch(0, wait_s=0).batch is None
    swarm.clock.advance(15.1)
    assert swarm.sweep()
    batch = trainer.batch(0, wait_s=0).batch
    assert batch is not None
    assert [group.group_id for group in batch.groups] == ["0/1/0", "0/1/1"]
