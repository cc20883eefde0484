"""How long a version takes to reach a worker, and what each link carries.

What is fetched follows from `broadcast.plan`, how a worker spreads its requests over relays from `broadcast.scores`. The rest is a
fluid model: everybody downloads at once, each link is shared evenly, a worker is never faster than its own link, and nothing is
complete before the relays have it. Relays give shards to each other, so each leaves the origin once; the measured time of that
over the bound of the links is `MESH_OVERHEAD` (benchmarks/tree.py).
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from shoal.broadcast.manifest import BaseRef, Encoding, Manifest, ShardEntry
from shoal.broadcast.plan import cheapest_plan
from shoal.broadcast.scores import PeerScores
from shoal.simulation.swarm.spec import RelaySpec, SwarmSpec, Weights, WorkerSpec

MESH_OVERHEAD = 1.083
DRAWS = 2000
"""Choices of relays from which a worker's shares of them are counted."""
MBIT = 1e6 / 8


def digest_of(version: int) -> str:
    return f"{version:064x}"


class VersionPlans:
    """Bytes from a version that is held to one that is wanted, by the plan that a client makes."""

    def __init__(self, spec: Weights) -> None:
        self.spec = spec
        self.fetch_bytes = lru_cache(maxsize=4096)(self._fetch_bytes)

    def _fetch_bytes(self, wanted: int, held: int | None) -> int:
        def load(digest: str) -> Manifest:
            return self._manifest(int(digest, 16))

        held_digest = None if held is None else digest_of(held)
        return cheapest_plan(digest_of(wanted), load, load, lambda digest: digest == held_digest).fetch_bytes

    def _manifest(self, version: int) -> Manifest:
        is_keyframe = version % self.spec.keyframe_every == 0
        full = [_encoding(version, "full", self.spec.full_bytes)] if is_keyframe or not self.spec.delta_bytes else []
        has_delta = version > 0 and self.spec.delta_bytes > 0
        delta = [_encoding(version, "delta", self.spec.delta_bytes)] if has_delta else []
        return Manifest.model_construct(
            run_id="simulation",
            version=version,
            tensors=(),
            weights_digest=digest_of(version),
            encodings=(*full, *delta),
        )


def _encoding(version: int, kind: str, size_bytes: float) -> Encoding:
    shard = ShardEntry.model_construct(digest=digest_of(version), size_bytes=round(size_bytes))
    before = digest_of(version - 1) if version else ""
    base = BaseRef.model_construct(version=version - 1, manifest_digest=before, weights_digest=before)
    return Encoding.model_construct(kind=kind, shards=(shard,), base=base if kind == "delta" else None)


class Broadcast:
    """Seconds per byte of each class of workers, when all of them fetch a version at once."""

    def __init__(self, spec: SwarmSpec) -> None:
        self.plans = VersionPlans(spec.weights)
        self.pools: Sequence[RelaySpec] = spec.relays or (RelaySpec(up_mbit_s=spec.origin.up_mbit_s),)
        shares = [self._shares(group, spec) for group in spec.workers]
        links = [group.down_mbit_s * MBIT for group in spec.workers]
        capacities = [pool.count * pool.up_mbit_s * MBIT for pool in self.pools]
        self.relays_s_per_byte = _relay_bound(spec)
        finished = finish_times([group.count for group in spec.workers], links, shares, capacities)
        self.s_per_byte = [max(one, self.relays_s_per_byte) for one in finished]
        self.has_relays, self.latency_s = bool(spec.relays), spec.network.latency_s

    def seconds(self, group: int, wanted: int, held: int | None) -> float:
        return self.latency_s + self.s_per_byte[group] * self.plans.fetch_bytes(wanted, held)

    def _shares(self, group: WorkerSpec, spec: SwarmSpec) -> list[float]:
        """How a worker of this class spreads its requests: the client's own choice, with the bandwidths that it would measure."""
        names = {f"http://{number}": pool for number, pool in enumerate(self.pools)}
        scores = PeerScores(named=list(names), rng=random.Random(f"relays {group.name}"), clock=lambda: 0.0)
        for url, pool in names.items():
            far = pool.region and group.region and pool.region != group.region
            limit = spec.network.between_regions_mbit_s if far else pool.up_mbit_s
            scores.record_success(url, 1 << 20, (1 << 20) / (min(limit, group.down_mbit_s) * MBIT))
        chosen = [scores.choose(list(names)) for _ in range(DRAWS)]
        weights = [chosen.count(url) * pool.count for url, pool in names.items()]
        return [weight / sum(weights) for weight in weights]


def _relay_bound(spec: SwarmSpec) -> float:
    """Seconds per byte until every relay has a version: no scheme is faster than its links."""
    origin = spec.origin.up_mbit_s * MBIT
    count = sum(pool.count for pool in spec.relays)
    if not count:
        return 1 / origin
    total = origin + sum(pool.count * pool.up_mbit_s * MBIT for pool in spec.relays)
    return MESH_OVERHEAD * max(1 / origin, count / total)


def finish_times(
    counts: Sequence[int], links: Sequence[float], shares: Sequence[Sequence[float]], capacities: Sequence[float]
) -> list[float]:
    """When each class has received one byte per worker, if all begin together and every pool is shared evenly."""
    left, done, now = [1.0] * len(counts), [0.0] * len(counts), 0.0
    active = {number for number, count in enumerate(counts) if count}
    while active:
        rates = fair_rates(counts, links, shares, capacities, active)
        step = min(left[number] / rates[number] for number in active)
        now += step
        for number in list(active):
            left[number] -= step * rates[number]
            if left[number] <= 1e-12:
                done[number] = now
                active.discard(number)
    return done


def fair_rates(
    counts: Sequence[int],
    links: Sequence[float],
    shares: Sequence[Sequence[float]],
    capacities: Sequence[float],
    active: set[int],
) -> dict[int, float]:
    """Rates of one worker of each class: raised together until a link of its own or a pool that it uses is full."""
    rates, growing, free = dict.fromkeys(active, 0.0), set(active), list(capacities)
    while growing:
        demand = [sum(counts[one] * shares[one][pool] for one in growing) for pool in range(len(free))]
        by_pool = [free[pool] / demand[pool] for pool in range(len(free)) if demand[pool] > 0]
        step = min([*by_pool, *(links[one] - rates[one] for one in growing)])
        for one in growing:
            rates[one] += step
        free = [left - step * used for left, used in zip(free, demand, strict=True)]
        full = {pool for pool, left in enumerate(free) if left <= 1e-6 * capacities[pool]}
        blocked = {one for one, pool in product(growing, full) if shares[one][pool] > 0}
        growing -= blocked | {one for one in growing if rates[one] >= links[one] * (1 - 1e-9)}
    return rates
