import json
import socket
from collections.abc import Callable

import httpx
import pytest

from shoal.errors import ConfigError, IntegrityError, RefusedError, UnavailableError
from shoal.files import digest_bytes
from shoal.identity import verify_signature
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER, CoordinatorClient, fetch_descriptor
from shoal.protocol.signing import (
    BODY_HEADER,
    TIME_HEADER,
    RequestStamp,
    RequestTarget,
    check_stamp,
    submission_message,
)
from support.samples import descriptor, keypair

WORKER = keypair("worker")
HEARTBEAT = api.HeartbeatBody(activity="testing")
REGISTER = api.RegisterBody(name="w", numerics_class="c", tokens_per_s=1)
VIEW = {"key": WORKER.public, "name": "w", "state": "probation"}
Handler = Callable[[httpx.Request], httpx.Response]


class Server:
    """Answers from a script, one entry per request; the last one is repeated."""

    def __init__(self, *script: Handler) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return answer(request)


class Time:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def answer(status: int, body: object, **headers: str) -> Handler:
    return lambda request: httpx.Response(status, json=body, headers=headers)


def refusal(status: int, code: str, **headers: str) -> Handler:
    return answer(status, {"code": code, "message": f"It was {code}.", "hint": "Do this."}, **headers)


def lost(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def connect(server: Server, time: Time | None = None, deadline_s: float = 30.0) -> CoordinatorClient:
    time = time or Time()
    return CoordinatorClient.for_run(
        descriptor(),
        WORKER,
        http=httpx.Client(transport=httpx.MockTransport(server)),
        deadline_s=deadline_s,
        clock=time,
        monotonic=time,
        sleep=time.sleep,
    )


def check_signed(request: httpx.Request, body: bytes) -> RequestStamp:
    stamp = RequestStamp.from_headers(request.headers)
    run = descriptor()
    target = RequestTarget(
        run.run_id,
        run.coordinator_key,
        request.method,
        request.url.path,
        request.url.query.decode(),
        digest_bytes(body),
    )
    check_stamp(stamp, target)
    return stamp


def test_requests_are_signed_over_what_is_sent() -> None:
    server = Server(answer(200, VIEW))
    assert connect(server).register(REGISTER).state == "probation"
    request = server.requests[0]
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.content) == REGISTER.model_dump()
    check_signed(request, request.content)


def test_the_query_is_signed_too() -> None:
    server = Server(answer(200, {"waiting_for": "groups"}))
    connect(server).batch(7, wait_s=1.5)
    assert server.requests[0].url.query == b"wait_s=1.5&epoch=0"
    check_signed(server.requests[0], b"")


def test_an_upload_names_its_digest_and_carries_evidence() -> None:
    server = Server(answer(200, {"submission_id": "s", "state": "pending"}))
    connect(server).submit("lease-1", b"parquet")
    headers, digest = server.requests[0].headers, digest_bytes(b"parquet")
    assert headers[BODY_HEADER] == digest
    evidence = submission_message("run-1", "lease-1", digest)
    verify_signature(WORKER.public, evidence, headers[SUBMISSION_SIGNATURE_HEADER])
    check_signed(server.requests[0], b"parquet")


def test_a_lost_answer_is_asked_for_again_with_a_new_nonce() -> None:
    server = Server(lost, answer(502, "bad gateway"), answer(200, VIEW))
    connect(server).register(REGISTER)
    nonces = {RequestStamp.from_headers(request.headers).nonce for request in server.requests}
    assert len(nonces) == len(server.requests) == 3


def test_when_the_deadline_passes_the_error_names_whom_and_how_long() -> None:
    time = Time()
    with pytest.raises(
        UnavailableError, match=r"coordinator at http://coordinator .* 30 s .*connection refused"
    ) as error:
        connect(Server(lost), time).heartbeat(HEARTBEAT)
    assert "started again" in error.value.hint
    assert time.now <= 1_030
    assert max(time.naps) <= 3.0


def test_no_single_request_may_outlast_the_deadline() -> None:
    server = Server(answer(200, VIEW))
    connect(server, deadline_s=2.0).register(REGISTER)
    assert max(server.requests[0].extensions["timeout"].values()) <= 2.0


def test_a_refusal_keeps_code_message_hint_and_status() -> None:
    with pytest.raises(RefusedError) as caught:
        connect(Server(refusal(403, "banned"))).heartbeat(HEARTBEAT)
    error = caught.value
    assert (error.code, error.message, error.hint, error.status) == ("banned", "It was banned.", "Do this.", 403)


def test_a_full_disk_is_waited_for_and_then_named() -> None:
    with pytest.raises(UnavailableError, match="503: It was storage"):
        connect(Server(refusal(503, "storage"))).submit("lease", b"x")


def test_a_request_that_the_network_doubled_is_signed_again() -> None:
    server = Server(refusal(409, "replay"), answer(200, VIEW))
    assert connect(server).register(REGISTER).state == "probation"


def test_a_wrong_local_clock_is_cured_by_the_servers() -> None:
    time = Time()
    server = Server(refusal(401, "clock", **{TIME_HEADER: "9000.000"}), answer(200, VIEW))
    client = connect(server, time)
    client.register(REGISTER)
    assert float(RequestStamp.from_headers(server.requests[1].headers).time) == pytest.approx(9_000, abs=1)
    assert client.server_time() == pytest.approx(9_000, abs=1)


@pytest.mark.parametrize("text", ["", "soon", "nan"])
def test_an_answer_without_a_usable_time_leaves_the_clock_alone(text: str) -> None:
    client = connect(Server(answer(200, VIEW, **{TIME_HEADER: text})))
    client.register(REGISTER)
    assert client.server_time() == 1_000.0


@pytest.mark.parametrize("response", [answer(200, ["not", "a", "view"]), lambda _: httpx.Response(200, text="<html>")])
def test_an_answer_of_another_shape_is_not_believed(response: Handler) -> None:
    with pytest.raises(IntegrityError, match="not a WorkerView"):
        connect(Server(response)).register(REGISTER)


def test_a_refusal_of_some_other_server_is_reported_as_such() -> None:
    with pytest.raises(RefusedError, match="answered 404") as caught:
        connect(Server(lambda _: httpx.Response(404, text="<html>nothing here"))).register(REGISTER)
    assert (caught.value.code, caught.value.status) == ("http", 404)


def test_stored_bytes_are_hashed_again() -> None:
    client = connect(Server(lambda _: httpx.Response(200, content=b"other bytes")))
    assert client.submission_file("s", digest_bytes(b"other bytes")) == b"other bytes"
    with pytest.raises(IntegrityError, match="submission s"):
        client.submission_file("s", digest_bytes(b"signed bytes"))


def test_the_descriptor_is_fetched_unsigned_and_checked() -> None:
    sealed = descriptor().seal(keypair("run")).to_bytes()
    server = Server(lambda _: httpx.Response(200, content=sealed))
    http = httpx.Client(transport=httpx.MockTransport(server))
    data, opened = fetch_descriptor("http://anywhere/", keypair("run").public, http=http)
    assert (data, opened) == (sealed, descriptor())
    assert str(server.requests[0].url) == "http://anywhere/v1/descriptor"
    assert "x-shoal-key" not in server.requests[0].headers
    assert not http.is_closed


def test_closing_leaves_a_borrowed_transport_open() -> None:
    http = httpx.Client(transport=httpx.MockTransport(Server(answer(200, VIEW))))
    with CoordinatorClient("http://c", WORKER, http=http):
        pass
    assert not http.is_closed


def test_a_call_may_have_a_deadline_of_its_own() -> None:
    time = Time()
    with pytest.raises(UnavailableError, match="did not answer for 7 s"):
        connect(Server(lost), time, deadline_s=3600.0).submit("lease", b"x", deadline_s=7.0)
    assert time.now <= 1_007


def unresolved(code: int) -> Handler:
    def answer(request: httpx.Request) -> httpx.Response:
        try:
            raise socket.gaierror(code, "resolver says no")
        except socket.gaierror as error:
            raise httpx.ConnectError(str(error), request=request) from error

    return answer


def test_an_unknown_host_is_refused_at_once() -> None:
    time = Time()
    with pytest.raises(ConfigError, match=r"There is no host coordinator\."):
        connect(Server(unresolved(socket.EAI_NONAME)), time, deadline_s=3600.0).register(REGISTER)
    assert time.naps == []


def test_a_host_that_was_known_or_cannot_be_looked_up_right_now_is_waited_for() -> None:
    offline = Server(unresolved(socket.EAI_AGAIN), answer(200, VIEW))
    assert connect(offline).register(REGISTER).state == "probation"
    lookup_fails_later = Server(answer(200, VIEW), unresolved(socket.EAI_NONAME), answer(200, VIEW))
    client = connect(lookup_fails_later)
    client.register(REGISTER)
    assert client.register(REGISTER).state == "probation"
