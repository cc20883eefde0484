from collections import Counter

from shoal.broadcast.mesh import Mesh, Neighbours, candidates

RING = [f"http://relay{number}" for number in range(5)]


def test_every_member_names_the_same_owner() -> None:
    for index in range(40):
        owners = set()
        for me in RING:
            mesh = Mesh(lambda me=me: me, lambda: RING, lambda url: True)  # type: ignore[misc]
            owners.add(mesh.owner(index) or me)
        assert len(owners) == 1


def test_shards_are_shared_evenly() -> None:
    counts = Counter(candidates(RING, index)[0] for index in range(100))
    assert set(counts.values()) == {20}


def test_shares_of_a_dead_member_are_spread_over_the_others() -> None:
    dead = RING[2]
    mesh = Mesh(lambda: RING[0], lambda: RING, lambda url: url != dead)
    shares = Counter(mesh.owner(index) or RING[0] for index in range(2, 2 + 5 * 40, 5))
    assert dead not in shares
    assert set(shares) == set(RING) - {dead}
    assert max(shares.values()) <= 11


def test_candidates_are_all_members_once() -> None:
    for index in range(60):
        assert sorted(candidates(RING, index)) == RING


def test_lonely_relay_owns_everything() -> None:
    mesh = Mesh(lambda: "http://me", list, lambda url: True)
    assert mesh.owner(3) is None
    assert mesh.peers() == []


def test_own_address_in_the_list_is_not_a_peer() -> None:
    mesh = Mesh(lambda: RING[0], lambda: [url + "/" for url in RING], lambda url: True)
    assert mesh.peers() == RING[1:]


def test_relay_below_the_origin_exchanges_with_those_that_do() -> None:
    neighbours = Neighbours(["http://origin/"])
    neighbours.update([("http://one/", True), ("http://leaf", False)], ["http://origin"])
    assert neighbours.exchanges
    assert neighbours.peers() == ["http://one"]


def test_relay_that_has_only_relays_above_it_takes_no_share() -> None:
    neighbours = Neighbours(["http://one"])
    neighbours.update([("http://one", True), ("http://two", True)], ["http://origin"])
    assert not neighbours.exchanges
    assert neighbours.peers() == []
    assert neighbours.spare_parents() == ["http://origin", "http://one", "http://two"]


def test_peers_that_were_named_need_no_coordinator() -> None:
    assert Neighbours(["http://origin"], ["http://friend/"]).peers() == ["http://friend"]
