"""From bytes to a handler and back: finds the route, counts the address, checks the caller, reads the input, sends the answer.

A refused request has had no more of it read than was needed to refuse it. Every answer carries the server's time, so that clients
need no clock of their own.
"""

import logging
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.coordinator.http.auth import RequestHead
from shoal.coordinator.http.body import BodyLimit, BodyReader
from shoal.coordinator.http.limits import address_block
from shoal.coordinator.http.refusals import SEE_DOCS, refusal_of, too_many
from shoal.coordinator.http.route import AnyRoute, Incoming
from shoal.coordinator.http.service import Service
from shoal.errors import RefusedError, ShoalError
from shoal.protocol.signing import TIME_HEADER

log = logging.getLogger(__name__)

Answer = BaseModel | Response | None
TIME = TIME_HEADER.encode()
JSON_TYPE = (b"content-type", b"application/json")
BODY_NAMES = {b"content-length", b"transfer-encoding"}
CLOSES = (b"connection", b"close")
DISCARD_S = 60.0
"""For what a refused sender still sends; then the connection is closed on it."""


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
        body = BodyReader(receive)
        try:
            answer = await self._answer(scope, body)
        except ClientDisconnect:
            return
        except (ShoalError, ValidationError) as error:
            await self._refuse(refusal_of(error), scope, body, send)
        except Exception as error:  # ours: the caller learns that, the log learns why
            log.exception("%s %s failed", scope["method"], scope["path"])
            await self._refuse(refusal_of(error), scope, body, send)
        else:
            await self._send(answer, scope, receive, send)

    async def _answer(self, scope: Scope, body: BodyReader) -> Answer:
        service, method, path = self._service, scope["method"], scope["path"]
        found = self._finder.find(method, path)
        self._count_address(scope, found[0].cost if found else 1)
        if found is None:
            raise self._finder.refusal(method, path)
        route, named = found
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        head = RequestHead(method, path, scope["query_string"].decode("latin-1"), headers)
        caller = route.access.admit(service.gate, head, route.cost)
        sent = await route.reads.read(Incoming(head, caller, named, body))
        answer: Answer = await route.handler(service, sent, caller)
        return answer

    def _count_address(self, scope: Scope, cost: int) -> None:
        client = scope.get("client")
        if client and (wait_s := self._service.address_limit.wait_s(address_block(client[0]), cost)):
            raise too_many("Your address asks too often.", wait_s)

    async def _send(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(answer, Response):
            answer.raw_headers.append(self._time())
            await answer(scope, receive, send)
            return
        data = b"" if answer is None else answer.model_dump_json().encode()
        described = () if answer is None else (JSON_TYPE, (b"content-length", b"%d" % len(data)))
        status = 204 if answer is None else 200
        await send({"type": "http.response.start", "status": status, "headers": [*described, self._time()]})
        await send({"type": "http.response.body", "body": data})

    async def _refuse(self, refusal: Response, scope: Scope, body: BodyReader, send: Send) -> None:
        """Answers at once, then lets the sender finish: closing on it makes it see a broken pipe instead of the refusal."""
        names = {name for name, _ in scope["headers"]}
        is_unread = body.has_more and not names.isdisjoint(BODY_NAMES)
        headers = [*refusal.raw_headers, self._time(), *([CLOSES] if is_unread else [])]
        await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        if is_unread and b"expect" not in names:  # a sender that asks first sends nothing after a refusal
            await body.discard(self._discarded)
        await send({"type": "http.response.body", "body": b""})

    def _time(self) -> tuple[bytes, bytes]:
        return TIME, b"%.3f" % self._service.run.clock()
