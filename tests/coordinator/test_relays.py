"""Relays as the coordinator knows them: announcements, reports of clients, and the list that everybody gets."""

from collections.abc import Iterable

import pytest

from shoal.coordinator.relays import KNOWN_PER_ADDRESS, MAX_KNOWN, Relays
from shoal.coordinator.rules.relays import BAD_LASTS_S, PLACES, TURN_S
from shoal.errors import RefusedError
from shoal.protocol import api
from support.samples import keypair
from support.swarm import HEARTBEAT, Clock, Swarm, refusal

REAL = api.RelayBody(url="http://real")


@pytest.fixture
def relays() -> Relays:
    return Relays(Clock(), gone_after_s=30.0)


def announce(relays: Relays, name: str, address: str = "", url: str = "") -> None:
    body = api.RelayBody(url=url or f"http://{name}")
    relays.announce(name, body, (relays.clock(), name), address or name)


def report(relays: Relays, url: str, reporters: Iterable[str], *, is_good: bool, is_owners: bool = False) -> None:
    body = api.RelayReportBody(relays=[api.RelayMeasurement(url=url, is_good=is_good)])
    for reporter in reporters:
        relays.report(reporter, body, is_owners=is_owners)


def listed(relays: Relays) -> set[str]:
    return {key for key, _ in relays.listed()}


def advance(relays: Relays, seconds: float) -> None:
    clock = relays.clock
    assert isinstance(clock, Clock)
    clock.advance(seconds)


def test_64_false_relays_of_one_address_lock_no_real_one_out(relays: Relays) -> None:
    for number in range(KNOWN_PER_ADDRESS):
        announce(relays, f"false-{number}", "eve")
    for number in range(KNOWN_PER_ADDRESS, 64):
        with pytest.raises(RefusedError, match="Too many relays"):
            announce(relays, f"false-{number}", "eve")
    announce(relays, "real")
    assert "real" in listed(relays)
    assert len(listed(relays)) == 3


def test_false_relays_of_64_addresses_lose_their_places_as_clients_report_them(relays: Relays) -> None:
    for number in range(PLACES):
        announce(relays, f"false-{number}")
    assert len(listed(relays)) == PLACES
    announce(relays, "real")
    assert "real" not in listed(relays)
    report(relays, "http://false-7", ["validator"], is_good=False, is_owners=True)
    assert "real" in listed(relays)
    assert "false-7" not in listed(relays)


def test_without_a_report_a_real_one_waits_for_its_turn_only(relays: Relays) -> None:
    for number in range(PLACES):
        announce(relays, f"false-{number}")
    listed(relays)
    announce(relays, "real")
    advance(relays, TURN_S)
    announce(relays, "real")
    assert "real" in listed(relays)


def test_a_single_stranger_moves_no_relay_in_or_out(relays: Relays) -> None:
    announce(relays, "real")
    report(relays, "http://real", ["ann", "bob", "cem"], is_good=True)
    report(relays, "http://real", ["eve"] * 100, is_good=False)
    assert listed(relays) == {"real"}
    report(relays, "http://real", ["ann", "bob"], is_good=False)
    assert listed(relays) == set()


def test_a_relay_that_fails_does_not_return_under_a_new_key(relays: Relays) -> None:
    announce(relays, "bad", url="http://bad")
    report(relays, "http://bad", ["validator"], is_good=False, is_owners=True)
    assert listed(relays) == set()
    advance(relays, 31)
    announce(relays, "new-key", url="http://bad")
    assert listed(relays) == set()
    advance(relays, BAD_LASTS_S)
    announce(relays, "new-key", url="http://bad")
    assert listed(relays) == {"new-key"}


def test_an_address_belongs_to_the_relay_that_announced_it_and_always_to_the_owner(relays: Relays) -> None:
    announce(relays, "eve", url="http://owner")
    with pytest.raises(RefusedError, match="Another relay has announced"):
        announce(relays, "bob", url="http://owner")
    relays.owners = lambda: {"owner"}
    announce(relays, "owner", url="http://owner")
    assert listed(relays) == {"owner"}


def test_what_is_remembered_is_bounded_and_makes_way_for_newcomers(relays: Relays) -> None:
    for number in range(MAX_KNOWN):
        announce(relays, f"false-{number}")
    with pytest.raises(RefusedError, match="Too many relays"):
        announce(relays, "early")
    listed(relays)
    advance(relays, TURN_S)
    for number in range(MAX_KNOWN):
        announce(relays, f"false-{number}")
    listed(relays)
    announce(relays, "real")
    assert "real" in relays.known
    assert len(relays.known) == MAX_KNOWN
    report(relays, "http://nobody", ["ann"], is_good=True)
    assert relays._votes == {}


def test_the_list_forgets_the_silent(swarm: Swarm) -> None:
    swarm.client("old").announce_relay(api.RelayBody(url="http://old"))
    swarm.clock.advance(601)
    answer = swarm.client("real").announce_relay(REAL)
    assert [view.url for view in answer.relays] == ["http://real"]
    assert answer.is_listed


def test_reports_count_from_the_owners_roles_and_keys_with_accepted_work_only(swarm: Swarm) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.client("relay").announce_relay(REAL)
    bad = api.RelayReportBody(relays=[api.RelayMeasurement(url=REAL.url, is_good=False)])
    for number in range(5):
        swarm.client(f"stranger-{number}").report_relays(bad)
    ann.report_relays(bad)
    assert swarm.run.presence.relays._votes == {}
    assert [view.url for view in swarm.client("validator").report_relays(bad).relays] == []
    assert not swarm.client("relay").announce_relay(REAL).is_listed
    assert ann.heartbeat(HEARTBEAT).relay_urls == []


def test_keys_behind_one_address_have_one_vote(swarm: Swarm) -> None:
    swarm.client("relay").announce_relay(REAL)
    bad = api.RelayReportBody(relays=[api.RelayMeasurement(url=REAL.url, is_good=False)])
    for number in range(10):
        swarm.run.presence.proven.add(keypair(f"eve-{number}").public)
        swarm.client(f"eve-{number}").report_relays(bad)
    assert len(swarm.run.presence.relays._votes[REAL.url]) == 1
    assert swarm.client("relay").announce_relay(REAL).is_listed


def test_relays_of_one_address_are_refused_beyond_a_few(swarm: Swarm) -> None:
    for number in range(KNOWN_PER_ADDRESS):
        swarm.client(f"relay-{number}").announce_relay(api.RelayBody(url=f"http://relay-{number}"))
    late = swarm.client("late")
    assert refusal(lambda: late.announce_relay(api.RelayBody(url="http://late"))) == "too_many_relays"
    swarm.run.presence.relays.owners = lambda: {keypair("late").public}
    assert late.announce_relay(api.RelayBody(url="http://late")).is_listed


def test_the_success_of_a_relay_is_what_its_clients_report(relays: Relays) -> None:
    announce(relays, "real")
    known = relays.known["real"]
    assert relays.success(known) is None
    for served, failed in ((8, 2), (9, 1)):
        body = api.RelayReportBody(
            relays=[api.RelayMeasurement(url="http://real", is_good=True, served=served, failed=failed)]
        )
        relays.report("validator", body, is_owners=True)
    found = relays.success(known)
    assert found is not None
    assert (round(found.share, 3), found.reporters) == (round((9 + 7.2) / 19, 3), 1)


def test_the_list_and_the_events_tell_how_well_a_relay_serves(swarm: Swarm) -> None:
    relay = swarm.client("relay")
    seen: list[dict[str, object]] = []
    swarm.run.metrics.listen(seen.append)
    relay.announce_relay(REAL)
    measured = api.RelayMeasurement(url=REAL.url, is_good=True, served=3, failed=1)
    answer = swarm.client("validator").report_relays(api.RelayReportBody(relays=[measured]))
    assert [(view.success, view.reporters) for view in answer.relays] == [(0.75, 1)]
    assert f'shoal_relay_success{{relay="{REAL.url}"}} 0.75' in swarm.http.get("/metrics").text
    relay.announce_relay(REAL.model_copy(update={"newest_version": 3}))
    events = [record for record in seen if record["event"] == "relay"]
    assert [record.get("success") for record in events] == [None, 0.75]
