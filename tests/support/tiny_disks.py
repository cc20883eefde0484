"""A disk of a few megabytes of its own, to be filled to the last byte."""

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TinyDisk:
    root: Path

    @property
    def _ballast(self) -> Path:
        return self.root / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        self._ballast.unlink()


@contextmanager
def mounted(place: Path, megabytes: int = 3) -> Iterator[TinyDisk | None]:
    """None if this account may not mount."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield TinyDisk(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
