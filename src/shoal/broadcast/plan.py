"""The cheapest way from what a client has to the version it wants: a pure decision over manifests.

From the wanted version the chain of deltas is followed back; a version on it that is held, or that is published in full, is a
candidate to start from. The candidate with the fewest bytes to fetch wins.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.broadcast.manifest import MAX_CHAIN, Manifest
from shoal.errors import IntegrityError, UnavailableError


@dataclass(frozen=True)
class Plan:
    """Begin with `start` (from disk, or in full from relays), then apply the deltas of `steps` in order."""

    start: str
    fetch_full: bool
    steps: tuple[str, ...]
    size_bytes: int


def cheapest_plan(
    wanted: str, load: Callable[[str], Manifest], peek: Callable[[str], Manifest], held: Callable[[str], bool]
) -> Plan:
    """`load` waits for a manifest that is needed, `peek` does not wait for one that would only be cheaper."""
    best: Plan | None = None
    digest, cost = wanted, 0
    steps: tuple[str, ...] = ()
    manifest = load(wanted)
    for _ in range(MAX_CHAIN):
        if held(digest):
            candidate = Plan(digest, False, steps, cost)
            return candidate if best is None or cost <= best.size_bytes else best
        full, delta = manifest.encoding("full"), manifest.encoding("delta")
        if full is not None and (best is None or cost + full.size_bytes < best.size_bytes):
            best = Plan(digest, True, steps, cost + full.size_bytes)
        if delta is None or delta.base is None:
            break
        steps = (digest, *steps)
        cost += delta.size_bytes
        if best is not None and cost >= best.size_bytes:
            break
        digest = delta.base.manifest_digest
        try:
            manifest = _load_base(load if best is None else peek, manifest, digest)
        except UnavailableError:
            # An old base that nobody keeps any more is no reason to fail while there is another way.
            if best is None:
                raise
            break
    if best is None:
        raise IntegrityError(f"Version {load(wanted).version} cannot be rebuilt from anything that is published.")
    return best


def _load_base(load: Callable[[str], Manifest], manifest: Manifest, digest: str) -> Manifest:
    base = load(digest)
    delta = manifest.encoding("delta")
    assert delta is not None
    assert delta.base is not None
    if (base.version, base.weights_digest) != (delta.base.version, delta.base.weights_digest):
        raise IntegrityError(f"The delta of version {manifest.version} does not belong to the base that it names.")
    return base
