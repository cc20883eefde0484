import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.coordinator
from shoal.coordinator.http.refusals import refusal_of, too_large
from shoal.coordinator.store.writer import StoreError
from shoal.errors import IntegrityError, RefusedError, SignatureError
from shoal.protocol import signing
from shoal.protocol.refusals import REFUSALS

SOURCES = [*Path(shoal.coordinator.__file__).parent.rglob("*.py"), Path(signing.__file__)]
OTHER_CODES = {"malformed", "not_found", "method", "internal", "length", "bad_signature", "store", "storage"}


def codes_in(source: str) -> Iterator[str]:
    """First arguments of every RefusedError that is raised."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RefusedError":
            yield from (one.value for one in node.args[:1] if isinstance(one, ast.Constant))  # type: ignore[misc]


def test_the_table_has_every_code_that_the_coordinator_gives() -> None:
    given = {code for path in SOURCES for code in codes_in(path.read_text())} | OTHER_CODES
    assert set(REFUSALS) == given


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RefusedError("banned", "No.", status=403), 403, "banned"),
        (SignatureError("No."), 401, "bad_signature"),
        (StoreError("No."), 503, "store"),
        (IntegrityError("No."), 400, "integrity"),
        (too_large(7), 413, "too_large"),
        (ZeroDivisionError(), 500, "internal"),
    ],
)
def test_each_error_has_its_status(error: Exception, status: int, code: str) -> None:
    answer = refusal_of(error)
    assert answer.status_code == status
    assert f'"code":"{code}"'.encode() in bytes(answer.body)


def test_a_refusal_for_a_while_says_how_long() -> None:
    error = RefusedError("rate_limited", "Slow down.", status=429, retry_after_s=1.2)
    assert refusal_of(error).headers["retry-after"] == "2"
