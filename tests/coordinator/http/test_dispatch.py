"""The table of routes is the whole API: who is admitted, what is read before that, and what is never parsed."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive

from shoal.coordinator.http.auth import Signed
from shoal.coordinator.http.body import BodyLimit
from shoal.coordinator.http.dispatch import Dispatcher, RouteFinder
from shoal.coordinator.http.handlers import workers as worker_handlers
from shoal.coordinator.http.route import AnyRoute, Json
from shoal.coordinator.http.table import ROUTES
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER
from shoal.protocol.signing import RequestTarget, stamp_request, submission_message
from support.samples import keypair
from support.swarm import Swarm, registration

HEARTBEAT = next(route for route in ROUTES if route.path == "/v1/heartbeat")
SIGNED_ROUTES = [route for route in ROUTES if route.access.is_signed]


def name_of(route: AnyRoute) -> str:
    return f"{route.method} {route.path}"


def address(route: AnyRoute) -> str:
    return route.path.replace("{step}", "0").replace("{lease_id}", "0" * 32).replace("{submission_id}", "0" * 32)


def signature(swarm: Swarm, route: AnyRoute, signer: str, body: bytes = b"") -> dict[str, str]:
    audience = swarm.run.descriptor.coordinator_key
    target = RequestTarget("run-1", audience, route.method, address(route), "", digest_bytes(body))
    return stamp_request(keypair(signer), target, swarm.clock()).headers()


def sends(*chunks: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.request", "body": b"", "more_body": False}

    return receive


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


def ask(
    swarm: Swarm, route: AnyRoute, headers: dict[str, str], body: Receive, app: ASGIApp | None = None
) -> list[str | int]:
    """What happens, without any server in between: each read of the body, and the status when the answer begins."""
    events: list[str | int] = []

    async def receive() -> Message:
        events.append("read")
        return await body()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            events.append(message["status"])

    scope: dict[str, Any] = {
        "type": "http",
        "method": route.method,
        "path": address(route),
        "query_string": b"",
        "headers": [
            (b"transfer-encoding", b"chunked"),
            *((name.encode(), value.encode()) for name, value in headers.items()),
        ],
        "client": ("192.0.2.1", 1000),
    }

    async def call() -> None:
        await (app or swarm.app)(scope, receive, send)

    asyncio.run(call())
    return events


@pytest.mark.parametrize("route", SIGNED_ROUTES, ids=name_of)
def test_an_unsigned_request_is_refused_before_its_body_is_read(swarm: Swarm, route: AnyRoute) -> None:
    assert ask(swarm, route, {}, sends(b"x")) == [401, "read", "read"]


@pytest.mark.parametrize("route", SIGNED_ROUTES, ids=name_of)
def test_a_forged_request_is_refused_before_its_body_is_read(swarm: Swarm, route: AnyRoute) -> None:
    forged = signature(swarm, route, "eve") | {"x-shoal-key": keypair("trainer").public}
    assert ask(swarm, route, forged, sends(b"x")) == [401, "read", "read"]


@pytest.mark.parametrize("route", [route for route in SIGNED_ROUTES if hasattr(route.access, "names")], ids=name_of)
def test_a_key_without_the_role_is_refused_before_its_body_is_read(swarm: Swarm, route: AnyRoute) -> None:
    for signer in ("stranger", "run"):
        assert ask(swarm, route, signature(swarm, route, signer), sends())[0] == 403


def test_only_the_run_key_does_what_the_owner_does(swarm: Swarm) -> None:
    owned = [route for route in ROUTES if route.path.startswith(("/v1/run", "/v1/bans"))]
    assert len(owned) == 5
    for route in owned:
        for signer in ("stranger", "trainer", "validator", "coordinator"):
            assert ask(swarm, route, signature(swarm, route, signer), sends())[0] == 403


@pytest.mark.parametrize("route", [route for route in ROUTES if isinstance(route.reads, Json)], ids=name_of)
def test_a_body_other_than_the_signed_one_is_never_parsed(
    swarm: Swarm, route: AnyRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = next(iter(getattr(route.access, "names", ())), "run")
    assert isinstance(route.reads, Json)
    monkeypatch.setattr(route.reads.model, "model_validate_json", None)
    headers = signature(swarm, route, signer, b"{}")
    assert ask(swarm, route, headers, sends(b'{"a":', b"1}")) == ["read", "read", "read", 401]


def test_reading_stops_at_the_limit_of_the_route(swarm: Swarm) -> None:
    route = HEARTBEAT
    assert isinstance(route.reads, Json)

    async def endless() -> Message:
        return {"type": "http.request", "body": b" " * 1024, "more_body": True}

    events = ask(swarm, route, signature(swarm, route, "ann"), endless)
    assert events.index(413) == route.reads.limit.max_bytes // 1024 + 1
    discarded = len(events) - events.index(413) - 1
    assert discarded == swarm.run.config.coordinator.max_upload_bytes // 1024 + 1


def test_a_sender_that_asks_before_it_sends_is_not_waited_for(swarm: Swarm) -> None:
    assert ask(swarm, SIGNED_ROUTES[0], {"expect": "100-continue"}, sends()) == [401]


def impatient(swarm: Swarm, route: AnyRoute, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    assert isinstance(route.reads, Json)
    monkeypatch.setattr("shoal.coordinator.http.dispatch.DISCARD_S", 0.0)
    return Dispatcher(swarm.app.service, [replace(route, reads=replace(route.reads, limit=BodyLimit(1024, 0.0)))])


def test_a_body_that_does_not_arrive_in_time_is_refused_and_not_waited_for(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = impatient(swarm, HEARTBEAT, monkeypatch)
    assert ask(swarm, HEARTBEAT, signature(swarm, HEARTBEAT, "ann"), never, app) == ["read", 408, "read"]
    assert ask(swarm, HEARTBEAT, {}, never, app) == [401, "read"]


def test_an_upload_ends_with_its_lease(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.http.dispatch.DISCARD_S", 0.0)
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    route = next(route for route in ROUTES if route.method == "PUT")
    body, swarm.clock.now = b"rollouts", lease.expires_at
    target = f"/v1/submissions/{lease.lease_id}"
    headers = ann._headers("PUT", target, body, {SUBMISSION_SIGNATURE_HEADER: evidence(lease.lease_id, body)})
    moved = replace(route, path=target)
    app = Dispatcher(swarm.app.service, [route])
    assert ask(swarm, moved, headers, never, app) == ["read", 408, "read"]
    assert list(swarm.run.submissions.iterdir()) == []


def test_an_upload_of_a_key_that_is_banned_meanwhile_leaves_nothing(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.coordinator.http.dispatch.DISCARD_S", 0.0)
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease, body = swarm.lease(ann), b"rollouts"
    route = next(route for route in ROUTES if route.method == "PUT")
    target = f"/v1/submissions/{lease.lease_id}"
    headers = ann._headers("PUT", target, body, {SUBMISSION_SIGNATURE_HEADER: evidence(lease.lease_id, body)})
    left = [b"roll", b"outs"]

    async def receive() -> Message:
        if len(left) == 1:
            ban = api.BanBody(worker=keypair("ann").public, reason="meanwhile")
            await asyncio.to_thread(swarm.client("run").ban, ban)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    app = Dispatcher(swarm.app.service, [route])
    assert ask(swarm, replace(route, path=target), headers, receive, app)[-1] == 403
    assert list(swarm.run.submissions.iterdir()) == []
    assert swarm.all("SELECT 1 FROM submissions") == []
    assert swarm.ask(swarm.join("bob")[0], 0).lease is not None, "its slot is open to others"


def evidence(lease_id: str, body: bytes) -> str:
    return keypair("ann").sign(submission_message("run-1", lease_id, digest_bytes(body)))


def test_a_websocket_is_closed_and_starts_nothing(swarm: Swarm) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def call() -> int:
        await swarm.app({"type": "websocket", "path": "/v1/status"}, never, send)
        return len(asyncio.all_tasks())

    assert asyncio.run(call()) == 1
    assert sent == [{"type": "websocket.close"}]


def test_a_sender_that_goes_away_gets_no_answer(swarm: Swarm) -> None:
    route = HEARTBEAT

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    assert ask(swarm, route, signature(swarm, route, "ann"), gone) == ["read"]
    assert ask(swarm, route, {}, gone) == [401, "read"]


def test_no_two_routes_answer_one_address() -> None:
    finder = RouteFinder(ROUTES)
    for route in ROUTES:
        found = finder.find(route.method, address(route))
        assert found is not None
        assert found[0] is route


@pytest.mark.parametrize("path", ["/v1/leases/", "/v1/leases/a/b", "/v1/leases//", "/v1/leases/a\n", "//v1/workers"])
def test_an_address_that_only_looks_like_a_route_is_none(path: str) -> None:
    assert RouteFinder(ROUTES).find("DELETE", path) is None


def test_a_handler_is_a_plain_function_of_service_body_and_caller(swarm: Swarm) -> None:
    caller = Signed(keypair("ann").public, swarm.clock(), "0" * 32, "")
    assert swarm.http.portal is not None
    view = swarm.http.portal.call(worker_handlers.register, swarm.app.service, registration("ann"), caller)
    assert (view.key, view.name, view.state) == (caller.key, "ann", "registered")


def test_an_expensive_route_counts_as_several_requests(swarm: Swarm) -> None:
    costs = {route.path: route.cost for route in ROUTES if route.cost != 1}
    assert costs == {"/v1/ledger": 10, "/v1/curves": 3, "/v1/workers": 3}
    asked: list[tuple[str, float]] = []
    swarm.app.service.address_limit = SimpleNamespace(wait_s=lambda *call: asked.append(call) or 0.0)  # type: ignore[assignment,func-returns-value]
    swarm.http.get("/v1/ledger")
    swarm.http.get("/v1/nothing")
    assert [cost for _, cost in asked] == [10, 1]
