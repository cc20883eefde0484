"""Whole swarms of real processes on free ports, supervised like those of the demo, with a deadline on every wait."""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config import ShoalConfig, build_config
from shoal.coordinator import verify_export
from shoal.coordinator.ledger import Entry
from shoal.coordinator.ledger.verification import verify_ledger
from shoal.errors import UnavailableError
from shoal.host import swarm as host
from shoal.host.supervisor import RoleEvent, Supervisor, log_tail
from shoal.host.threads import Threads
from shoal.owner.create import initialise
from shoal.owner.ledger_check import read_evidence
from shoal.protocol.api import HistoryView, StatusView, WorkerView
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.evidence import RECEIPTS_FILE
from shoal.rundir import RunDirectory

DEADLINE_S = 600.0
"""Only a machine that does nothing else comes this far."""
LOOK_INTERVAL_S = 0.1


def free_ports(count: int) -> int:
    """The first of some neighbouring ports that nobody uses.

    Below those that the kernel gives to outgoing connections: one of them could take the port of a role that restarts.
    """
    for _ in range(100):
        first = random.randrange(10_000, 32_000)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError("no neighbouring ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def small_config(root: Path, *, steps: int, **sections: dict[str, Any]) -> ShoalConfig:
    """The bundled policy with steps of a few seconds of work."""
    ports = free_ports(4)
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "small", "dir": root, "steps": steps, "seed": 5},
        "tasks": {"count": 200, "heldout": 16},
        "rollouts": {"group_size": 8, "tasks_per_slot": 2, "max_prompt_tokens": 64, "max_new_tokens": 40},
        "reward": {"target_lengths": [16], "length_alpha": 0.003},
        "training": {"groups_per_step": 4, "learning_rate": 1e-4, "kl_beta": 0.0, "minibatches": 1},
        "coordinator": {"port": ports, "lease_s": 60, "gone_after_s": 12},
        "broadcast": {"port": ports + 1},
        "trust": {"probation_audits": 2, "stake_tokens": 20_000},
        "evaluation": {"every": 100},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return build_config(tree)


@dataclass
class Swarm:
    config: ShoalConfig
    directory: RunDirectory
    supervisor: Supervisor
    client: CoordinatorClient
    events: list[RoleEvent]

    @property
    def processes(self) -> host.Swarm:
        return host.Swarm(self.directory, self.config, threads=Threads(each=1))

    def add_owner_roles(self, *names: str) -> None:
        for role in self.processes.owner_roles():
            if role.name in names:
                self.supervisor.add(role)

    def add_worker(self, name: str, cheat: str = "", engine: str = "torch") -> None:
        self.supervisor.add(self.processes.worker_role(name, cheat, engine))

    def until(self, what: str, holds: Callable[[StatusView], bool], deadline_s: float = DEADLINE_S) -> StatusView:
        """Looks after the roles until the run is as wanted; says what everybody last said if that does not happen."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            self.events += self.supervisor.poll()
            try:
                status = self.client.status()
            except UnavailableError:
                continue
            if holds(status):
                return status
            time.sleep(LOOK_INTERVAL_S)
        raise AssertionError(f"{what} did not happen within {deadline_s:.0f} s\n{self.last_words()}")

    def last_words(self) -> str:
        logs = sorted(self.directory.logs.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log_tail(log, lines=6)}" for log in logs)

    def history(self) -> HistoryView:
        return self.client.history()

    def ledger(self) -> list[Entry]:
        """Every entry; all of them hold, also against what the workers have kept."""
        lines, descriptor = self.client.ledger_export().splitlines(), self.directory.descriptor()
        kept = [path.parent for path in self.directory.root.parent.rglob(RECEIPTS_FILE)]
        evidence = read_evidence(descriptor.coordinator_key, [], kept)
        result = verify_ledger(lines, descriptor.coordinator_key, run_key=descriptor.run_key, kept=evidence)
        assert not result.findings, result.findings
        assert evidence.receipts, "workers keep receipts"
        return verify_export(lines, descriptor.coordinator_key)[0]

    def kill(self, name: str, number: int) -> None:
        pid = self.supervisor.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)

    def pids(self) -> list[int]:
        found = [self.supervisor.pid(name) for name in self.supervisor.alive]
        return [pid for pid in found if pid is not None]


@contextmanager
def swarm(config: ShoalConfig) -> Iterator[Swarm]:
    directory = initialise(config)
    client = CoordinatorClient(config.coordinator_url, None, deadline_s=2.0)
    with client, Supervisor() as supervisor:
        yield Swarm(config, directory, supervisor, client, [])


def worker_named(status: StatusView, name: str) -> WorkerView | None:
    return next((worker for worker in status.workers if worker.name == name), None)


def group_is_gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False
