"""Who fetches which shard from the parents, so that each leaves the origin about once and the relays give it to each other.

Every relay knows the same list of relays and the same order of shards, so all name the same owner for a shard without a word:
shards go round the ring of members, and a dead member's shares are spread over all others. Members that see different lists
only fetch a few shards twice.
"""

from collections.abc import Callable, Iterable, Sequence


class Mesh:
    def __init__(self, me: Callable[[], str], peers: Callable[[], Sequence[str]], alive: Callable[[str], bool]) -> None:
        self._me = me
        self._peers = peers
        self._alive = alive

    def peers(self) -> list[str]:
        """The other relays that are believed to live."""
        return [url for url in self._ring() if url != self._me() and self._alive(url)]

    def owner(self, index: int) -> str | None:
        """Which peer has, or will have first, the shard at this place in the order; None if that is this relay itself."""
        me = self._me()
        for url in candidates(self._ring(), index):
            if url == me:
                return None
            if self._alive(url):
                return url
        return None

    def _ring(self) -> list[str]:
        return sorted({url.rstrip("/") for url in self._peers()} | {self._me()})


class Neighbours:
    """What a coordinator's list of relays means for one of them: whom it exchanges shards with, and spare parents.

    Only a relay that brings shards in from outside the list takes part in the exchange: one that has nothing but other relays
    above it would wait for shards that those expect from it.
    """

    def __init__(self, upstreams: Sequence[str], always: Sequence[str] = ()) -> None:
        self._upstreams = {url.rstrip("/") for url in upstreams}
        self._always = [url.rstrip("/") for url in always]
        self._listed: dict[str, bool] = {}
        self._spare: list[str] = []

    def update(self, listed: Iterable[tuple[str, bool]], spare: Iterable[str]) -> None:
        """Addresses of living relays, each with whether it exchanges, and who else has everything."""
        self._listed = {url.rstrip("/"): exchanges for url, exchanges in listed}
        self._spare = [url.rstrip("/") for url in spare]

    @property
    def exchanges(self) -> bool:
        return bool(self._upstreams - self._listed.keys())

    def peers(self) -> list[str]:
        if not self.exchanges:
            return []
        return [*self._always, *(url for url, exchanges in self._listed.items() if exchanges)]

    def spare_parents(self) -> list[str]:
        """Where to go on when every parent is gone."""
        return [*self._spare, *self._always, *self._listed]


def candidates(ring: Sequence[str], index: int) -> list[str]:
    """All members in the order in which they are responsible for a shard."""
    first = index % len(ring)
    others = [*ring[first + 1 :], *ring[:first]]
    turn = index // len(ring) % len(others) if others else 0
    return [ring[first], *others[turn:], *others[:turn]]
