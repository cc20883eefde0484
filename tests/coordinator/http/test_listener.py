"""Through a real server: connections that are silent, slow, endless or too many, and a key that works in between."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.coordinator.http import auth, listener, service
from shoal.coordinator.http.acceptor import BoundedServer
from shoal.coordinator.http.listener import HEAD_BYTES, HEAD_FIELDS, server_config
from shoal.coordinator.server import bind
from shoal.files import digest_bytes
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.signing import RequestStamp, RequestTarget, check_stamp, stamp_request
from support.ports import free_port, wait_for
from support.samples import keypair
from support.swarm import HEARTBEAT, Swarm, registration, running, small_config

NEVER_S = 3600.0
PATIENCE_S = 60.0


@dataclass
class Served:
    swarm: Swarm
    port: int

    def connect(self, address: str = "127.0.0.2") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S, source_address=(address, 0))

    def worker(self, name: str) -> CoordinatorClient:
        run = self.swarm.run.descriptor
        return CoordinatorClient.for_run(
            run, keypair(name), f"http://127.0.0.1:{self.port}", clock=self.swarm.clock, deadline_s=PATIENCE_S
        )

    def proven(self, name: str) -> CoordinatorClient:
        """A key with accepted work."""
        worker = self.worker(name)
        worker.register(registration(name))
        self.swarm.run.presence.proven.add(keypair(name).public)
        return worker


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(service, "CONNECTIONS_PER_ADDRESS", 4)
    monkeypatch.setattr(service, "CONNECTIONS", 12)
    swarm, port = Swarm(tmp_path, small_config(coordinator={"trusted_proxies": []})), free_port()
    server = BoundedServer(server_config(swarm.app))
    thread = threading.Thread(target=server.run, args=([bind("127.0.0.1", port, "port")],))
    thread.start()
    wait_for("the coordinator", port)
    yield Served(swarm, port)
    server.should_exit = True
    thread.join()
    swarm.store.close()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str]]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET /v1/status HTTP/1.1\r\nhost: x\r\n", b"\r\n", b"POST /v1/workers HTTP/1.1\r\nx-shoal-key: "],
    ids=["silence", "half a head", "an empty line", "half a field"],
)
def test_a_connection_whose_head_does_not_come_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.05)
    with served.connect() as slow:
        slow.sendall(beginning)
        assert is_closed(slow)


@pytest.mark.parametrize(
    "after",
    [b"\r\n", b"GET /v1/status HTTP/1.1\r\nhost:", b"x"],
    ids=["an empty line", "half a head", "a body that nobody reads"],
)
def test_a_connection_that_once_asked_has_the_same_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch, after: bytes
) -> None:
    with served.connect() as slow:
        length = b"content-length: 1000000\r\n" if after == b"x" else b""
        slow.sendall(b"GET /v1/relays HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n")
        assert answer_of(slow)[0] == 200
        monkeypatch.setattr(listener, "HEAD_S", 0.05)
        slow.sendall(after)
        assert is_closed(slow)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx: " + b"y" * HEAD_BYTES,
        b"GET /" + b"y" * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (HEAD_FIELDS + 2),
        b"POST /v1/workers HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/workers HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
        b"PUT /v1/submissions/x HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n-1\r\n",
        b"POST /v1/workers HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/workers HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"\x16\x03\x01 this is no HTTP\r\n\r\n",
    ],
    ids=["field", "path", "fields", "chunks", "two lengths", "gzip", "negative", "lengths", "tls"],
)
def test_a_head_that_is_endless_or_hides_the_length_of_its_body_is_refused_at_once(served: Served, head: bytes) -> None:
    with served.connect() as hostile:
        hostile.sendall(head)
        status, body = answer_of(hostile)
        assert status in (400, 411, 431)
        assert set(body) == {"code", "message", "hint"}
        assert is_closed(hostile)


def test_an_address_holds_only_so_many_connections_and_others_are_not_touched(served: Served) -> None:
    with served.connect("127.0.0.3") as other:
        silent = [served.connect() for _ in range(9)]
        assert [is_closed(one) for one in silent[:5]] == [True] * 5
        for one in (silent[-1], other):
            one.sendall(b"GET /v1/relays HTTP/1.1\r\nhost: x\r\n\r\n")
            assert answer_of(one)[0] == 200
        for one in silent:
            one.close()


def test_strangers_from_many_addresses_do_not_fill_the_server(served: Served) -> None:
    ann = served.proven("ann")
    ann.heartbeat(HEARTBEAT)
    strangers = [served.connect(f"127.0.1.{number}") for number in range(1, 40)]
    ann.heartbeat(HEARTBEAT)
    assert len(served.swarm.app.service.connections) <= 12
    assert sum(map(is_closed, strangers[:20])) == 20
    for one in strangers:
        one.close()


def send_for_ever(connection: socket.socket) -> None:
    while connection.send(b"GET /docs HTTP/1.1\r\nhost: x\r\n\r\n"):
        pass


def test_a_peer_that_takes_nothing_of_its_answers_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "STALLED_S", 0.05)
    with served.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /docs HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
        with pytest.raises(ConnectionError):
            send_for_ever(deaf)


def test_hostile_neighbours_do_not_use_up_what_a_key_with_accepted_work_may_ask(tmp_path: Path) -> None:
    with running(tmp_path, small_config(coordinator={"requests_per_s_address": 2})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        while swarm.http.get("/v1/relays").status_code == 200:
            pass
        assert swarm.http.get("/v1/nothing").status_code == 429
        forged = {"x-shoal-key": keypair("ann").public}
        assert swarm.http.post("/v1/heartbeat", headers=forged).status_code == 401
        assert swarm.http.get("/v1/relays", headers=forged).status_code == 429
        assert ann.heartbeat(HEARTBEAT).worker.submissions_accepted == 1


def test_an_address_that_names_anothers_key_falsely_is_soon_not_even_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys with accepted work are public and were excepted from the limits of any address that named them."""
    with running(tmp_path, small_config(coordinator={"requests_per_s_address": 2})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        checked: list[str] = []

        def check(stamp: RequestStamp, target: RequestTarget) -> None:
            checked.append(stamp.key)
            check_stamp(stamp, target)

        monkeypatch.setattr(auth, "check_stamp", check)
        target = RequestTarget("run-1", "another server", "POST", "/v1/heartbeat", "", digest_bytes(b""))
        forged = stamp_request(keypair("ann"), target, swarm.clock()).headers()
        answers = [swarm.http.post("/v1/heartbeat", headers=forged).status_code for _ in range(50)]
        assert answers[0] == 401
        assert answers[-1] == 429
        assert len(checked) == answers.count(401) < 20
        swarm.http._transport.client = ("192.0.2.7", 1)  # type: ignore[attr-defined]
        assert ann.heartbeat(HEARTBEAT).worker.submissions_accepted == 1, "her own address is not touched"
        swarm.http._transport.client = ("testclient", 1)  # type: ignore[attr-defined]
        swarm.clock.advance(5.0)
        assert ann.heartbeat(HEARTBEAT).worker.submissions_accepted == 1


def test_requests_under_way_are_counted_per_forwarded_address(tmp_path: Path) -> None:
    config = small_config(coordinator={"trusted_proxies": ["10.0.0.0/8"]})
    with running(tmp_path, config) as swarm:
        places = swarm.app.service.under_way
        while places.enter("203.0.113.9"):
            pass
        for peer, forwarded, expected in (
            ("10.0.0.1", "203.0.113.9", 429),
            ("10.0.0.1", "203.0.113.10", 200),
            ("10.0.0.1", "203.0.113.9, 203.0.113.10", 200),
            ("192.0.2.1", "203.0.113.9", 200),
        ):
            swarm.http._transport.client = (peer, 1)  # type: ignore[attr-defined]
            answer = swarm.http.get("/v1/relays", headers={"x-forwarded-for": forwarded})
            assert answer.status_code == expected, (peer, forwarded)
