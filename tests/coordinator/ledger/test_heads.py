"""Heads travel with heartbeats, and a head that the chain does not have is reported to both sides."""

import json
from pathlib import Path

from shoal.coordinator import ledger
from shoal.metrics import EventLog
from shoal.protocol import api
from shoal.protocol.evidence import LedgerHead, open_evidence, seal
from support.samples import keypair
from support.swarm import Swarm

COORDINATOR = keypair("coordinator")


def beat(swarm: Swarm, head: str = "") -> api.HeartbeatAnswer:
    return swarm.client("ann").heartbeat(api.HeartbeatBody(activity="generating", ledger_head=head))


def forged(entries: int, at: float, by: str = "coordinator") -> str:
    return seal(LedgerHead(run_id="run-1", at=at, entries=entries, head="ab" * 32), keypair(by))


def conflicts(path: Path) -> list[dict[str, object]]:
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in events if event["event"] == "ledger_conflict"]


def test_every_heartbeat_brings_a_signed_head_that_the_chain_has(swarm: Swarm) -> None:
    swarm.join("ann")
    first = beat(swarm)
    head = open_evidence(LedgerHead, first.ledger_head, COORDINATOR.public)
    assert (head.entries, head.head) == swarm.read(ledger.head)
    swarm.publish(0)
    later = beat(swarm, first.ledger_head)
    assert later.kept_head == "known"
    assert open_evidence(LedgerHead, later.ledger_head, COORDINATOR.public).entries == head.entries + 1


def test_a_head_that_this_coordinator_signed_and_does_not_have_is_an_event(swarm: Swarm, tmp_path: Path) -> None:
    swarm.alter(metrics=EventLog(tmp_path / "events.jsonl"))
    swarm.join("ann")
    for _ in range(2):
        assert beat(swarm, forged(3, swarm.clock())).kept_head == "unknown"
    (event,) = conflicts(tmp_path / "events.jsonl")
    assert (event["state"], event["entries"], event["worker"]) == ("unknown", 3, keypair("ann").public)


def test_heads_that_anybody_made_up_are_of_no_interest(swarm: Swarm, tmp_path: Path) -> None:
    swarm.alter(metrics=EventLog(tmp_path / "events.jsonl"))
    swarm.join("ann")
    for text in (forged(3, 0.0, by="mallory"), "nonsense", "{}", '{"payload": 5}', "[" * 2000):
        assert beat(swarm, text).kept_head == "known"
    assert not conflicts(tmp_path / "events.jsonl")


def test_a_restore_explains_a_head_from_before_it(swarm: Swarm, tmp_path: Path) -> None:
    swarm.alter(metrics=EventLog(tmp_path / "events.jsonl"))
    swarm.join("ann")
    lost = forged(99, swarm.clock())
    swarm.clock.advance(600)
    restored_at = swarm.clock()
    swarm.write(
        lambda connection: ledger.append(connection, COORDINATOR, restored_at, "restored", restored_at=restored_at)
    )
    assert beat(swarm, lost).kept_head == "restored"
    assert beat(swarm, forged(99, restored_at + 3600)).kept_head == "unknown"
