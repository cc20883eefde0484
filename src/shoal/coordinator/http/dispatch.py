"""From bytes to a handler and back: finds the route, counts the address, checks the caller, reads the input, sends the answer.

A refused request has had no more of it read than was needed to refuse it. Every answer carries the server's time, so that clients
need no clock of their own.
"""

import logging
import time
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.coordinator.http.auth import RequestHead, Signed, Visitor
from shoal.coordinator.http.body import BodyLimit, BodyReader
from shoal.coordinator.http.refusals import SEE_DOCS, refusal_of, too_many
from shoal.coordinator.http.route import AnyRoute, Incoming
from shoal.coordinator.http.service import CONNECTION, Service
from shoal.errors import RefusedError, ShoalError, SignatureError
from shoal.net import address_block
from shoal.protocol.signing import TIME_HEADER

log = logging.getLogger(__name__)

Answer = BaseModel | Response | None
Caller = Signed | Visitor | None
TIME = TIME_HEADER.encode()
JSON_HEADERS = (
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
BODY_NAMES = {b"content-length", b"transfer-encoding"}
CLOSES = (b"connection", b"close")
FORWARDED = b"x-forwarded-for"
DISCARD_S = 20.0
"""For what a refused sender still sends; then the connection is closed on it."""
BUSY_RETRY_S = 1.0
ROUTE, EVENTS_PATH = "shoal.route", "/v1/events"


class RouteFinder:
    def __init__(self, routes: Iterable[AnyRoute]) -> None:
        self._routes = list(routes)
        self._exact = {(route.method, route.path): route for route in self._routes if "{" not in route.path}
        self._with_parameters = [route for route in self._routes if "{" in route.path]

    def find(self, method: str, path: str) -> tuple[AnyRoute, dict[str, str]] | None:
        """The route of a request and the values of its path's parameters."""
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact, {}
        for route in self._with_parameters:
            if route.method == method and (found := route.pattern.fullmatch(path)):
                return route, found.groupdict()
        return None

    def refusal(self, method: str, path: str) -> RefusedError:
        if any(route.pattern.fullmatch(path) for route in self._routes):
            return RefusedError("method", f"{method[:20]} is not possible here.", hint=SEE_DOCS, status=405)
        return RefusedError("not_found", "There is no such address.", hint=SEE_DOCS, status=404)


class Dispatcher:
    """The ASGI application of all routes."""

    def __init__(self, service: Service, routes: Iterable[AnyRoute]) -> None:
        self._service, self._finder = service, RouteFinder(routes)
        self._discarded = BodyLimit(service.run.config.coordinator.max_upload_bytes, DISCARD_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, under_way = self._sender(scope), self._service.under_way
        has_place = under_way.enter(address)
        started = time.perf_counter()
        try:
            await self._serve(scope, receive, send, address, has_place)
        finally:
            self._observe(scope, time.perf_counter() - started)
            if has_place:
                under_way.leave(address)

    def _observe(self, scope: Scope, seconds: float) -> None:
        route = scope.get(ROUTE)
        if route is not None and route != EVENTS_PATH:  # a stream lasts as long as its page
            self._service.exporter.observe("request", route=route, seconds=seconds)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, address: str, has_place: bool) -> None:
        body = BodyReader(receive, scope.get("extensions", {}).get(CONNECTION))
        try:
            answer = await self._answer(scope, body, address, has_place)
        except ClientDisconnect:
            return
        except (ShoalError, ValidationError) as error:
            self._service.exporter.observe("refusal", code=getattr(error, "code", "malformed"))
            await self._refuse(refusal_of(error), scope, body, send, waits=has_place)
        except Exception as error:  # ours: the caller learns that, the log learns why
            log.exception("%s %s failed", scope["method"], scope["path"])
            await self._refuse(refusal_of(error), scope, body, send, waits=has_place)
        else:
            await self._send(answer, scope, receive, send)

    def _sender(self, scope: Scope) -> str:
        """The block of addresses that sent the request, whatever proxies are between."""
        peer, proxies = (scope.get("client") or ("",))[0], self._service.proxies
        if peer not in proxies:
            return address_block(peer)
        forwarded = [value.decode("latin-1") for name, value in scope["headers"] if name == FORWARDED]
        return address_block(proxies.sender(peer, forwarded))

    def _is_secure(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether the caller's browser speaks TLS, to us or to a trusted proxy."""
        is_proxy = (scope.get("client") or ("",))[0] in self._service.proxies
        return scope.get("scheme") == "https" or (is_proxy and headers.get("x-forwarded-proto") == "https")

    async def _answer(self, scope: Scope, body: BodyReader, address: str, has_place: bool) -> Answer:
        method, path = scope["method"], scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query, is_secure = scope["query_string"].decode("latin-1"), self._is_secure(scope, headers)
        head = RequestHead(method, path, query, headers, address, is_secure)
        found = self._finder.find(method, path)
        self._count_address(head, found[0] if found else None, has_place)
        if found is None:
            raise self._finder.refusal(method, path)
        route, named = found
        scope[ROUTE] = route.path
        caller = self._admit(route, head)
        self._vouch(scope, caller)
        signed = caller if isinstance(caller, Signed) else None
        sent = await route.reads.read(Incoming(head, signed, named, body))
        handling = route.handler(self._service, sent, caller)
        answer: Answer = await (body.unless_gone(handling) if route.waits else handling)
        return answer

    def _count_address(self, head: RequestHead, route: AnyRoute | None, has_place: bool) -> None:
        """Refuses an address that asks too often, or too much at once, except for its keys with accepted work."""
        wait_s = self._service.address_limit.wait_s(head.address, route.cost if route else 1)
        if not has_place:
            wait_s = max(wait_s, BUSY_RETRY_S)
        is_excepted = route is not None and route.access.is_signed and self._service.gate.names_proven_key(head)
        if wait_s and (not is_excepted or self._service.forgery_limit.is_spent(head.address)):
            raise too_many("Your address asks too often.", wait_s)

    def _admit(self, route: AnyRoute, head: RequestHead) -> Caller:
        """Keys with accepted work are public, so anybody can name one: an address that often names one falsely, which costs a
        check of its signature each time, is believed no more for a while."""
        try:
            caller: Caller = route.access.admit(self._service.gate, head, route.cost)
        except SignatureError:
            self._service.forgery_limit.wait_s(head.address)
            raise
        return caller

    def _vouch(self, scope: Scope, caller: object) -> None:
        connection = scope.get("extensions", {}).get(CONNECTION)
        if connection is not None and isinstance(caller, Signed) and self._service.gate.is_proven(caller.key):
            connection.vouch(caller.key)

    async def _send(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(answer, Response):
            answer.raw_headers.append(self._time())
            await answer(scope, receive, send)
            return
        data = b"" if answer is None else answer.model_dump_json().encode()
        described = () if answer is None else (*JSON_HEADERS, (b"content-length", b"%d" % len(data)))
        status = 204 if answer is None else 200
        await send({"type": "http.response.start", "status": status, "headers": [*described, self._time()]})
        await send({"type": "http.response.body", "body": data})

    async def _refuse(self, refusal: Response, scope: Scope, body: BodyReader, send: Send, *, waits: bool) -> None:
        """Answers at once, then lets the sender finish: closing on it makes it see a broken pipe instead of the refusal.
        A sender that has no place is not waited for."""
        names = {name for name, _ in scope["headers"]}
        is_unread = body.has_more and not names.isdisjoint(BODY_NAMES)
        headers = [*refusal.raw_headers, self._time(), *([CLOSES] if is_unread else [])]
        await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        if waits and is_unread and b"expect" not in names:  # a sender that asks first sends nothing after a refusal
            connection = scope.get("extensions", {}).get(CONNECTION)
            await body.discard(self._discarded, None if connection is None else connection.hold)
        await send({"type": "http.response.body", "body": b""})

    def _time(self) -> tuple[bytes, bytes]:
        return TIME, b"%.3f" % self._service.run.clock()
