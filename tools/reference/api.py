"""docs/reference/api.md: every route of the coordinator, with its bodies, from the schema that the coordinator serves."""

from typing import Any

from shoal.coordinator.http.openapi import build_schema
from shoal.coordinator.http.table import ROUTES
from tools.reference.text import item, wrapped

INTRODUCTION = (
    "The coordinator speaks JSON over HTTP. A running coordinator shows this page at `/docs` and its schema at"
    " `/openapi.json`. Every refusal is `{code, message, hint}` with one of these [codes](codes.md)."
)
HEADERS = "Headers of a signed request:"


def page() -> str:
    schema = build_schema([route for route in ROUTES if route.is_listed])
    lines = ["# API", "", wrapped(INTRODUCTION), "", wrapped(HEADERS), ""]
    lines += [item(_header(header)) for header in schema["components"]["parameters"].values()]
    lines += ["", "## Routes"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            lines += ["", f"### {method.upper()} {path}", "", wrapped(operation["description"]), ""]
            lines += [item(text) for text in _exchange(operation)]
    lines += ["", "## Bodies"]
    for title, model in sorted(schema["components"]["schemas"].items()):
        lines += ["", f"### {title}", ""]
        lines += [wrapped(model["description"]), ""] if "description" in model else []
        required = set(model.get("required", ()))
        lines += [item(_field(name, field, name in required)) for name, field in model.get("properties", {}).items()]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _header(header: dict[str, Any]) -> str:
    required = "" if header["required"] else " (optional)"
    return f"**`{header['name']}`**{required}: {header['description']}".replace("\\n", "line feeds")


def _exchange(operation: dict[str, Any]) -> list[str]:
    """What goes in and what comes out."""
    parts = [f"`{one['name']}` in the {one['in']}" for one in operation["parameters"] if "name" in one]
    body = operation.get("requestBody", {}).get("content", {})
    parts += [f"body: {_content(kind, content)}" for kind, content in body.items()]
    for status, response in operation["responses"].items():
        if status.startswith(("2", "3")):
            what = [_content(*content) for content in response.get("content", {}).items()]
            parts.append(f"{status}: {', '.join(what) or response['description']}")
    return parts


def _content(kind: str, content: dict[str, Any]) -> str:
    schema = content.get("schema", {})
    return _reference(schema) if "$ref" in schema else f"`{kind}`"


def _reference(schema: dict[str, Any]) -> str:
    name = schema["$ref"].rsplit("/", 1)[1]
    return f"[{name}](#{name.lower()})"


def _field(name: str, schema: dict[str, Any], is_required: bool) -> str:
    optional = "" if is_required else ", optional"
    words = f": {schema['description']}" if "description" in schema else ""
    return f"**`{name}`** ({_kind(schema)}{optional}){words}"


def _kind(schema: dict[str, Any]) -> str:
    """A type in few words."""
    if "$ref" in schema:
        return _reference(schema)
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "object":
        return "object"
    return str(schema.get("type", "any"))
