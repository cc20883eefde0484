"""Through a real server: validators that wait for a file, workers that wait for a step; some leave, some are many."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import pytest

from shoal.coordinator.http.acceptor import BoundedServer
from shoal.coordinator.http.handlers.workers import LEASES_HELD
from shoal.coordinator.http.listener import server_config
from shoal.coordinator.server import bind
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.client import ClientOptions, CoordinatorClient
from shoal.protocol.signing import RequestTarget, stamp_request
from support.ports import free_port, wait_for
from support.samples import keypair
from support.swarm import Swarm, small_config

PATIENCE_S = 60.0
WAIT_S = 30.0
"""The longest wait that a claim may ask for."""
LEASE_WAIT_S = 5.0
"""The same for a request for work."""
MANY = 100


class ServedSwarm(Swarm):
    """All requests go to one server: results of the store belong to one event loop."""

    port = 0

    def client(self, name: str, **options: Unpack[ClientOptions]) -> CoordinatorClient:
        run, url = self.run.descriptor, f"http://127.0.0.1:{self.port}"
        return CoordinatorClient.for_run(run, keypair(name), url, clock=self.clock, deadline_s=PATIENCE_S)


@dataclass
class Waiting:
    swarm: ServedSwarm
    port: int
    server: BoundedServer

    def worker(self) -> CoordinatorClient:
        """One that has registered, in a run that has published its first version."""
        self.swarm.publish(0)
        (worker,) = self.swarm.join("ann")
        return worker

    def claim(self, request_id: str = "request-later") -> str:
        """The file that is there now."""
        claim = self.swarm.client("validator").claim(api.ClaimBody(request_id=request_id, wait_s=0)).claim
        assert claim is not None
        return claim.submission_id

    def start_claim(self, request_id: str) -> socket.socket:
        """A claim that was sent and is not answered."""
        return self._start("validator", "/v1/claims", {"request_id": request_id, "wait_s": WAIT_S})

    def start_lease(self, request_id: str, name: str = "ann") -> socket.socket:
        """A request for work that was sent and is not answered."""
        return self._start(name, "/v1/leases", {"request_id": request_id, "held_versions": [0], "wait_s": LEASE_WAIT_S})

    def _start(self, name: str, path: str, asked: dict[str, object]) -> socket.socket:
        body, run = json.dumps(asked).encode(), self.swarm.run.descriptor
        target = RequestTarget(run.run_id, run.coordinator_key, "POST", path, "", digest_bytes(body))
        stamp = stamp_request(keypair(name), target, self.swarm.clock())
        fields = stamp.headers() | {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return connection

    def until(self, waiting: int) -> None:
        """Returns when this many requests wait for a change."""
        self._until(lambda: self.swarm.app.service.changes.waiting == waiting)

    def until_held(self, requests: int) -> None:
        """Returns when this many requests for work wait for the next step."""
        self._until(lambda: self.swarm.app.service.leases_held == requests)

    def until_closed(self, peer: tuple[str, int]) -> None:
        """Returns when the server has noticed that the connection from there was closed."""
        self._until(
            lambda: all(getattr(one, "client", None) != peer for one in list(self.server.server_state.connections))
        )

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
    swarm, port = ServedSwarm(tmp_path, small_config()), free_port()
    swarm.port = port
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
    connection = served.start_claim("request-1")
    peer = connection.getsockname()
    served.until(waiting=1)
    connection.close()
    served.until_closed(peer)
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


def fill_step(swarm: Swarm, worker: CoordinatorClient) -> list[api.Lease]:
    """Leases until there is no more work."""
    leases = []
    while (lease := swarm.ask(worker, 0).lease) is not None:
        leases.append(lease)
    return leases


def deliver(swarm: Swarm, worker: CoordinatorClient, leases: Sequence[api.Lease]) -> None:
    """Every slot is accepted; the groups of the first are useful and form the batch."""
    for lease in leases:
        worker.submit(lease.lease_id, f"rollouts of {lease.lease_id}".encode())
    for number, _ in enumerate(leases):
        swarm.accept(useful=0 if number else 2)


def fill_both_steps(served: Waiting) -> list[api.Lease]:
    """Two keys take all that this step and the next one need for now; returns the leases of this step."""
    swarm, ann = served.swarm, served.worker()
    bob, _ = swarm.join("bob", "cho")
    leases = [*fill_step(swarm, ann), *fill_step(swarm, bob)]
    assert [(lease.step, lease.slot) for lease in leases] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    return leases[:3]


def test_a_worker_that_waits_gets_work_as_soon_as_the_next_step_begins(served: Waiting) -> None:
    swarm, leases = served.swarm, fill_both_steps(served)
    connection = served.start_lease("request-1", "cho")
    served.until_held(1)
    deliver(swarm, swarm.client("ann"), leases[:2])
    lease = answer_of(connection)["lease"]
    assert isinstance(lease, dict)
    assert (lease["step"], lease["slot"]) == (1, 1)
    assert swarm.app.service.leases_held == 0


def test_a_worker_that_waits_gets_work_as_soon_as_the_step_needs_more(served: Waiting) -> None:
    """Groups that carry no training signal were counted on."""
    swarm, leases = served.swarm, fill_both_steps(served)
    connection = served.start_lease("request-1", "cho")
    served.until_held(1)
    swarm.client("ann").submit(leases[0].lease_id, b"all answers are right")
    swarm.accept(useful=0)
    lease = answer_of(connection)["lease"]
    assert isinstance(lease, dict)
    assert (lease["step"], lease["slot"]) == (0, 3)


def test_a_worker_that_holds_all_leases_it_may_gets_another_as_soon_as_it_has_delivered(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    leases = fill_step(swarm, ann)
    connection = served.start_lease("request-1")
    served.until_held(1)
    ann.submit(leases[0].lease_id, b"one of two")
    lease = answer_of(connection)["lease"]
    assert isinstance(lease, dict)
    assert (lease["step"], lease["slot"]) == (0, 2)
    assert swarm.app.service.leases_held == 0


def test_what_others_deliver_wakes_nobody_who_has_no_work_from_it(served: Waiting) -> None:
    swarm, leases = served.swarm, fill_both_steps(served)
    connection = served.start_lease("request-1", "cho")
    served.until_held(1)
    swarm.client("ann").submit(leases[0].lease_id, b"not verified yet")
    served.until(waiting=1)
    swarm.app.service.stop_waiting()
    answer = answer_of(connection)
    assert (answer["lease"], answer["reason"]) == (None, "no_work")


def test_a_request_that_waited_and_is_repeated_gets_the_same_lease(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    leases = fill_step(swarm, ann)
    connection = served.start_lease("request-1")
    served.until_held(1)
    deliver(swarm, ann, leases)
    lease = answer_of(connection)["lease"]
    assert isinstance(lease, dict)
    again = swarm.ask(ann, 0, request_id="request-1").lease
    assert again is not None
    assert again.lease_id == lease["lease_id"]


def test_a_worker_that_left_while_it_waited_takes_no_slot(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    leases = fill_step(swarm, ann)
    connection = served.start_lease("request-1")
    peer = connection.getsockname()
    served.until_held(1)
    connection.close()
    served.until_closed(peer)
    served.until_held(0)
    deliver(swarm, ann, leases)
    lease = swarm.ask(ann, 0).lease
    assert lease is not None
    assert (lease.step, lease.slot) == (1, 0)


def test_a_new_version_ends_the_wait_without_work(served: Waiting) -> None:
    """The worker fetches it first."""
    swarm, ann = served.swarm, served.worker()
    for _ in range(2):
        deliver(swarm, ann, fill_step(swarm, ann))
    connection = served.start_lease("request-1")
    served.until_held(1)
    swarm.publish(1)
    answer = answer_of(connection)
    assert (answer["lease"], answer["reason"]) == (None, "waiting_for_trainer")


def test_only_a_few_requests_for_work_wait_and_the_others_are_answered_at_once(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    for worker in (ann, *swarm.join("bob")):
        fill_step(swarm, worker)
    names = ["ann", "bob"] * (LEASES_HELD // 2)
    held = [served.start_lease(f"request-{number:04}", name) for number, name in enumerate(names)]
    served.until_held(LEASES_HELD)
    beyond = answer_of(served.start_lease("request-beyond"))
    assert (beyond["lease"], beyond["reason"]) == (None, "no_work")
    swarm.app.service.stop_waiting()
    assert [answer_of(connection)["lease"] for connection in held] == [None] * LEASES_HELD
    assert swarm.app.service.leases_held == 0


def test_a_key_that_was_banned_while_it_waited_gets_nothing(served: Waiting) -> None:
    swarm, ann = served.swarm, served.worker()
    (bob,) = swarm.join("bob")
    leases = [*fill_step(swarm, bob), *fill_step(swarm, ann)]
    connection = served.start_lease("request-1")
    served.until_held(1)
    swarm.client("run").ban(api.BanBody(worker=keypair("ann").public, reason="copied answers"))
    deliver(swarm, bob, leases[:2])
    with connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        refusal = json.loads(answer.read())
    assert (answer.status, refusal["code"]) == (403, "banned")
    assert swarm.app.service.leases_held == 0
