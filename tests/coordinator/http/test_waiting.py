"""Through a real server: validators that wait for a file and leave, are many, or wait while the coordinator stops."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.coordinator.http.acceptor import BoundedServer
from shoal.coordinator.http.listener import server_config
from shoal.coordinator.server import bind
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.signing import RequestTarget, stamp_request
from support.ports import free_port, wait_for
from support.samples import keypair
from support.swarm import Swarm, registration, small_config

PATIENCE_S = 60.0
WAIT_S = 30.0
"""The longest wait that a claim may ask for."""
MANY = 100


@dataclass
class Waiting:
    swarm: Swarm
    port: int
    server: BoundedServer

    def client(self, name: str) -> CoordinatorClient:
        """All requests go to one server: results of the store belong to one event loop."""
        run, url = self.swarm.run.descriptor, f"http://127.0.0.1:{self.port}"
        return CoordinatorClient.for_run(run, keypair(name), url, clock=self.swarm.clock, deadline_s=PATIENCE_S)

    def worker(self) -> CoordinatorClient:
        """One that has registered, in a run that has published its first version."""
        digest = "0" * 64
        first = api.VersionBody(version=0, manifest_digest=digest, weights_digest=digest, bytes_total=1)
        self.client("trainer").publish(first)
        worker = self.client("ann")
        worker.register(registration("ann"))
        return worker

    def claim(self, request_id: str = "request-later") -> str:
        """The file that is there now."""
        claim = self.client("validator").claim(api.ClaimBody(request_id=request_id, wait_s=0)).claim
        assert claim is not None
        return claim.submission_id

    def start_claim(self, request_id: str) -> socket.socket:
        """A claim that was sent and is not answered."""
        body = json.dumps({"request_id": request_id, "wait_s": WAIT_S}).encode()
        run = self.swarm.run.descriptor
        target = RequestTarget(run.run_id, run.coordinator_key, "POST", "/v1/claims", "", digest_bytes(body))
        stamp = stamp_request(keypair("validator"), target, self.swarm.clock())
        fields = stamp.headers() | {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(f"POST /v1/claims HTTP/1.1\r\n{head}\r\n".encode() + body)
        return connection

    def until(self, waiting: int) -> None:
        """Returns when this many requests wait for a change."""
        self._until(lambda: self.swarm.app.service.changes.waiting == waiting)

    def until_connected(self, connections: int) -> None:
        self._until(lambda: len(self.swarm.app.service.connections) == connections)

    def _until(self, is_so: Callable[[], bool]) -> None:
        look = threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            if is_so():
                return
            look.wait(0.01)
        raise AssertionError("it never came to that")


def answer_of(connection: socket.socket) -> dict[str, object]:
    with connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200
        found: dict[str, object] = json.loads(answer.read())
        return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Waiting]:
    swarm, port = Swarm(tmp_path, small_config()), free_port()
    server = BoundedServer(server_config(swarm.app))
    thread = threading.Thread(target=server.run, args=([bind("127.0.0.1", port, "port")],))
    thread.start()
    wait_for("the coordinator", port)
    yield Waiting(swarm, port, server)
    swarm.app.service.stop_waiting()
    server.should_exit = True
    thread.join()
    swarm.store.close()


def test_a_validator_that_left_while_it_waited_takes_no_file(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    connected = len(swarm.app.service.connections)
    connection = served.start_claim("request-1")
    served.until(waiting=1)
    connection.close()
    served.until_connected(connected)
    _, submission_id = swarm.work(ann)
    assert served.claim() == submission_id


def test_of_many_claims_that_wait_one_gets_the_file_and_the_others_go_on_waiting(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    connections = [served.start_claim(f"request-{number:04}") for number in range(MANY)]
    served.until(waiting=MANY)
    _, submission_id = swarm.work(ann)
    served.until(waiting=MANY - 1)
    swarm.app.service.stop_waiting()
    claims = [answer_of(connection)["claim"] for connection in connections]
    given = [claim for claim in claims if isinstance(claim, dict)]
    assert [claim["submission_id"] for claim in given] == [submission_id]


def test_claims_that_wait_are_answered_when_the_coordinator_stops(served: Waiting) -> None:
    connections = [served.start_claim(f"request-{number:04}") for number in range(3)]
    served.until(waiting=3)
    served.swarm.app.service.stop_waiting()
    assert [answer_of(connection)["claim"] for connection in connections] == [None] * 3


def test_a_file_that_comes_at_the_moment_of_the_claim_is_never_missed(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    leases = [swarm.lease(ann) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for lease in leases:
            claimed = pool.submit(answer_of, served.start_claim(f"request-{lease.lease_id}"))
            submitted = pool.submit(ann.submit, lease.lease_id, f"rollouts of {lease.lease_id}".encode())
            claim = claimed.result(PATIENCE_S)["claim"]
            assert isinstance(claim, dict)
            assert claim["submission_id"] == submitted.result(PATIENCE_S).submission_id


def test_a_repeated_claim_gets_the_file_that_was_given_to_a_lost_connection(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    connection = served.start_claim("request-1")
    served.until(waiting=1)
    _, submission_id = swarm.work(ann)
    served.until(waiting=0)
    with contextlib.closing(connection):
        assert served.claim("request-1") == submission_id
