"""Every way in which a request is refused, as an answer: JSON `{code, message, hint}` with a stable code."""

import math

from pydantic import ValidationError
from starlette.responses import JSONResponse

from shoal.coordinator.store.writer import StoreError
from shoal.errors import RefusedError, ShoalError, SignatureError

SEE_DOCS = "See /docs for the API."


def refusal_of(error: Exception) -> JSONResponse:
    if isinstance(error, ShoalError):
        wait_s = error.retry_after_s if isinstance(error, RefusedError) else None
        return _refusal(_status(error), error.code, error.message, error.hint, wait_s, permanent=error.permanent)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))[:200] or 'body'}: {first['msg']}"
        return _refusal(422, "malformed", message, SEE_DOCS)
    return _refusal(500, "internal", f"The coordinator failed: {type(error).__name__}.", "Its log has the details.")


def too_many(message: str, wait_s: float) -> RefusedError:
    hint = f"Ask again in {wait_s:.1f} s; the shoal client does so by itself."
    return RefusedError("rate_limited", message, hint=hint, status=429, retry_after_s=wait_s)


def too_large(limit: int) -> RefusedError:
    return RefusedError("too_large", f"The body is larger than {limit} bytes.", hint=SEE_DOCS, status=413)


def timed_out() -> RefusedError:
    return RefusedError("timed_out", "The body did not arrive in time.", hint="Send it again.", status=408)


def _status(error: ShoalError) -> int:
    if isinstance(error, RefusedError) and error.status:
        return error.status
    return 401 if isinstance(error, SignatureError) else 503 if isinstance(error, StoreError) else 400


def _refusal(
    status: int, code: str, message: str, hint: str, wait_s: float | None = None, *, permanent: bool = False
) -> JSONResponse:
    headers = {} if wait_s is None else {"retry-after": str(math.ceil(wait_s))}
    printable = message.encode(errors="replace").decode()  # field names of a caller may be no unicode
    body = {"code": code, "message": printable, "hint": hint} | ({"permanent": True} if permanent else {})
    return JSONResponse(body, status_code=status, headers=headers)
