"""What must stay: every file on the way to a kept version, and whatever somebody is still fetching.

A delta version needs its base, and that base's base, back to a full one; `needed_manifests` walks there. `prune` deletes the
rest, but a version whose files were asked for within the grace period stays until its reader is done.
"""

from collections.abc import Callable, Iterable, MutableMapping

from shoal.broadcast.manifest import Manifest
from shoal.broadcast.store import Store

MAX_CHAIN = 4096
# A reader that never finishes must not fill the disk.
MAX_HOLD_S = 1800


def needed_manifests(roots: Iterable[str], load: Callable[[str], Manifest]) -> dict[str, Manifest]:
    """The manifests of these digests and of every base that is needed to rebuild them."""
    needed: dict[str, Manifest] = {}
    queue = list(roots)
    while queue and len(needed) < MAX_CHAIN:
        digest = queue.pop()
        if digest in needed:
            continue
        manifest = needed[digest] = load(digest)
        delta = manifest.form("delta")
        if delta is not None and delta.base is not None and manifest.form("full") is None:
            queue.append(delta.base.manifest_digest)
    return needed


def prune(
    store: Store,
    needed: dict[str, Manifest],
    keep_shards: set[str],
    dropped_at: MutableMapping[str, float],
    *,
    grace_s: float,
    now: float,
) -> int:
    """Delete files that no needed version uses, once they have been unneeded and unread for the grace period."""
    keep = keep_shards | {shard.digest for manifest in needed.values() for shard in manifest.shards}
    loose_shards = store.held("shards") - keep
    loose_manifests = store.held("manifests") - needed.keys()
    loose = loose_shards | loose_manifests
    for digest in loose:
        dropped_at.setdefault(digest, now)
    for digest in dropped_at.keys() - loose:
        del dropped_at[digest]
    wait_s = MAX_HOLD_S if store.access.active(loose, grace_s) else grace_s
    due = {digest for digest in loose if now - dropped_at[digest] >= wait_s}
    for digest in due:
        del dropped_at[digest]
    store.access.forget(due)
    return store.remove("shards", loose_shards & due) + store.remove("manifests", loose_manifests & due)
