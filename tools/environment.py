"""Makes a virtual environment and shows how far it is: `python tools/environment.py VENV CONSTRAINTS STAGE...`

Each STAGE is one `pip install`: a title, a colon, and the arguments. On a terminal one line is kept up to date; elsewhere a line is
printed when something changes, at most every few seconds. pip's whole output goes to VENV/setup.log. Needs nothing but Python.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

NEEDED = (3, 11)
REFRESH_S = 0.5
QUIET_S = 10.0
"""Without a terminal: seconds between two lines while nothing changes."""
INSTALLING = "Installing collected packages: "


class Stage:
    """What is known about one `pip install` from its output and from the files that it writes."""

    def __init__(self, site: Path, scratch: Path) -> None:
        self.site = site
        self.scratch = scratch
        self.collected: set[str] = set()
        self.installing = 0
        self.installed_before = self._installed()
        self.activity = "starting"
        self.file = self.size = ""
        """What is being downloaded, and its size as pip names it."""

    def read(self, line: str) -> None:
        """One line of pip's output."""
        if match := re.match(r"\s*Collecting ([\w.\-\[\]]+)", line):
            self.collected.add(match.group(1).lower())
            self.activity, self.size = f"resolving {match.group(1)}", ""
        elif match := re.match(r"\s*Downloading (?:\S*/)?(\S+?)(?:\.metadata)? \((.+)\)", line):
            self.file, self.size = match.groups()
            self.activity = f"downloading {' '.join(self.file.split('-')[:2]).removesuffix('.whl')}"
        elif line.startswith(INSTALLING):
            self.installing = line.count(",") + 1
        elif match := re.match(r"\s*((?:Preparing|Building) [^(:.]+)", line):
            self.activity, self.size = match.group(1).strip().lower(), ""

    def __str__(self) -> str:
        if self.installing:
            done = min(self._installed() - self.installed_before, self.installing)
            how = "compiling, all" if done == self.installing else f"installing, {max(done, 0)} of"
            return f"{how} {self.installing} packages"
        far = f" ({self._arrived()} of {self.size})" if self.size.endswith(("MB", "GB")) else ""
        return f"{self.activity}{far}, {len(self.collected)} packages so far"

    def _arrived(self) -> str:
        """Size of the file so far; it may vanish while it is looked at."""
        size_bytes = 0
        for path in self.scratch.rglob(self.file):
            with contextlib.suppress(FileNotFoundError):
                size_bytes = max(size_bytes, path.stat().st_size)
        return f"{size_bytes / 1e6:.0f} MB"

    def _installed(self) -> int:
        return sum(1 for _ in self.site.glob("*.dist-info"))


class Line:
    """The one line that is kept up to date."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.is_terminal = sys.stdout.isatty()
        self.started = time.monotonic()
        self.shown_at = float("-inf")

    def show(self, text: str, *, is_last: bool = False) -> None:
        now = time.monotonic()
        line = f"{self.prefix}: {text} · {_minutes(now - self.started)}"
        if self.is_terminal:
            columns = os.get_terminal_size().columns or 80
            print(f"\r\x1b[K{line[: columns - 1]}", end="\n" if is_last else "", flush=True)
        elif is_last or now - self.shown_at >= QUIET_S:
            print(line, flush=True)
            self.shown_at = now


def main(arguments: Sequence[str]) -> int:
    if sys.version_info < NEEDED:
        print(f"Shoal needs Python {NEEDED[0]}.{NEEDED[1]} or newer; this is {sys.version.split()[0]}.")
        print("Name another one: make setup PYTHON=python3.12")
        return 1
    directory, constraints, stages = Path(arguments[0]), arguments[1], list(arguments[2:])
    count = len(stages) + 1
    line = Line(f"[1/{count}] {directory}")
    if not (directory / "bin" / "python").exists():
        line.show("making the environment")
        venv.create(directory, with_pip=True)
    line.show("ready", is_last=True)
    for number, stage in enumerate(stages, start=2):
        title, _, given = stage.partition(":")
        code = install(directory, constraints, shlex.split(given), Line(f"[{number}/{count}] {title}"))
        if code:
            return code
    return 0


def install(directory: Path, constraints: str, given: Sequence[str], line: Line) -> int:
    """Runs pip and reports what it does; a failure ends with pip's own last lines."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch, (directory / "setup.log").open("a") as log:
        command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        command += ["--disable-pip-version-check", "--constraint", constraints, *given]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"TMPDIR": scratch}
        )
        state = Stage(next((directory / "lib").glob("python*/site-packages")), Path(scratch))
        tail: list[str] = []
        reader = threading.Thread(target=_follow, args=(process, state, log, tail))
        reader.start()
        while reader.is_alive():
            line.show(str(state))
            reader.join(REFRESH_S)
        if process.wait() == 0:
            line.show(f"{state.installing} installed" if state.installing else "nothing to install", is_last=True)
        else:
            line.show(f"pip failed; {directory}/setup.log has everything", is_last=True)
            print("".join(tail[-20:]))
        return process.returncode


def _follow(process: "subprocess.Popen[str]", state: Stage, log: TextIO, tail: list[str]) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        log.write(text)
        tail.append(text)
        state.read(text)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
