"""Every way in which a request is refused, as an answer: JSON `{code, message, hint}` with a stable code."""

import math

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from shoal.coordinator.store.writer import StoreError
from shoal.errors import RefusedError, ShoalError, SignatureError

SEE_DOCS = "See /docs for the API."
REFUSED: tuple[type[Exception], ...] = (ShoalError, RequestValidationError, ValidationError, HTTPException)
"""What a request can bring upon itself; anything else is a failure of ours."""


async def refuse(_: Request, error: Exception) -> JSONResponse:
    return refusal_of(error)


def refusal_of(error: Exception) -> JSONResponse:
    if isinstance(error, ShoalError):
        wait_s = error.retry_after_s if isinstance(error, RefusedError) else None
        return _refusal(_status(error), error.code, error.message, error.hint, wait_s, permanent=error.permanent)
    if isinstance(error, (RequestValidationError, ValidationError)):
        return _refusal(422, "malformed", _complaint(error), SEE_DOCS)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method", 413: "too_large"}.get(error.status_code, "malformed")
        return _refusal(error.status_code, code, str(error.detail), SEE_DOCS)
    return _refusal(500, "internal", f"The coordinator failed: {type(error).__name__}.", "Its log has the details.")


def too_many(message: str, wait_s: float) -> RefusedError:
    hint = f"Ask again in {wait_s:.1f} s; the shoal client does so by itself."
    return RefusedError("rate_limited", message, hint=hint, status=429, retry_after_s=wait_s)


def _status(error: ShoalError) -> int:
    if isinstance(error, RefusedError) and error.status:
        return error.status
    return 401 if isinstance(error, SignatureError) else 503 if isinstance(error, StoreError) else 400


def _complaint(error: RequestValidationError | ValidationError) -> str:
    first = error.errors()[0]
    place = first["loc"] if isinstance(error, RequestValidationError) else ("body", *first["loc"])
    return f"{'.'.join(map(str, place))[:200]}: {first['msg']}"


def _refusal(
    status: int, code: str, message: str, hint: str, wait_s: float | None = None, *, permanent: bool = False
) -> JSONResponse:
    headers = {} if wait_s is None else {"retry-after": str(math.ceil(wait_s))}
    printable = message.encode(errors="replace").decode()  # field names of a caller may be no unicode
    body = {"code": code, "message": printable, "hint": hint} | ({"permanent": True} if permanent else {})
    return JSONResponse(body, status_code=status, headers=headers)
