"""`shoal logs`: what the roles of a run have printed, and what they print while it is watched."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import ConfigError
from shoal.rundir import RunDirectory

POLL_S = 0.3


def logs(
    role: Annotated[
        str, typer.Argument(help="Such as trainer, validator, relay-1 or local-1; without it all roles of the run.")
    ] = "",
    where: Annotated[
        str | None, typer.Argument(help="Run file or run directory; without it the directory of run.dir.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each role to begin with.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is printed from now on.")] = False,
) -> None:
    """Show the logs of a run's roles on this host, and follow them."""
    from shoal.owner.control import find_directory

    if where is None and (Path(role).exists() or role.endswith(".toml") or "://" in role):
        role, where = "", role
    directory = find_directory(where)
    tails = [Tail(path, lines) for path in find_logs(directory, role)]
    width = max(len(tail.name) for tail in tails) if len(tails) > 1 else 0
    show(tails, width, follow=follow)


def find_logs(directory: RunDirectory, role: str) -> list[Path]:
    known = sorted(directory.logs.glob("*.log"))
    if not known:
        raise ConfigError(f"{directory.root} has no logs.", hint="`shoal up` writes them; roles started by hand print.")
    chosen = [path for path in known if role in ("", path.stem)]
    if not chosen:
        names = ", ".join(path.stem for path in known)
        raise ConfigError(f"There is no log of {role!r} in {directory.root}.", hint=f"There are {names}.")
    return chosen


class Tail:
    """A log from its last lines on; one that is cut or replaced is read from its beginning."""

    def __init__(self, path: Path, lines: int) -> None:
        self.name, self._path = path.stem, path
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        self._position = len(whole)
        self._first = whole.decode(errors="replace").splitlines()[-lines:] if lines else []

    def read(self) -> Iterator[str]:
        """Whole lines since the last call."""
        yield from self._first
        self._first = []
        if self._path.stat().st_size < self._position:
            self._position = 0
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        yield from whole.decode(errors="replace").splitlines()


def show(
    tails: list[Tail],
    width: int,
    *,
    follow: bool,
    echo: Callable[[str], None] = typer.echo,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints until there is nothing left, or for ever; several logs have the name of the role before each line."""
    while True:
        for tail in tails:
            for line in tail.read():
                echo(f"{tail.name:{width}}  {line}" if width else line)
        if not follow:
            return
        sleep(POLL_S)
