"""Who is closed when too many are open. Connections are plain names here: the rule knows no sockets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net import Connections, UnderWay


def test_an_address_with_too_many_closes_its_own_longest_idle_one() -> None:
    open_ones = Connections[str](per_address=2, total=100)
    assert [open_ones.enter(f"eve-{number}", "eve") for number in range(2)] == [None, None]
    assert open_ones.enter("ann-0", "ann") is None
    open_ones.touch("eve-0")
    assert open_ones.enter("eve-2", "eve") == "eve-1"
    assert open_ones.enter("eve-3", "eve") == "eve-0"
    assert len(open_ones) == 3


def test_a_full_server_closes_a_connection_of_the_address_that_holds_most() -> None:
    open_ones = Connections[str](per_address=50, total=10)
    for number in range(9):
        assert open_ones.enter(f"eve-{number}", "eve") is None
    assert open_ones.enter("ann-0", "ann") is None
    assert open_ones.enter("ann-1", "ann") == "eve-0"
    assert open_ones.enter("bob-0", "bob") == "eve-1"
    assert len(open_ones) == 10


def test_a_flood_of_strangers_closes_no_connection_of_a_key_with_accepted_work() -> None:
    open_ones = Connections[str](per_address=4, total=8, per_key=2)
    open_ones.enter("ann", "nat")
    assert open_ones.vouch("ann", "key-ann") is None
    for number in range(1000):
        assert open_ones.enter(f"neighbour-{number}", "nat") != "ann"
        assert open_ones.enter(f"other-{number}", f"address-{number}") != "ann"
    assert len(open_ones) == 8


def test_such_a_key_gets_in_behind_an_address_that_strangers_have_filled() -> None:
    open_ones = Connections[str](per_address=4, total=100, per_key=2)
    for number in range(10):
        open_ones.enter(f"neighbour-{number}", "nat")
    assert open_ones.enter("ann", "nat") == "neighbour-6"
    open_ones.vouch("ann", "key-ann")
    for number in range(10, 20):
        assert open_ones.enter(f"neighbour-{number}", "nat") != "ann"


def test_a_key_holds_a_few_connections_and_no_more() -> None:
    open_ones = Connections[str](per_address=10, total=100, per_key=2)
    closed = []
    for number in range(4):
        open_ones.enter(f"ann-{number}", "ann")
        closed.append(open_ones.vouch(f"ann-{number}", "key-ann"))
    assert closed == [None, None, "ann-0", "ann-1"]
    assert open_ones.vouch("ann-3", "key-ann") is None  # said again with every request


def test_the_connections_of_a_proxy_count_only_in_all() -> None:
    open_ones = Connections[str](per_address=1, total=5)
    assert [open_ones.enter(f"proxy-{number}", None) for number in range(4)] == [None] * 4
    assert open_ones.vouch("proxy-0", "key-ann") is None
    assert open_ones.enter("eve", "eve") is None
    assert open_ones.enter("proxy-4", None) == "eve"
    assert open_ones.enter("proxy-5", None) == "proxy-5"  # all are a proxy's: the newcomer waits
    assert open_ones.enter("bob", "bob") == "bob"
    assert len(open_ones) == 5


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("evtl"), st.integers(0, 12), st.integers(0, 3)), max_size=80))
def test_the_bounds_hold_whatever_happens(events: list[tuple[str, int, int]]) -> None:
    open_ones = Connections[int](per_address=3, total=6, per_key=2)
    living: dict[int, int] = {}
    for what, connection, who in events:
        closed = None
        if what == "e" and connection not in living:
            living[connection] = who
            closed = open_ones.enter(connection, f"address-{who}")
        elif what == "v":
            closed = open_ones.vouch(connection, f"key-{who}")
        elif what == "t":
            open_ones.touch(connection)
        elif what == "l":
            open_ones.leave(connection)
            living.pop(connection, None)
        if closed is not None:
            del living[closed]
        assert len(open_ones) == len(living) <= 6


def test_requests_under_way_are_limited_per_address_and_in_all() -> None:
    places = UnderWay(per_address=2, total=3)
    assert places.enter("a")
    assert places.enter("a")
    assert not places.enter("a")
    assert places.enter("b")
    assert not places.enter("c")
    places.leave("a")
    assert places.enter("c")
    assert all(UnderWay(None).enter("a") for _ in range(1000))
