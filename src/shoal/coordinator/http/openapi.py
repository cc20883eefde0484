"""The API page and its schema, made from the table of routes; both are served by this package alone, without other hosts."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from jinja2 import Environment, PackageLoader
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.responses import Response

from shoal import __version__
from shoal.coordinator.http.auth import Anyone
from shoal.coordinator.http.route import JSON, PARQUET, Address, AnyRoute, Json, Nothing, PlainJson, Route, UploadStream
from shoal.coordinator.http.service import Service
from shoal.protocol import api
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

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"
REFUSED_STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 422, 426, 429, 503)
HEX_64, HEX_128 = "[0-9a-f]{64}", "[0-9a-f]{128}"
SIGNED = {
    KEY_HEADER: (HEX_64, "Ed25519 public key of the caller."),
    TIME_HEADER: (
        TIME_PATTERN.pattern,
        "Unix time of the signature, with three decimals. Every answer has the server's.",
    ),
    NONCE_HEADER: (NONCE_PATTERN.pattern, "16 random bytes, valid for one request."),
    BODY_HEADER: (
        HEX_64,
        "BLAKE3 of the body, also of an empty one. The signature is checked before the body is read.",
    ),
    SIGNATURE_HEADER: (
        HEX_128,
        "Ed25519 over these lines, joined by \\n: shoal-request/1, run id, coordinator key, method, path, query, BLAKE3 of the"
        " body, time, nonce.",
    ),
}
EVIDENCE = "Ed25519 over these lines, joined by \\n: shoal-submission/1, run id, lease id, BLAKE3 of the file."
BINARY: Schema = {"type": "string", "format": "binary"}


@dataclass(frozen=True)
class StaticPage:
    """A handler that always answers the same bytes."""

    content: bytes
    media: str

    async def __call__(self, service: Service, body: None, caller: None) -> Response:
        return Response(self.content, media_type=self.media)


def documentation(routes: Iterable[AnyRoute]) -> tuple[AnyRoute, ...]:
    """The routes of the schema and of the page that shows it."""
    schema = build_schema([route for route in routes if route.is_listed])
    pages = {
        "/openapi.json": StaticPage(json.dumps(schema).encode(), JSON),
        "/docs": StaticPage(render_page(schema).encode(), "text/html"),
    }
    return tuple(
        Route("GET", path, page, Anyone(), Nothing(), Response, page.media, is_listed=False)
        for path, page in pages.items()
    )


def build_schema(routes: list[AnyRoute]) -> Schema:
    paths: Schema = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal coordinator", "version": __version__},
        "paths": paths,
        "components": {"schemas": _models(routes), "parameters": _headers()},
    }


def render_page(schema: Schema) -> str:
    page = Environment(loader=PackageLoader("shoal.coordinator", "http"), autoescape=True).get_template("api_page.html")
    return page.render(schema=schema)


def _models(routes: list[AnyRoute]) -> Schema:
    bodies = {route.reads.model for route in routes if isinstance(route.reads, Json | PlainJson)}
    answers: set[type[BaseModel]] = {route.answer for route in routes if issubclass(route.answer, BaseModel)}
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)),
        *((model, "serialization") for model in sorted(answers | {api.Refusal}, key=lambda model: model.__name__)),
    ]
    definitions: Schema = models_json_schema(modes, ref_template=REFERENCE)[1]["$defs"]
    return definitions


def _operation(route: AnyRoute) -> Schema:
    operation: Schema = {
        "operationId": f"{route.handler.__module__.rsplit('.', 1)[1]}.{route.handler.__name__}",
        "summary": route.handler.__name__.replace("_", " ").capitalize(),
        "description": f"{route.handler.__doc__} {route.access.describe()}",
        "parameters": [*_address_parameters(route), *_header_references(route)],
        "responses": _responses(route),
    }
    if isinstance(route.reads, Json | PlainJson):
        content = {JSON: {"schema": {"$ref": REFERENCE.format(model=route.reads.model.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    if isinstance(route.reads, UploadStream):
        operation["requestBody"] = {"required": True, "content": {PARQUET: {"schema": BINARY}}}
    return operation


def _address_parameters(route: AnyRoute) -> list[Schema]:
    if isinstance(route.reads, UploadStream):
        fields, required = {"lease_id": {"type": "string"}}, ["lease_id"]
    elif isinstance(route.reads, Address):
        schema = route.reads.model.model_json_schema()
        fields, required = schema["properties"], schema.get("required", [])
    else:
        return []
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in route.path else "query",
            "required": name in required,
            "schema": field,
        }
        for name, field in fields.items()
    ]


def _header_references(route: AnyRoute) -> list[Schema]:
    names = [*SIGNED, PROTOCOL_HEADER] if route.access.is_signed else []
    if isinstance(route.reads, UploadStream):
        names.append(SUBMISSION_SIGNATURE_HEADER)
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def _responses(route: AnyRoute) -> Schema:
    refusal = {"$ref": REFERENCE.format(model=api.Refusal.__name__)}
    refused = {"description": "Refused.", "content": {JSON: {"schema": refusal}}}
    return _successes(route) | {str(status): refused for status in REFUSED_STATUSES}


def _successes(route: AnyRoute) -> Schema:
    if route.answer is NoneType:
        return {"204": {"description": "Done."}}
    if issubclass(route.answer, BaseModel):
        model = {"$ref": REFERENCE.format(model=route.answer.__name__)}
        return {"200": {"description": "Done.", "content": {route.media: {"schema": model}}}}
    if route.media != PARQUET:
        return {"200": {"description": "Done.", "content": {route.media: {}}}}
    moved = {"description": "The file is in a bucket; the URL is valid for some minutes."}
    return {"200": {"description": "Done.", "content": {PARQUET: {"schema": BINARY}}}, "307": moved}


def _headers() -> Schema:
    required = SIGNED | {SUBMISSION_SIGNATURE_HEADER: (HEX_128, EVIDENCE)}
    headers: Schema = {name: _header(name, *what) for name, what in required.items()}
    headers[PROTOCOL_HEADER] = {
        "name": PROTOCOL_HEADER,
        "in": "header",
        "required": False,
        "description": "Protocol version of the caller; another one than the run's is refused with 426.",
        "schema": {"type": "string", "enum": [str(PROTOCOL_VERSION)]},
    }
    return headers


def _header(name: str, pattern: str, description: str) -> Schema:
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return {"name": name, "in": "header", "required": True, "description": description, "schema": schema}
