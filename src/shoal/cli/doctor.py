"""`shoal doctor`: what this machine has, what is missing, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cli import accelerator
from shoal.cli.extras import MODULES, install_line, missing_modules
from shoal.metrics import Report
from shoal.tasks.sandbox.sandbox import HINT, sandbox_complaint

NEEDED = ("pyarrow", "aiohttp", "starlette", "tokenizers")
"""By every role; what runs or trains a model needs an extra besides."""
USES = {"worker": "generates, validates and evaluates", "train": "makes runs, trains and draws reports"}
OPTIONAL_PROGRAMS = {
    "nginx": "can serve weights as a relay; optional",
}
DEMO_PORTS = (7300, 7301, 7302, 7303)
"""Coordinator, origin, two relays."""
SMALLEST_MEMORY_GB = 4.0
SMALLEST_DISK_GB = 2.0


@dataclass(frozen=True)
class Diagnosis:
    good: bool
    text: str
    fatal: bool = False


def examine(report: Report) -> int:
    """Reports every finding; 1 if something that every role needs is missing."""
    sick = False
    for finding in diagnose():
        report(f"{'ok  ' if finding.good else 'MISS' if finding.fatal else 'note'}  {finding.text}")
        sick = sick or (finding.fatal and not finding.good)
    return int(sick)


def diagnose() -> Iterator[Diagnosis]:
    version = platform.python_version()
    yield Diagnosis(sys.version_info >= (3, 11), f"Python {version} (3.11 or newer is needed)", fatal=True)
    for name in NEEDED:
        yield _package(name)
    for extra in MODULES:
        yield _extra(extra)
    yield Diagnosis(True, f"{os.cpu_count()} cores")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield Diagnosis(
        memory_gb >= SMALLEST_MEMORY_GB, f"{memory_gb:.1f} GB of memory (the demo needs {SMALLEST_MEMORY_GB:g})"
    )
    disk_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Diagnosis(
        disk_gb >= SMALLEST_DISK_GB, f"{disk_gb:.1f} GB of free disk here (the demo needs {SMALLEST_DISK_GB:g})"
    )
    yield Diagnosis(*accelerator.advise(accelerator.look()))
    yield _sandbox()
    for program, purpose in OPTIONAL_PROGRAMS.items():
        found = shutil.which(program) is not None
        yield Diagnosis(found, f"{program} {'is here' if found else 'is not installed'}: it {purpose}")
    for port in DEMO_PORTS:
        yield _port(port)


def _package(name: str) -> Diagnosis:
    if importlib.util.find_spec(name) is None:
        return Diagnosis(False, f"{name} is not installed: install Shoal again", fatal=True)
    return Diagnosis(True, f"{name} {importlib.metadata.version(name)}")


def _extra(extra: str) -> Diagnosis:
    missing = missing_modules(extra)
    if missing:
        return Diagnosis(
            False, f"what {USES[extra]} needs {', '.join(missing)}: type {install_line(extra)}; relays need none of it"
        )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in MODULES[extra])
    return Diagnosis(True, f"what {USES[extra]}: {versions}")


def _sandbox() -> Diagnosis:
    """Runs a program in it: an installed bubblewrap may still be forbidden to make namespaces."""
    complaint = sandbox_complaint()
    if complaint:
        return Diagnosis(
            False, f"no sandbox for model-written code: {complaint.rstrip('.')} (only code tasks need it). {HINT}"
        )
    return Diagnosis(True, "the sandbox for model-written code ran a first program")


def _port(port: int) -> Diagnosis:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Diagnosis(False, f"port {port} is taken: choose others with --coordinator.port and --broadcast.port")
    return Diagnosis(True, f"port {port} is free")
