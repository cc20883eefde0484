"""The published schema: what the framework knows about the routes, and what it cannot know about signatures and uploads."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from shoal.coordinator.http.service import Service
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER
from shoal.protocol.signing import (
    BODY_HEADER,
    KEY_HEADER,
    NONCE_HEADER,
    NONCE_PATTERN,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    SIGNATURE_HEADER,
    TIME_HEADER,
    TIME_PATTERN,
)

HEX_64, HEX_128 = "[0-9a-f]{64}", "[0-9a-f]{128}"
SIGNED = {
    KEY_HEADER: (HEX_64, "Ed25519 public key of the caller."),
    TIME_HEADER: (
        TIME_PATTERN.pattern,
        "Unix time of the signature, with three decimals. Every answer carries the server's.",
    ),
    NONCE_HEADER: (NONCE_PATTERN.pattern, "16 random bytes, good for one request."),
    SIGNATURE_HEADER: (
        HEX_128,
        "Ed25519 over these lines, joined by \\n: shoal-request/1, run id, coordinator key, method, path, query, BLAKE3 of the"
        " body, time, nonce.",
    ),
}
UPLOADED = {
    BODY_HEADER: (HEX_64, "BLAKE3 of the file; signed in the place of the body's digest."),
    SUBMISSION_SIGNATURE_HEADER: (
        HEX_128,
        "Ed25519 over these lines, joined by \\n: shoal-submission/1, run id, lease id, BLAKE3 of the file.",
    ),
}
PARQUET = "application/vnd.apache.parquet"
UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {PARQUET: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def publish_schema(app: FastAPI, service: Service, routers: Iterable[APIRouter]) -> None:
    """Makes /docs and /openapi.json show the headers that every signed request needs."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schema["components"]["parameters"] = {name: _header(name, *what) for name, what in (SIGNED | UPLOADED).items()}
    schema["components"]["parameters"][PROTOCOL_HEADER] = _protocol_header()
    for route in routes:
        for method in route.methods or ():
            operation = schema["paths"][route.path][method.lower()]
            operation.setdefault("parameters", []).extend(_headers_of(route, service))
            if not operation["parameters"]:
                del operation["parameters"]
    app.openapi = lambda: schema  # type: ignore[method-assign]  # the documented way to extend it


def _headers_of(route: APIRoute, service: Service) -> list[dict[str, str]]:
    is_upload = route.openapi_extra is UPLOAD_BODY
    is_signed = is_upload or any(one.call == service.caller for one in route.dependant.dependencies)
    names = [
        *(SIGNED if is_signed else ()),
        *(UPLOADED if is_upload else ()),
        *([PROTOCOL_HEADER] if is_signed else ()),
    ]
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def _header(name: str, pattern: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return {"name": name, "in": "header", "required": True, "description": description, "schema": schema}


def _protocol_header() -> dict[str, Any]:
    return {
        "name": PROTOCOL_HEADER,
        "in": "header",
        "required": False,
        "description": "Protocol version of the caller; another one than the run's is refused with 426.",
        "schema": {"type": "string", "enum": [str(PROTOCOL_VERSION)]},
    }
