"""Two machines on one: network namespaces that are joined by a cable of their own and see nothing else."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

OWNER_HOST = {4: "10.231.7.1", 6: "fd00:7::1"}
STRANGER_HOST = {4: "10.231.7.2", 6: "fd00:7::2"}
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 to make network namespaces"
)


@dataclass(frozen=True)
class Cable:
    """The names of both namespaces."""

    owner: str
    stranger: str

    def inside(self, namespace: str) -> tuple[str, ...]:
        """Words before a command that make it run there."""
        return "ip", "netns", "exec", namespace


@contextmanager
def cable() -> Iterator[Cable]:
    ends = Cable(f"owner-{os.getpid()}", f"stranger-{os.getpid()}")
    try:
        for name in (ends.owner, ends.stranger):
            _ip("netns", "add", name)
        _ip("link", "add", "end0", "netns", ends.owner, "type", "veth", "peer", "name", "end0", "netns", ends.stranger)
        for name, hosts in ((ends.owner, OWNER_HOST), (ends.stranger, STRANGER_HOST)):
            _ip("-n", name, "addr", "add", f"{hosts[4]}/24", "dev", "end0")
            _ip("-n", name, "-6", "addr", "add", f"{hosts[6]}/64", "dev", "end0", "nodad")
            for device in ("lo", "end0"):
                _ip("-n", name, "link", "set", device, "up")
        yield ends
    finally:
        for name in (ends.owner, ends.stranger):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
