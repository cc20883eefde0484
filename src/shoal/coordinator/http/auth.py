"""Who may call a route: the signature of the request, the clock window, the nonce, the rate of the key and its role.

Everything is decided from the request's headers, before a byte of its body is read. A request that is refused here has
changed nothing and spent no nonce.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shoal.coordinator.http.refusals import too_many
from shoal.coordinator.page.session import OwnerSession
from shoal.coordinator.rules.presence import CLOCK_WINDOW_S, Stamp
from shoal.coordinator.run import Run
from shoal.coordinator.store import nonces
from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError
from shoal.net import RateLimit
from shoal.protocol.signing import KEY_HEADER, RequestStamp, RequestTarget, check_stamp

REQUESTS_OF_A_FILE = 3
"""One for its lease, one for the upload, and one that found no work."""

CallerT = TypeVar("CallerT", covariant=True)


@dataclass(frozen=True)
class Signed:
    """Who asks; `spend` uses the request's nonce up inside the operation's transaction."""

    key: str
    at: float
    nonce: str
    body_digest: str
    address: str = ""
    """The block of addresses that sent it."""

    @property
    def stamp(self) -> Stamp:
        return self.at, self.nonce

    def spend(self, connection: Connection) -> None:
        nonces.spend(connection, self.key, self.at, self.nonce)


@dataclass(frozen=True)
class RequestHead:
    """What is known of a request before its body."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    address: str = ""
    """What counts as one address of the caller."""
    is_secure: bool = False


@dataclass(frozen=True)
class Visitor:
    """A browser that anybody may sit at."""

    address: str
    known_tag: str
    """Of the file that it has."""
    is_owner: bool
    is_secure: bool


class Gate:
    """Checks signatures for one run and counts the requests of each key."""

    def __init__(self, run: Run, session: OwnerSession) -> None:
        self.run, self.session = run, session
        self._key_limit = RateLimit(run.config.coordinator.requests_per_s_key, run.clock)

    def authenticate(self, head: RequestHead, cost: int) -> Signed:
        """The key that signed this request; a forged one costs the named key nothing."""
        stamp = RequestStamp.from_headers(head.headers)
        self.check_clock(float(stamp.time), CLOCK_WINDOW_S)
        run = self.run.descriptor
        target = RequestTarget(run.run_id, run.coordinator_key, head.method, head.path, head.query, stamp.body_digest)
        check_stamp(stamp, target)
        self._count(stamp.key, cost)
        return Signed(stamp.key, float(stamp.time), stamp.nonce, stamp.body_digest, head.address)

    def is_proven(self, key: str) -> bool:
        """Whether the key is the owner's or has accepted work: such keys share no budget with strangers."""
        return key in self.run.role_keys or key == self.run.descriptor.run_key or key in self.run.presence.proven

    def names_proven_key(self, head: RequestHead) -> bool:
        """Whether a request claims such a key; `authenticate` finds out whether that is true."""
        return self.is_proven(head.headers.get(KEY_HEADER, ""))

    def check_clock(self, at: float, window_s: float) -> None:
        if abs(at - self.run.clock()) > window_s:
            hint = "The answer carries the server's time; sign again with it."
            raise RefusedError("clock", "The request's time is too far from the server's.", hint=hint, status=401)

    def note_accepted(self, key: str) -> None:
        """The requests of an accepted file do not count, so that no key is too fast for the limit by working."""
        self._key_limit.give_back(key, REQUESTS_OF_A_FILE)

    def _count(self, key: str, cost: int) -> None:
        if key in self.run.role_keys or key == self.run.descriptor.run_key:
            return
        if wait_s := self._key_limit.wait_s(key, cost):
            raise too_many("This key asks too often.", wait_s)


class Access(Protocol[CallerT]):
    """Who may call a route. `admit` returns the caller or refuses."""

    @property
    def is_signed(self) -> bool: ...

    def describe(self) -> str: ...

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> CallerT: ...


@dataclass(frozen=True)
class Anyone:
    is_signed: bool = False

    def describe(self) -> str:
        return "Anyone, unsigned."

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> None:
        return None


@dataclass(frozen=True)
class AnyVisitor:
    """Anyone, where the answer depends on the browser that asks."""

    is_signed: bool = False

    def describe(self) -> str:
        return "Anyone, unsigned."

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> Visitor:
        headers = head.headers
        is_owner = gate.session.is_owner(headers.get("cookie", ""))
        return Visitor(head.address, headers.get("if-none-match", ""), is_owner, head.is_secure)


@dataclass(frozen=True)
class OwnerCookie:
    """The owner's browser: it has exchanged the secret of the owner's link for a cookie."""

    is_signed: bool = False

    def describe(self) -> str:
        return "With the cookie of the owner's link."

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> Visitor:
        if not gate.session.is_owner(head.headers.get("cookie", "")):
            hint = "Open the link that `shoal run link` prints on the owner's host."
            raise RefusedError("owner", "Only the run's owner may see this.", hint=hint, status=403)
        return Visitor(head.address, "", is_owner=True, is_secure=head.is_secure)


@dataclass(frozen=True)
class AnyKey:
    """Whether the key is registered or banned is decided in the operation's own transaction."""

    is_signed: bool = True

    def describe(self) -> str:
        return "Any key, signed."

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> Signed:
        return gate.authenticate(head, cost)


@dataclass(frozen=True)
class Roles:
    names: tuple[str, ...]
    is_signed: bool = True

    def describe(self) -> str:
        return f"Signed by the run's {' or '.join(self.names)}."

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> Signed:
        caller = gate.authenticate(head, cost)
        if gate.run.role_keys.get(caller.key) not in self.names:
            message = f"Only the run's {' or '.join(self.names)} may do this."
            raise RefusedError("role", message, hint="Use that role's key.", status=403)
        return caller


@dataclass(frozen=True)
class Owner:
    is_signed: bool = True

    def describe(self) -> str:
        return "Signed with the run key."

    def admit(self, gate: Gate, head: RequestHead, cost: int) -> Signed:
        caller = gate.authenticate(head, cost)
        if caller.key != gate.run.descriptor.run_key:
            hint = "Sign with the run key, RUN/keys/run.key."
            raise RefusedError("owner", "Only the run's owner may do this.", hint=hint, status=403)
        return caller
