"""Which files of a publisher or relay stay: those of the head, short ways to it, and what somebody still reads.

A delta version needs its base, and that base's base, back to a full one. Deltas before that stay while all of them together are
small, so that a client whose first download took long catches up without a second one. A version that left the head and is still
being read stays for hours, as long as all such versions take no more disk than what is needed. A client writes the next version
over the file of one that it keeps no more (`SpareFile`).
"""

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path

from shoal.broadcast.manifest import MAX_CHAIN, Manifest
from shoal.broadcast.store import ShardStore, Trash, disk_error, make_directory
from shoal.errors import IntegrityError
from shoal.files import WEIGHTS_FILE
from shoal.metrics.units import size

# A model over a slow link; a reader that never finishes must not fill the disk.
MAX_HOLD_S = 6 * 3600
HISTORY_SHARE = 0.5
"""Of the model that older deltas may take."""
LEASING = frozenset({"btrfs", "ext4", "f2fs", "tmpfs", "xfs"})
"""File systems of this machine alone that refuse a lease of a file that is only mapped. Those that lie over others do not: the
root of a container is one (overlay)."""


def needed_manifests(roots: Iterable[str], load: Callable[[str], Manifest]) -> dict[str, Manifest]:
    """The manifests of these digests, of every base that is needed to rebuild them, and of what they adapt."""
    needed: dict[str, Manifest] = {}
    for root in roots:
        before, waiting = len(needed), [root]
        while waiting:
            digest = waiting.pop()
            if digest in needed:
                continue
            if len(needed) - before > MAX_CHAIN:
                raise IntegrityError(f"Manifest {root[:12]}… needs more than {MAX_CHAIN} others.")
            needed[digest] = load(digest)
            waiting += reversed(needed[digest].needs)
    return needed


def delta_history(
    store: ShardStore, needed: dict[str, Manifest], load: Callable[[str], Manifest]
) -> dict[str, Manifest]:
    """Versions before those that are needed, newest first, whose deltas are here and together still small."""
    history: dict[str, Manifest] = {}
    newest_first = sorted(needed.values(), key=lambda manifest: -manifest.version)
    left_bytes = HISTORY_SHARE * max((manifest.size_bytes for manifest in newest_first), default=0)
    bases = (_delta_base(manifest) for manifest in newest_first)
    digest = next((base for base in bases if base is not None and base not in needed), None)
    while digest is not None and digest not in needed and store.recover("manifests", digest):
        manifest = load(digest)
        delta = manifest.encoding("delta")
        left_bytes -= delta.size_bytes if delta is not None else 0
        if delta is None or left_bytes < 0 or len(history) >= MAX_CHAIN:
            break
        history[digest] = manifest
        digest = _delta_base(manifest)
    return history


def prune(
    store: ShardStore,
    needed: dict[str, Manifest],
    keep_shards: set[str],
    unneeded_since: MutableMapping[str, float],
    load: Callable[[str], Manifest],
    *,
    grace_s: float,
    now: float,
) -> int:
    """Delete files that stay for no reason, once they have been unneeded and unread for the grace period."""
    history = delta_history(store, needed, load)
    keep = keep_shards | {shard.digest for manifest in needed.values() for shard in manifest.shards}
    for manifest in history.values():
        delta = manifest.encoding("delta")
        keep |= {shard.digest for shard in delta.shards} if delta is not None else set()
    loose_shards = store.held("shards") - keep
    loose_manifests = store.held("manifests") - needed.keys() - history.keys()
    loose = loose_shards | loose_manifests
    for digest in loose:
        unneeded_since.setdefault(digest, now)
    for digest in unneeded_since.keys() - loose:
        del unneeded_since[digest]
    budget = sum(shard.size_bytes for manifest in needed.values() for shard in manifest.shards)
    versions = {digest: load(digest) for digest in loose_manifests if store.recover("manifests", digest)} | history
    read = _being_read(store, versions, loose, grace_s, budget)
    due = {digest for digest in loose if now - unneeded_since[digest] >= (MAX_HOLD_S if digest in read else grace_s)}
    for digest in due:
        del unneeded_since[digest]
    store.access.forget(due)
    return store.remove("shards", loose_shards & due) + store.remove("manifests", loose_manifests & due)


def lack_of_space(store: ShardStore, sizes: Mapping[str, int]) -> str:
    """What to tell the operator if these shards will not fit, even when all others are gone; empty if they will."""
    held = store.held("shards")
    missing_bytes = sum(size for digest, size in sizes.items() if digest not in held)
    free_bytes = shutil.disk_usage(store.root).free
    if missing_bytes <= free_bytes:
        return ""
    for digest in held - sizes.keys():
        with contextlib.suppress(FileNotFoundError):
            free_bytes += store.path("shards", digest).stat().st_size
    if missing_bytes <= free_bytes:
        return ""
    return (
        f"The versions of this run need {size(missing_bytes)} more in {store.root}, where {size(free_bytes)} are "
        "or will be free. Free some space, or name another directory."
    )


def _being_read(
    store: ShardStore, versions: dict[str, Manifest], loose: set[str], within_s: float, budget_bytes: int
) -> set[str]:
    """The loose files of versions of which some file was asked for lately, newest version first, up to the budget."""
    read: set[str] = set()
    for digest, manifest in sorted(versions.items(), key=lambda item: -item[1].version):
        sizes = {shard.digest: shard.size_bytes for shard in manifest.shards if shard.digest in loose}
        files = {digest, *sizes} & loose
        if store.access.active(files, within_s) and sum(sizes.values()) <= budget_bytes:
            read |= files
            budget_bytes -= sum(sizes.values())
    return read


def _delta_base(manifest: Manifest) -> str | None:
    delta = manifest.encoding("delta")
    return delta.base.manifest_digest if delta is not None and delta.base is not None else None


def least_used_first(versions: Iterable[Path], uses: Mapping[str, int]) -> list[Path]:
    """Directories of versions; `uses` numbers the last use of those that this process used. Times on disk are coarse, and the clock
    may be set back: they only order what earlier processes left."""
    return sorted(versions, key=lambda path: (uses.get(path.name, -1), path.stat().st_mtime))


class SpareFile:
    """The file of a version that is kept no more; the next version is written over it, so that it needs no new pages.

    On a virtual machine whose host takes free memory back, a new page costs ten times as much as a copy into one that is there.
    A reader of the old file keeps its bytes: one that is open or mapped anywhere is deleted instead.
    """

    def __init__(self, directory: Path, trash: Trash) -> None:
        self.directory = directory
        self._trash = trash

    def keep(self, version: Path) -> None:
        """Take the directory of a version instead of the one before."""
        self.drop()
        make_directory(self.directory.parent)
        try:
            os.replace(version, self.directory)
        except OSError as error:
            raise disk_error(error, version) from error

    def give(self, target: Path) -> None:
        """Move the file to a place where there is none yet, if it may be overwritten; drop it if not."""
        file = self.directory / WEIGHTS_FILE
        if not target.exists() and is_unused(file):
            try:
                os.replace(file, target)
            except OSError as error:
                raise disk_error(error, target) from error
        self.drop()

    def drop(self) -> None:
        if self.directory.exists():
            self._trash.drop(self.directory)


def is_unused(path: Path) -> bool:
    """Whether nobody has the file open or mapped, or by another name; False where the system does not tell."""
    if not hasattr(fcntl, "F_SETLEASE"):  # Linux has it, macOS does not
        return False
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if _file_system(file) not in LEASING:
            return False
        # Opening a leased file sends its holder a signal; the usual one would end this process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # refused if the file is open elsewhere
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return os.fstat(file).st_nlink == 1
    except OSError:
        return False
    finally:
        os.close(file)


def _file_system(file: int) -> str:
    """The kind of the one that holds an open file; empty if the system does not say."""
    facts = Path(f"/proc/self/fdinfo/{file}").read_text().split()
    mount = facts[facts.index("mnt_id:") + 1]
    lines = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    # After six facts and any number of others, a dash.
    return next((line[line.index("-", 6) + 1] for line in lines if line[0] == mount), "")
