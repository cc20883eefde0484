"""Registration, presence, and the list of relays."""

from pathlib import Path

from shoal.protocol import api
from support.swarm import HEARTBEAT, Swarm, registration, running, small_config


def test_registering_twice_updates_what_is_said_and_keeps_what_is_earned(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann, useful=0)
    view = ann.register(registration("ann on a new laptop", tokens_per_s=7.0))
    assert (view.name, view.tokens_per_s, view.submissions_accepted) == ("ann on a new laptop", 7.0, 1)
    assert [entry["kind"] for entry in swarm.all("SELECT kind FROM ledger")].count("registered") == 1


def test_a_heartbeat_brings_back_state_credit_and_relays(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.client("relay").announce_relay(api.RelayBody(url="http://relay:7400"))
    answer = ann.heartbeat(HEARTBEAT)
    assert (answer.worker.state, answer.worker.activity) == ("registered", "generating")
    assert answer.relay_urls == ["http://relay:7400"]


def test_a_heartbeat_writes_nothing(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    before = swarm.all("SELECT * FROM nonces")
    ann.heartbeat(HEARTBEAT)
    assert swarm.all("SELECT * FROM nonces") == before


def test_a_replayed_heartbeat_cannot_keep_a_dead_worker_alive(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    body = HEARTBEAT.model_dump_json().encode()
    headers = ann._headers("POST", "/v1/heartbeat", body, None)
    assert swarm.http.post("/v1/heartbeat", content=body, headers=headers).status_code == 200
    swarm.clock.advance(31)
    answer = swarm.http.post("/v1/heartbeat", content=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "clock")


def test_a_silent_worker_is_marked_as_gone_and_returns_with_what_it_had(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann, useful=0)
    swarm.produce(ann, useful=0)
    assert swarm.state_of("ann") == "active"
    swarm.clock.advance(31)
    assert swarm.sweep()
    assert swarm.state_of("ann") == "gone"
    assert not swarm.sweep()
    assert ann.heartbeat(HEARTBEAT).worker.state == "active"
    swarm.clock.advance(31)
    swarm.sweep()
    assert swarm.ask(ann, 0).lease is not None
    assert swarm.state_of("ann") == "active"


def test_a_restart_forgets_nobody(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.join("ann")
        clock = swarm.clock
    clock.advance(3600)
    with running(tmp_path, small_config(), clock) as swarm:
        swarm.sweep()
        assert swarm.state_of("ann") == "registered"
        clock.advance(31)
        swarm.sweep()
        assert swarm.state_of("ann") == "gone"


def test_silent_relays_are_not_recommended(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.client("relay").announce_relay(api.RelayBody(url="http://relay"))
    swarm.clock.advance(31)
    assert ann.heartbeat(HEARTBEAT).relay_urls == []
    assert [view.last_seen_s for view in ann.relays().relays] == [31.0]
