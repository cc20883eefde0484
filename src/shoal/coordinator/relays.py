"""The relays that announced themselves, what was reported about them, and which of them have a place in the list.

In memory: relays announce themselves every few seconds. `rules.relays` decides. Announcements are bounded per address and in all,
and a full book forgets newcomers that had their turn, so that no number of false relays locks a real one out.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from shoal.coordinator.rules import relays as rules
from shoal.coordinator.rules.presence import Stamp, is_newer
from shoal.errors import RefusedError
from shoal.protocol import api

MEMORY_S = 600.0
"""A relay that is silent for this long is forgotten."""
MAX_KNOWN = 1024
KNOWN_PER_ADDRESS = 8
MAX_VOTES = 64
"""Per relay; the oldest go first."""
PLACES_EVERY_S = 1.0


@dataclass
class KnownRelay:
    seen_at: float
    body: api.RelayBody
    address: str = ""
    newest: Stamp = (0.0, "")
    announced_at: float = 0.0
    turn_at: float | None = None
    past_success: rules.Success | None = None
    """What was known of a run that is looked at afterwards."""


@dataclass
class Relays:
    clock: Callable[[], float]
    gone_after_s: float
    known: dict[str, KnownRelay] = field(default_factory=dict)
    """By key."""
    owners: Callable[[], Collection[str]] = frozenset
    """Keys of the owner's relays."""
    _votes: dict[str, dict[str, rules.Vote]] = field(default_factory=dict)
    """By address of the relay and reporter. They outlive the relay's key, which costs nothing to replace."""
    _places: list[str] = field(default_factory=list)
    _placed_at: float = float("-inf")

    def announce(self, key: str, body: api.RelayBody, stamp: Stamp, address: str) -> None:
        """Takes in an announcement, unless a newer one was heard."""
        self._forget_silent()
        known = self.known.get(key)
        if known is None:
            self._admit(key, address)
        elif not is_newer(stamp, known.newest):
            return
        self._require_own_url(key, body.url)
        now = self.clock()
        since, turn_at = (now, None) if known is None else (known.announced_at, known.turn_at)
        if known is not None and known.body.url != body.url:
            turn_at = None
        self.known[key] = KnownRelay(now, body, address, stamp, since, turn_at)
        self._placed_at = float("-inf") if len(self.known) <= rules.PLACES else self._placed_at

    def report(self, reporter: str, body: api.RelayReportBody, *, is_owners: bool) -> None:
        """Takes in what somebody measured; `reporter` has one vote about each relay."""
        now, urls = self.clock(), {relay.body.url for relay in self.known.values()}
        for one in body.relays:
            if one.url in urls:
                votes = self._votes.setdefault(one.url, {})
                vote = rules.Vote(now, one.is_good, is_owners, one.served, one.failed)
                votes[reporter] = vote.after(votes.pop(reporter, None))
                if len(votes) > MAX_VOTES:
                    del votes[next(iter(votes))]
        self._placed_at = float("-inf")

    def success(self, relay: KnownRelay) -> rules.Success | None:
        """How well it serves, as far as its clients say."""
        votes = self._votes.get(relay.body.url, {})
        return rules.success(list(votes.values()), self.clock()) or relay.past_success

    def listed(self) -> list[tuple[str, KnownRelay]]:
        """The relays that have a place."""
        now = self.clock()
        if now - self._placed_at >= PLACES_EVERY_S or now < self._placed_at:
            self._place(now)
        return [(key, self.known[key]) for key in self._places if key in self.known]

    def _place(self, now: float) -> None:
        owners = self.owners()
        candidates = [
            rules.Candidate(
                key,
                relay.address,
                relay.announced_at,
                relay.turn_at,
                key in owners,
                rules.measured(self._votes.get(relay.body.url, {}).values(), now),
            )
            for key, relay in list(self.known.items())  # the loop's thread adds to it
        ]
        self._places, self._placed_at = rules.places(candidates, now), now
        unknown = {one.key for one in candidates if one.measured == "unknown"}
        for key in unknown.intersection(self._places):
            relay = self.known[key]
            if relay.turn_at is None or now - relay.turn_at >= rules.TURN_S:
                relay.turn_at = now

    def _admit(self, key: str, address: str) -> None:
        if key in self.owners():
            return
        of_address = sum(relay.address == address for relay in self.known.values())
        if of_address >= KNOWN_PER_ADDRESS or (len(self.known) >= MAX_KNOWN and not self._forget_tried()):
            hint = "A relay that falls silent is forgotten after ten minutes."
            raise RefusedError("too_many_relays", "Too many relays are announced.", hint=hint, status=409)

    def _forget_tried(self) -> bool:
        """Forgets the newcomer whose turn was longest ago; false if none had one."""
        places = set(self._places)
        tried = [(relay.turn_at, key) for key, relay in self.known.items() if relay.turn_at and key not in places]
        if tried:
            del self.known[min(tried)[1]]
        return bool(tried)

    def _require_own_url(self, key: str, url: str) -> None:
        """An address belongs to the relay that announced it first, until that one falls silent; the owner's is the owner's."""
        now = self.clock()
        others = [
            other
            for other, relay in self.known.items()
            if other != key and relay.body.url == url and now - relay.seen_at <= self.gone_after_s
        ]
        if others and key not in self.owners():
            hint = "Announce the address under which this relay is reached."
            raise RefusedError("relay_url", "Another relay has announced this address.", hint=hint, status=409)
        for other in others:
            del self.known[other]

    def _forget_silent(self) -> None:
        now = self.clock()
        for key in [key for key, relay in self.known.items() if now - relay.seen_at > MEMORY_S]:
            del self.known[key]
        if len(self._votes) > 2 * MAX_KNOWN:
            urls = {relay.body.url for relay in self.known.values()}
            self._votes = {url: votes for url, votes in self._votes.items() if url in urls}
