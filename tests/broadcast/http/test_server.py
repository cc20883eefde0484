import http.client
import json
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from broadcast.test_client import publish
from shoal.broadcast import Origin, OriginServer, ServerLimits


def get(url: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body, dict(response.getheaders())


def a_shard(origin: Origin) -> tuple[str, bytes]:
    publish(origin)
    digest = sorted(origin.store.held("shards"))[0]
    return digest, origin.store.read("shards", digest)


def test_shards_are_immutable_files(origin: Origin, origin_server: OriginServer) -> None:
    digest, data = a_shard(origin)
    status, body, headers = get(origin_server.url, f"/shards/{digest}")
    assert (status, body) == (200, data)
    assert "immutable" in headers["Cache-Control"]


def test_ranges_are_served(origin: Origin, origin_server: OriginServer) -> None:
    digest, data = a_shard(origin)
    status, body, _ = get(origin_server.url, f"/shards/{digest}", Range="bytes=10-19")
    assert (status, body) == (206, data[10:20])


@pytest.mark.parametrize(
    "path", ["/shards/nope", "/shards/" + "a" * 64, "/shards/..%2f..%2fhead.json", "/manifests/" + "b" * 64]
)
def test_unknown_files_are_refused_with_a_code(origin_server: OriginServer, path: str) -> None:
    status, body, _ = get(origin_server.url, path)
    assert status == 404
    assert {"code", "message", "hint"} == set(json.loads(body))


def test_private_files_are_not_served(origin: Origin, origin_server: OriginServer) -> None:
    (origin.root / "secret").write_text("x")
    assert get(origin_server.url, "/secret")[0] == 404


def test_head_that_does_not_exist_yet_is_named(origin_server: OriginServer) -> None:
    status, body, _ = get(origin_server.url, "/head.json")
    assert status == 503
    assert json.loads(body)["code"] == "no_head"


@pytest.mark.parametrize(
    "query", ["?newer_than=nan&wait_s=nan", "?newer_than=x", "?wait_s=-1", "?newer_than=-5&wait_s=inf"]
)
def test_odd_queries_are_answered_at_once(origin: Origin, origin_server: OriginServer, query: str) -> None:
    publish(origin)
    assert get(origin_server.url, "/head.json" + query)[0] == 200


def test_too_many_requests_at_once_are_refused(origin: Origin) -> None:
    publish(origin)
    server = OriginServer(origin.store, "127.0.0.1", 0, limits=ServerLimits(requests_per_client=0))
    server.start()
    try:
        status, body, _ = get(server.url, "/head.json")
        assert (status, json.loads(body)["code"]) == (429, "too_many_requests")
    finally:
        server.stop()


def test_one_connection_serves_many_requests(origin: Origin, origin_server: OriginServer) -> None:
    digest, data = a_shard(origin)
    connection = http.client.HTTPConnection("127.0.0.1", origin_server.port, timeout=10)
    for _ in range(3):
        connection.request("GET", f"/shards/{digest}")
        assert connection.getresponse().read() == data
    connection.close()


def test_range_beyond_the_end_is_refused(origin: Origin, origin_server: OriginServer) -> None:
    digest, data = a_shard(origin)
    status, body, headers = get(origin_server.url, f"/shards/{digest}", Range=f"bytes={len(data)}-")
    assert (status, body) == (416, b"")
    assert headers["Content-Range"] == f"bytes */{len(data)}"


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def limited(origin: Origin) -> Iterator[Callable[[ServerLimits], OriginServer]]:
    servers: list[OriginServer] = []

    def make(limits: ServerLimits) -> OriginServer:
        server = OriginServer(origin.store, "127.0.0.1", 0, limits=limits)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


def connect(server: OriginServer, address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=(address, 0))


def test_a_newcomer_takes_the_place_of_the_longest_idle_connection_of_its_address(
    origin: Origin, limited: Callable[[ServerLimits], OriginServer]
) -> None:
    publish(origin)
    server = limited(ServerLimits(connections_per_client=2))
    with connect(server, "127.0.0.3") as other:
        silent = [connect(server, "127.0.0.2") for _ in range(9)]
        assert [is_closed(one) for one in silent[:7]] == [True] * 7
        for one in (silent[-1], other):
            one.sendall(b"GET /head.json HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 200"
        for one in silent:
            one.close()


def test_strangers_from_many_addresses_do_not_keep_a_newcomer_out(
    origin: Origin, limited: Callable[[ServerLimits], OriginServer]
) -> None:
    publish(origin)
    server = limited(ServerLimits(connections_total=5))
    strangers = [connect(server, f"127.0.1.{number}") for number in range(1, 20)]
    with connect(server, "127.0.0.2") as late:
        late.sendall(b"GET /head.json HTTP/1.1\r\nHost: x\r\n\r\n")
        assert late.recv(12) == b"HTTP/1.1 200"
    for one in strangers:
        one.close()


@pytest.mark.parametrize(
    "slow",
    [b"GET /head.json HTTP/1.1\r\nhost:", b"\r\n", b"GET /head.json HTTP/1.1\r\ncontent-length: 9\r\n"],
)
def test_half_a_head_has_the_deadline_of_a_silent_connection(
    limited: Callable[[ServerLimits], OriginServer], slow: bytes
) -> None:
    server = limited(ServerLimits(first_request_within_s=0.05))
    with connect(server, "127.0.0.2") as connection:
        connection.sendall(slow)
        assert is_closed(connection)


def test_silent_connection_is_closed(limited: Callable[[ServerLimits], OriginServer]) -> None:
    server = limited(ServerLimits(first_request_within_s=0.05))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
        assert is_closed(silent)


def test_limited_bytes_still_arrive_whole(origin: Origin, limited: Callable[[ServerLimits], OriginServer]) -> None:
    digest, data = a_shard(origin)
    server = limited(ServerLimits(bytes_s_per_client=1e6, bytes_s_total=1e6))
    assert get(server.url, f"/shards/{digest}")[1] == data
