"""The cheapest way from what a client has to the version it wants: a pure decision over manifests.

From the wanted version the chain of deltas is followed back; a version on it that is held, or that is published in full, is a
candidate to start from. The candidate with the fewest bytes left to fetch wins; what an earlier fetch has staged is not fetched
again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.broadcast.manifest import MAX_CHAIN, Encoding, EncodingKind, Manifest
from shoal.errors import IntegrityError, UnavailableError


@dataclass(frozen=True)
class Plan:
    """Begin with `start` (from disk, or in full from relays), then apply the deltas of `steps` in order."""

    start: str
    fetch_full: bool
    steps: tuple[str, ...]
    size_bytes: int
    staged_bytes: int = 0
    """Of these bytes, those that are here already."""

    @property
    def fetch_bytes(self) -> int:
        return self.size_bytes - self.staged_bytes

    @property
    def encodings(self) -> set[tuple[str, EncodingKind]]:
        """What it fetches: manifest digests and encodings."""
        deltas: set[tuple[str, EncodingKind]] = {(digest, "delta") for digest in self.steps}
        return deltas | {(self.start, "full")} if self.fetch_full else deltas


def cheapest_plan(
    wanted: str,
    load: Callable[[str], Manifest],
    peek: Callable[[str], Manifest],
    held: Callable[[str], bool],
    staged: Callable[[str, Encoding], int] = lambda digest, encoding: 0,
) -> Plan:
    """`load` waits for a manifest that is needed, `peek` does not wait for one that would only be cheaper."""
    best: Plan | None = None
    digest, chain = wanted, Plan(wanted, False, (), 0)
    manifest = load(wanted)
    for _ in range(MAX_CHAIN):
        if held(digest):
            return chain if best is None or chain.fetch_bytes <= best.fetch_bytes else best
        full, delta = manifest.encoding("full"), manifest.encoding("delta")
        if full is not None:
            candidate = replace(
                chain,
                fetch_full=True,
                size_bytes=chain.size_bytes + full.size_bytes,
                staged_bytes=chain.staged_bytes + staged(digest, full),
            )
            best = candidate if best is None or candidate.fetch_bytes < best.fetch_bytes else best
        if delta is None or delta.base is None:
            break
        chain = Plan(
            delta.base.manifest_digest,
            False,
            (digest, *chain.steps),
            chain.size_bytes + delta.size_bytes,
            chain.staged_bytes + staged(digest, delta),
        )
        if best is not None and chain.fetch_bytes >= best.fetch_bytes:
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
