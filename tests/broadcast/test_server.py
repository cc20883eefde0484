import http.client
import json
from urllib.parse import urlsplit

import pytest

from shoal.broadcast import Origin, OriginServer, ServerLimits

from .test_client import publish


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
    server = OriginServer(origin.root, "127.0.0.1", 0, limits=ServerLimits(requests_per_client=0))
    server.start()
    try:
        status, body, _ = get(server.url, "/head.json")
        assert (status, json.loads(body)["code"]) == (429, "too_many_requests")
    finally:
        server.stop()
