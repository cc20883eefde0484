"""A PostgreSQL server of its own for slow tests and benchmarks, in a directory that is thrown away."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
ACCOUNT = "postgres"


def is_installed() -> bool:
    return bool(PROGRAMS) or shutil.which("pg_ctl") is not None


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a running server that only local processes reach; it will not run as root."""
    root = Path(tempfile.mkdtemp(prefix="shoal-postgres-"))
    as_account = []
    if os.getuid() == 0:
        shutil.chown(root, ACCOUNT, ACCOUNT)
        as_account = ["runuser", "-u", ACCOUNT, "--"]

    def run(program: str, *arguments: str) -> None:
        path = str(PROGRAMS[-1] / program) if PROGRAMS else program
        log = subprocess.DEVNULL  # a server that inherits a pipe keeps it open
        subprocess.run([*as_account, path, *arguments], check=True, stdout=log, stderr=log, cwd="/", timeout=300)

    data = str(root / "data")
    try:
        run("initdb", "-D", data, "-U", ACCOUNT, "-A", "trust", "--no-locale", "-E", "UTF8")
        options = f"-k {root} -c listen_addresses='' -c max_connections=60"
        run("pg_ctl", "-D", data, "-w", "-t", "200", "-o", options, "-l", str(root / "log"), "start")
        try:
            yield f"postgresql:///postgres?host={root}&user={ACCOUNT}"
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(root, ignore_errors=True)
