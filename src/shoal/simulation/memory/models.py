"""Messages of the API without a check of their values, made in less than half the time that `model_construct` takes.

A simulation makes millions of them, out of values that it has computed itself.
"""

from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)
_set = object.__setattr__  # models are frozen


def made(kind: type[Model], **values: Any) -> Model:
    """With the defaults of fields that are left out, which all such models share."""
    defaults, names = _fields(kind)
    model = kind.__new__(kind)
    _set(model, "__dict__", defaults | values)
    _set(model, "__pydantic_fields_set__", names)
    _set(model, "__pydantic_extra__", None)
    _set(model, "__pydantic_private__", None)
    return model


@lru_cache
def _fields(kind: type[BaseModel]) -> tuple[dict[str, Any], set[str]]:
    optional = {name: field for name, field in kind.model_fields.items() if not field.is_required()}
    return {name: field.get_default(call_default_factory=True) for name, field in optional.items()}, set(
        kind.model_fields
    )
