"""Open connections of one server: how many an address and a key may hold, and which one is closed for another.

A newcomer is let in: if its address holds too many, the longest idle one of that address is closed; if the server does, the
longest idle one of the address that holds most. A connection whose key has accepted work counts for the key, not for its
address, and is closed for no stranger. So neither a flood nor hostile neighbours behind one address keep such a key out.
Knows no sockets: the caller closes what is returned.
"""

import resource
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


class Connections(Generic[ConnectionT]):
    def __init__(self, per_address: int | None, total: int, per_key: int = 1) -> None:
        """None: an address may hold any number."""
        self._per_address, self._total, self._per_key = per_address, total, per_key
        self._addresses = _Holders[ConnectionT]()
        self._keys = _Holders[ConnectionT]()
        self._exempt: set[ConnectionT] = set()

    def __len__(self) -> int:
        return len(self._addresses) + len(self._keys) + len(self._exempt)

    def enter(self, connection: ConnectionT, address: str | None) -> ConnectionT | None:
        """Counts a new connection; returns the one to close. None as the address: a proxy, which many share."""
        if address is None:
            self._exempt.add(connection)
        else:
            self._addresses.add(connection, address)
            if self._per_address is not None and self._addresses.held(address) > self._per_address:
                return self._addresses.pop(address)
        if len(self) <= self._total:
            return None
        if largest := self._addresses.largest():
            return self._addresses.pop(largest)
        self.leave(connection)
        return connection

    def touch(self, connection: ConnectionT) -> None:
        """The connection asks for something, so it is idle no more."""
        self._addresses.touch(connection)
        self._keys.touch(connection)

    def vouch(self, connection: ConnectionT, key: str) -> ConnectionT | None:
        """From now on the connection counts for a key that has accepted work; returns the one to close."""
        if not self._addresses.remove(connection):
            return None
        self._keys.add(connection, key)
        return self._keys.pop(key) if self._keys.held(key) > self._per_key else None

    def leave(self, connection: ConnectionT) -> None:
        self._exempt.discard(connection)
        self._addresses.remove(connection)
        self._keys.remove(connection)


class _Holders(Generic[ConnectionT]):
    """Connections by holder, the longest idle first; finds the largest holder without a look at each."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[ConnectionT, None]] = {}
        self._holder_of: dict[ConnectionT, str] = {}
        self._by_size: dict[int, OrderedDict[str, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._holder_of)

    def held(self, holder: str) -> int:
        return len(self._held.get(holder, ()))

    def largest(self) -> str | None:
        while self._most and not self._by_size.get(self._most):
            self._most -= 1
        return next(iter(self._by_size[self._most])) if self._most else None

    def add(self, connection: ConnectionT, holder: str) -> None:
        held = self._held.setdefault(holder, OrderedDict())
        held[connection] = None
        self._holder_of[connection] = holder
        self._resize(holder, len(held) - 1, len(held))

    def remove(self, connection: ConnectionT) -> bool:
        holder = self._holder_of.pop(connection, None)
        if holder is None:
            return False
        held = self._held[holder]
        del held[connection]
        self._resize(holder, len(held) + 1, len(held))
        if not held:
            del self._held[holder]
        return True

    def pop(self, holder: str) -> ConnectionT:
        """Removes and returns the longest idle one."""
        connection = next(iter(self._held[holder]))
        self.remove(connection)
        return connection

    def touch(self, connection: ConnectionT) -> None:
        if (holder := self._holder_of.get(connection)) is not None:
            self._held[holder].move_to_end(connection)

    def _resize(self, holder: str, before: int, after: int) -> None:
        if before:
            same = self._by_size[before]
            del same[holder]
            if not same:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[holder] = None
            self._most = max(self._most, after)


class UnderWay:
    """Counts requests under way per address and in total, and says whether one more may come. None: any number."""

    def __init__(self, per_address: int | None, total: int | None = None) -> None:
        self._per_address, self._total = per_address, total
        self._taken: Counter[str] = Counter()
        self._sum = 0

    def enter(self, address: str) -> bool:
        if _is_full(self._taken[address], self._per_address) or _is_full(self._sum, self._total):
            return False
        self._taken[address] += 1
        self._sum += 1
        return True

    def leave(self, address: str) -> None:
        self._taken[address] -= 1
        self._sum -= 1
        if not self._taken[address]:
            del self._taken[address]


def _is_full(taken: int, most: int | None) -> bool:
    return most is not None and taken >= most


def raise_file_limit() -> int:
    """As many open files as the system lets this process have; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most if most != resource.RLIM_INFINITY else 1 << 20
