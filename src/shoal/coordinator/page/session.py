"""The owner's link and cookie: both follow from the run secret and a rotation number, so any process of the run knows them.

The link's secret travels in the URL fragment, which browsers do not send; the page exchanges it for a cookie that scripts cannot
read. Rotating makes every earlier link and cookie worthless. Comparisons take the same time for any wrong value.
"""

import hmac
import time
from collections.abc import Callable

from blake3 import blake3

from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.writer import Store

REREAD_S = 2.0
"""Another process may rotate the link: this long an old cookie may still count here."""
COOKIE_AGE_S = 30 * 86_400


def link_secret(run_secret: bytes, run_id: str, rotation: int) -> str:
    return blake3(f"shoal page link/{run_id}/{rotation}".encode(), key=run_secret).hexdigest()


def cookie_value(run_secret: bytes, run_id: str, rotation: int) -> str:
    return blake3(f"shoal page cookie/{run_id}/{rotation}".encode(), key=run_secret).hexdigest()


def rotation_of(connection: Connection) -> int:
    return int(meta.read(connection, "page_rotation") or 0)


def rotate(connection: Connection) -> int:
    rotation = rotation_of(connection) + 1
    meta.write(connection, "page_rotation", str(rotation))
    return rotation


class OwnerSession:
    """Decides whether a request comes from the owner's browser."""

    def __init__(
        self, store: Store, run_secret: bytes, run_id: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._secret, self._run_id, self._monotonic = store, run_secret, run_id, monotonic
        self._rotation, self._read_at = 0, float("-inf")
        # Cookies of one host are shared by all its ports, so each run needs a name of its own.
        self.cookie_name = f"shoal_owner_{blake3(run_id.encode()).hexdigest(8)}"

    def knows(self, secret: str) -> bool:
        return hmac.compare_digest(secret, link_secret(self._secret, self._run_id, self._current()))

    def is_owner(self, cookie_header: str) -> bool:
        # Not http.cookies: that undoes escapes in quadratic time, half a second for one head that anybody may send.
        cookies = (part.strip().partition("=") for part in cookie_header.split(";"))
        value = next((value for name, _, value in cookies if name == self.cookie_name), "")
        return value.isascii() and hmac.compare_digest(value, self._cookie())

    def set_cookie(self, *, is_secure: bool) -> str:
        """The header that gives the browser its cookie."""
        parts = [f"{self.cookie_name}={self._cookie()}", "HttpOnly", "SameSite=Strict", "Path=/"]
        parts += [f"Max-Age={COOKIE_AGE_S}", *(["Secure"] if is_secure else [])]
        return "; ".join(parts)

    def reread(self) -> None:
        self._read_at = float("-inf")

    def _cookie(self) -> str:
        return cookie_value(self._secret, self._run_id, self._current())

    def _current(self) -> int:
        if self._monotonic() - self._read_at > REREAD_S:
            self._rotation, self._read_at = self._store.read_rows(rotation_of), self._monotonic()
        return self._rotation
