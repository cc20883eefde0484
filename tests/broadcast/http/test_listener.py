import socket
from pathlib import Path

import pytest

from shoal.broadcast.http.limits import ServerLimits
from shoal.broadcast.http.listener import ServerThread
from shoal.broadcast.http.pool import HttpPool, Pace, check_url
from shoal.broadcast.http.server import DirectoryServer
from shoal.broadcast.store import ShardStore


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "shown"),
    [("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("2001:db8::7", "[2001:db8::7]")],
)
def test_an_address_is_shown_as_it_can_be_used(host: str, shown: str) -> None:
    server = ServerThread(lambda: pytest.fail("not started"), host, 7301, name="relay", limits=ServerLimits())
    assert server.url == f"http://{shown}:7301"
    assert check_url(server.url) == server.url


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_server_on_ipv6_is_reached_by_the_address_that_it_shows(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    digest = store.put("shards", b"a shard")
    server = ServerThread(DirectoryServer(store).application, "::1", 0, name="origin")
    server.start()
    pool = HttpPool()
    try:
        pace = Pace(pool.clock() + 10)
        assert pool.fetch(server.url, f"/shards/{digest}", max_bytes=100, pace=pace) == b"a shard"
    finally:
        pool.close()
        server.stop()
