"""Who fetches which shard from the parents, so that each leaves the origin about once and the relays give it to each other.

Every relay knows the same list of relays and the same order of shards, so all name the same owner for a shard without a word:
shards go round the ring of members, and a dead member's shares are spread over all others. Members that see different lists
only fetch a few shards twice.
"""

from collections.abc import Callable, Sequence


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


def candidates(ring: Sequence[str], index: int) -> list[str]:
    """All members in the order in which they are responsible for a shard."""
    first = index % len(ring)
    others = [*ring[first + 1 :], *ring[:first]]
    turn = index // len(ring) % len(others) if others else 0
    return [ring[first], *others[turn:], *others[:turn]]
