"""JSON objects from text: the one place that refuses what is not an object."""

import json
from typing import Any

from shoal.errors import ConfigError


def parse_object(text: str | bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from None
    return as_object(value, name)


def as_object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is not a JSON object.")
    return value
