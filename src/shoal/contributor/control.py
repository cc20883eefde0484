"""How another terminal talks to a running worker: two small files in the worker's directory.

`control.json` holds the wish, written by `shoal work pause|resume|finish`; `status.json` what the worker does, written by itself.
Both are replaced atomically and belong to the user of the worker; a wish of anybody else is not heard. The lock of the directory
says whether a worker lives, so a status that a killed one left behind misleads nobody. A pause outlasts a restart.
"""

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from shoal.errors import ShoalError, UnavailableError
from shoal.files import write_atomic

Wish = Literal["work", "pause", "finish"]
MAX_BYTES = 1 << 16
ANSWER_DEADLINE_S = 20.0
LOOK_INTERVAL_S = 0.1


class NoWorkerError(ShoalError):
    """Nobody is there to hear it."""

    code = "no_worker"
    permanent = True


@dataclass(frozen=True)
class WorkerStatus:
    pid: int = 0
    state: Literal["joining", "working", "resting", "finishing"] = "joining"
    reason: str = ""
    """Why it rests."""
    activity: str = ""
    run_id: str = ""
    submissions: int = 0
    tokens: int = 0
    """Both since the worker started."""
    account: str = ""
    """Trust state and credit, as the coordinator said last."""
    heard: Wish = "work"
    """The wish that this status already follows."""

    def __str__(self) -> str:
        doing = self.reason if self.state == "resting" and self.reason else self.activity
        done = f"{self.submissions} submissions with {self.tokens:,} tokens since it started"
        run = f" for {self.run_id}" if self.run_id else ""
        return "; ".join(filter(None, [f"{self.state}{run}: {doing}" if doing else self.state, done, self.account]))


class Control:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._wish, self._status, self._lock = root / "control.json", root / "status.json", root / "lock"

    def wish(self) -> Wish:
        """What the user wants; anything that is not this user's own file, whole and well-formed, counts as no wish."""
        found = _read_own(self._wish).get("wish")
        return found if found in get_args(Wish) else "work"  # type: ignore[return-value]

    def set_wish(self, wish: Wish) -> None:
        if wish == "work":
            self._wish.unlink(missing_ok=True)
        else:
            write_atomic(self._wish, json.dumps({"wish": wish}).encode(), mode=0o600)

    def begin(self) -> None:
        """A worker starts: an old wish to finish is over, a pause goes on."""
        if self.wish() == "finish":
            self.set_wish("work")
        self._status.unlink(missing_ok=True)

    def end(self) -> None:
        """A worker has ended in order."""
        self.begin()

    def tell(self, status: WorkerStatus) -> None:
        write_atomic(self._status, json.dumps(asdict(status)).encode(), mode=0o600, sync=False)

    def status(self) -> WorkerStatus:
        """Of the worker that lives; NoWorkerError if there is none."""
        status = self._status_if_running()
        if status is None:
            raise NoWorkerError(f"No worker runs in {self.root}.", hint="Name its directory with --dir.")
        return status

    def _status_if_running(self) -> WorkerStatus | None:
        """Asks for the lock once, so that a worker that ends between two looks is one that has ended."""
        if not self.is_running():
            return None
        found = _read_own(self._status)
        try:
            return WorkerStatus(**{field.name: found[field.name] for field in fields(WorkerStatus)})
        except KeyError:  # it has just begun
            return WorkerStatus()

    def is_running(self) -> bool:
        try:
            handle = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def ask(
        self,
        wish: Wish,
        *,
        deadline_s: float = ANSWER_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> WorkerStatus | None:
        """Tells the worker, and waits until it has heard; None if it has ended meanwhile, which is how `finish` may end."""
        self.status()
        self.set_wish(wish)
        until = clock() + deadline_s
        while (status := self._status_if_running()) is not None:
            if status.heard == wish:
                return status
            if clock() >= until:
                raise UnavailableError(
                    f"The worker in {self.root} has not answered within {deadline_s:.0f} s; it is {status.state}.",
                    hint="Your wish is kept: it is heard when the worker looks next.",
                )
            sleep(LOOK_INTERVAL_S)
        return None


def _read_own(path: Path) -> dict[str, Any]:
    """A small JSON object in a plain file of this user; empty for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            return {}
        found = json.loads(os.read(handle, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(handle)
    return found if isinstance(found, dict) else {}
