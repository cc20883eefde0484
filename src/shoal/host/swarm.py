"""`shoal up`: the owner's roles of a run as processes of this host, with workers of its own if the owner likes.

Every role is a process that speaks HTTP like it would across the world, and has its log in the run directory.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from shoal.config import ShoalConfig
from shoal.coordinator.server import bind
from shoal.host.outcome import save_ledger, write_outcome
from shoal.host.supervisor import Role, Supervisor, interrupt_on_termination
from shoal.host.threads import WORKERS, Threads, usable_cores
from shoal.host.watch import LEAVE_DEADLINE_S, STATUS_DEADLINE_S, Watch
from shoal.locks import hold
from shoal.metrics import Report
from shoal.observe import LiveView, headline, summarise
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

RELAYS = 2
EVERY_VERIFIER = "all"
"""Owner and worker are the same person: whatever code the run names may be imported."""


@dataclass(frozen=True)
class Swarm:
    """Which processes serve a run on this host."""

    directory: RunDirectory
    config: ShoalConfig
    workers: Sequence[str] = ()
    """Names of the honest workers."""
    relays: int = RELAYS
    threads: Threads = field(default_factory=Threads)
    cores: int = field(default_factory=usable_cores)
    auto_rewind: bool = False
    """Whether the trainer may return the run to its last checkpoint."""

    def owner_roles(self) -> Iterator[Role]:
        """Coordinator, trainer with origin, relays, validator and evaluator, in the order in which they should start."""
        run_file = str(self.directory.run_file)
        yield self.role("coordinator", "coordinator", run_file)
        rewinds = ("--auto-rewind",) if self.auto_rewind else ()
        yield self.role("trainer", "train", run_file, *self._threads("trainer"), *rewinds)
        yield from self.relay_roles()
        yield self.role("validator", "validate", run_file, *self._threads("validator"))
        yield self.role("evaluator", "evaluator", run_file, *self._threads("evaluator"))

    def relay_roles(self) -> Iterator[Role]:
        """Each relay follows the origin and the relays before it."""
        broadcast = self.config.broadcast
        upstreams = [broadcast.url_here]
        for number in range(1, self.relays + 1):
            port = broadcast.port + number
            parents = [word for url in reversed(upstreams) for word in ("--upstream", url)]
            yield self.role(
                f"relay-{number}",
                *("relay", *parents, "--port", str(port), "--host", broadcast.host),
                *("--dir", str(self.directory.root / f"relay-{number}")),
                *("--coordinator", self.config.coordinator.url_here),
                *("--public-url", broadcast.public_url_at(port)),
                essential=False,
            )
            upstreams.append(broadcast.url_here_at(port))

    def worker_roles(self) -> Iterator[Role]:
        for name in self.workers:
            yield self.worker_role(name)

    def worker_role(self, name: str, cheat: str = "", engine: str = "torch") -> Role:
        root = str(self.directory.root / "workers" / name)
        return self.role(
            name,
            *("work", self.config.coordinator.url_here, "--dir", root, "--name", name, "--engine", engine),
            *("--verifier", EVERY_VERIFIER, *self._threads(WORKERS)),
            *(("--cheat", cheat) if cheat else ()),
            essential=False,
        )

    def check_ports(self) -> None:
        """Finds a taken port before any role is started, so that it is one sentence instead of a role that fails in its log."""
        coordinator, broadcast = self.config.coordinator, self.config.broadcast
        bind(coordinator.host, coordinator.port, "coordinator.port").close()
        for number in range(self.relays + 1):
            bind(broadcast.host, broadcast.port + number, "broadcast.port").close()

    def _threads(self, role: str) -> tuple[str, str]:
        count = self.threads.of(role, others=2 + len(self.workers), cores=self.cores)
        return "--threads", str(count)

    def role(self, name: str, *arguments: str, essential: bool = True) -> Role:
        return Role(
            name,
            (sys.executable, "-m", "shoal", *arguments),
            self.directory.log_file(name),
            {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            essential=essential,
        )


def run_swarm(
    directory: RunDirectory,
    report: Report,
    *,
    workers: int = 0,
    relays: int = RELAYS,
    threads: Threads | None = None,
    auto_rewind: bool = False,
) -> None:
    """Supervises the owner's roles, and workers of its own, until the run is finished or Ctrl-C."""
    config, descriptor = directory.config(), directory.descriptor()
    own = [f"local-{number}" for number in range(1, workers + 1)]
    swarm = Swarm(directory, config, own, relays, threads or Threads(config.run.threads), auto_rewind=auto_rewind)
    with only_supervisor(config), interrupt_on_termination():
        swarm.check_ports()
        client = CoordinatorClient(config.coordinator.url_here, None, deadline_s=STATUS_DEADLINE_S)
        with client, Supervisor([*swarm.owner_roles(), *swarm.worker_roles()]) as supervisor:
            with LiveView() as view:
                watch = Watch(config, supervisor, view, client, own, finish_deadline_s=None)
                status, history = watch.run()
            if status.run_state != "drained":
                ledger_ok = save_ledger(directory, config.coordinator.url_here)
                summary = summarise(status, history, ledger_ok=ledger_ok, role_restarts=watch.restarts)
                written = write_outcome(directory, config, summary, status, history, "shoal run")
                report(headline(summary))
            report(f"waiting until the workers have heard that the run is over, for up to {LEAVE_DEADLINE_S:.0f} s")
            watch.wait_for_workers()
    if status.run_state == "drained":
        report(
            f"{descriptor.run_id} is drained at version {status.newest_version}."
            f" Go on with `shoal run resume {directory.run_file}` and the same command."
        )
        return
    report(f"{descriptor.run_id} is finished: {status.newest_version} versions in {directory.root}")
    report(written)


def only_supervisor(config: ShoalConfig) -> AbstractContextManager[None]:
    """One command at a time runs a directory."""
    message = f"Another shoal command already runs {config.run.dir}."
    lock = RunDirectory(config.run.dir).supervisor_lock
    return hold(lock, message, hint="Stop it, or choose another directory with --run.dir.")
