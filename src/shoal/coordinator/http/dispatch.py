"""The short way of signed requests: from bytes to the operation and back without the framework's machinery.

Routes are declared once, with their typed bodies and answers, and the framework makes the OpenAPI page from them. Its own way
through a request (matching, dependencies, validation of our own answers) costs more than signature and store together. So routes
that a swarm calls all the time, those of a signed JSON body and the upload, are found here by their path, and their function is
called directly: first the signature is checked, then the body. Everything else goes on to the framework.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.coordinator.http.middleware import UPLOADS
from shoal.coordinator.http.refusals import REFUSED, refusal_of
from shoal.coordinator.http.service import Service
from shoal.files import digest_bytes

Endpoint = Callable[..., Awaitable[BaseModel]]


@dataclass(frozen=True)
class _Operation:
    body: type[BaseModel]
    endpoint: Endpoint


class Express:
    def __init__(self, app: ASGIApp, service: Service, routers: Iterable[APIRouter]) -> None:
        self._app, self._service = app, service
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._operations = {("POST", route.path): found for route in routes if (found := _operation(route))}
        self._upload: Endpoint = next(route.endpoint for route in routes if _takes_uploads(route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = self._answering(scope, receive) if scope["type"] == "http" else None
        if answering is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = (await answering).model_dump_json().encode()
        except ClientDisconnect:
            return
        except REFUSED as error:
            await refusal_of(error)(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _answering(self, scope: Scope, receive: Receive) -> Awaitable[BaseModel] | None:
        method, path = scope["method"], scope["path"]
        operation = self._operations.get((method, path))
        if operation is not None:
            return self._serve(operation, Request(scope, receive))
        lease_id = path[len(UPLOADS) :]
        if method == "PUT" and path.startswith(UPLOADS) and lease_id and "/" not in lease_id:
            return self._upload(lease_id, Request(scope, receive))
        return None

    async def _serve(self, operation: _Operation, request: Request) -> BaseModel:
        body = await request.body()
        caller = self._service.authenticate(request, digest_bytes(body))
        return await operation.endpoint(operation.body.model_validate_json(body), caller)


def _operation(route: APIRoute) -> _Operation | None:
    """What is called with a signed JSON body and nothing else."""
    parameters: dict[str, Any] = {
        name: parameter.annotation for name, parameter in inspect.signature(route.endpoint).parameters.items()
    }
    if route.methods != {"POST"} or list(parameters) != ["body", "caller"]:
        return None
    return _Operation(parameters["body"], route.endpoint)


def _takes_uploads(route: APIRoute) -> bool:
    return route.methods == {"PUT"} and route.path.startswith(UPLOADS)
