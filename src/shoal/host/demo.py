"""Whole runs on one host: `shoal up` starts the owner's roles, `shoal demo` a swarm with honest workers and two cheaters.

Every role is a process of its own that speaks HTTP like it would across the world. The demo watches them, shows what happens and
ends with a report; its exit code says whether accuracy, bans and honesty were as promised.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from shoal.config import ShoalConfig, build_config, load_config, to_toml
from shoal.coordinator.ledger import LedgerError, verify_export
from shoal.coordinator.server import bind
from shoal.errors import ShoalError, UnavailableError
from shoal.files import write_atomic
from shoal.host.supervisor import HOPELESS_EXIT_CODES, Role, RoleEvent, Supervisor, interrupt_on_termination, log_tail
from shoal.locks import hold
from shoal.metrics import Report
from shoal.observe import (
    LiveView,
    Summary,
    ViewExtra,
    failures,
    headline,
    render_report,
    startup_notice,
    summarise,
    write_picture,
    write_summary,
)
from shoal.protocol.api import HistoryView, StatusView
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

RELAYS = 2
CHEATS = ("stale", "rewards")
LOCK_FILE = "supervisor.lock"
WRITTEN_BY_A_RUN = (
    *("run.toml", "descriptor.json", "keys", "origin", "coordinator", "trainer", "validator*", "evaluator*"),
    *("relay-*", "workers", "logs", "events", "create.lock", "summary.json", "report.html", "view.svg", "ledger.jsonl"),
)
INTERRUPTED = 130
LOOK_INTERVAL_S = 0.5
LOOK_DEADLINE_S = 1.0
FINISH_DEADLINE_S = 120.0
"""How long the demo's last evaluation may take once the last version is published."""
FAREWELL_S = 5.0
"""Long enough for every worker that is waiting for a lease, or uploading, to hear that the run is over."""


def demo_config(
    settings: Sequence[str] = (), *, steps: int | None = None, async_level: int | None = None, seed: int | None = None
) -> ShoalConfig:
    with as_file(files("shoal.host").joinpath("demo.toml")) as path:
        tree = load_config(path, settings).model_dump()
    chosen = {("run", "steps"): steps, ("training", "async_level"): async_level, ("run", "seed"): seed}
    for (section, name), value in chosen.items():
        if value is not None:
            tree[section][name] = value
    return build_config(tree)


def owner_roles(directory: RunDirectory, config: ShoalConfig) -> Iterator[Role]:
    """Coordinator, trainer with origin, relays, validator and evaluator, in the order in which they should start."""
    run_file = str(directory.run_file)
    yield _role(directory, "coordinator", "coordinator", run_file)
    yield _role(directory, "trainer", "train", run_file, "--threads", "1")
    yield from relay_roles(directory, config)
    yield _role(directory, "validator", "validate", run_file, "--threads", "1")
    yield _role(directory, "evaluator", "evaluator", run_file, "--threads", "1")


def relay_roles(directory: RunDirectory, config: ShoalConfig) -> Iterator[Role]:
    """Each relay follows the origin and the relays before it."""
    upstreams = [config.origin_url]
    for number in range(1, RELAYS + 1):
        port = config.broadcast.port + number
        parents = [word for url in reversed(upstreams) for word in ("--upstream", url)]
        yield _role(
            directory,
            f"relay-{number}",
            *("relay", *parents, "--port", str(port), "--host", config.broadcast.host),
            *("--dir", str(directory.root / f"relay-{number}"), "--coordinator", config.coordinator_url),
            essential=False,
        )
        upstreams.append(f"http://{config.broadcast.host}:{port}")


def worker_role(
    directory: RunDirectory, config: ShoalConfig, name: str, cheat: str = "", engine: str = "torch"
) -> Role:
    root = str(directory.root / "workers" / name)
    arguments = ("work", config.coordinator_url, "--dir", root, "--name", name, "--threads", "1", "--engine", engine)
    return _role(directory, name, *arguments, *(("--cheat", cheat) if cheat else ()), essential=False)


def run_owner_roles(directory: RunDirectory, report: Report, *, workers: int = 0) -> None:
    """Supervises the owner's roles, and workers of its own, until the run is finished or Ctrl-C."""
    config, descriptor = directory.config(), directory.descriptor()
    own = [f"local-{number}" for number in range(1, workers + 1)]
    roles = [*owner_roles(directory, config), *(worker_role(directory, config, name) for name in own)]
    with _alone(config), interrupt_on_termination():
        check_ports(config)
        report(f"contributors join with: shoal work {config.coordinator_url} --run-key {descriptor.run_key}")
        client = CoordinatorClient(config.coordinator_url, None, deadline_s=LOOK_DEADLINE_S)
        with client, Supervisor(roles) as supervisor:
            with LiveView() as view:
                # Strangers may come to a run whose own workers all ended.
                watch = Watch(config, supervisor, view, client, local_workers=own, finish_deadline_s=None)
                status, history = watch.run()
            if status.run_state != "drained":
                ledger_ok = _ledger_ok(config, directory)
                summary = summarise(status, history, ledger_ok=ledger_ok, role_restarts=watch.restarts)
                _write_outcome(directory, config, summary, status, history, "shoal run")
                report(headline(summary))
            report(f"telling the workers that the run is over, for {FAREWELL_S:.0f} s")
            time.sleep(FAREWELL_S)
    if status.run_state == "drained":
        report(
            f"{descriptor.run_id} is drained at version {status.newest_version}."
            f" Go on with `shoal run resume {directory.run_file}` and the same command."
        )
        return
    report(f"{descriptor.run_id} is finished: {status.newest_version} versions in {directory.root}")
    report(_where(directory))


def check_ports(config: ShoalConfig) -> None:
    """Finds a taken port before any role is started, so that it is one sentence instead of a role that fails in its log."""
    bind(config.coordinator.host, config.coordinator.port, "coordinator.port").close()
    for number in range(RELAYS + 1):
        bind(config.broadcast.host, config.broadcast.port + number, "broadcast.port").close()


def start_over(root: Path) -> None:
    """Removes what a run has written, and nothing else that may lie in its directory."""
    for name in WRITTEN_BY_A_RUN:
        for path in root.glob(name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _alone(config: ShoalConfig) -> AbstractContextManager[None]:
    message = f"Another shoal command already runs {config.run.dir}."
    return hold(config.run.dir / LOCK_FILE, message, hint="Stop it, or choose another directory with --run.dir.")


def run_demo(config: ShoalConfig, *, honest_workers: int, fresh: bool) -> int:
    """Runs or resumes the demo; 0 if it kept every promise."""
    console = Console()
    try:
        with _alone(config), interrupt_on_termination():
            return _run_demo(config, console, honest_workers, fresh)
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here; --fresh starts over.")
        return INTERRUPTED


def _run_demo(config: ShoalConfig, console: Console, honest_workers: int, fresh: bool) -> int:
    from shoal.owner.create import initialise

    started = time.monotonic()
    check_ports(config)
    if fresh:
        start_over(config.run.dir)
    if RunDirectory(config.run.dir).is_initialised:
        console.print(f"going on with the run in {config.run.dir}; --fresh starts over")
    else:
        console.print("preparing the run (keys, tasks, the bundled policy) …")
    directory = initialise(config)
    honest = [f"honest-{number}" for number in range(1, honest_workers + 1)]
    cheaters = [f"cheater-{cheat}" for cheat in CHEATS]
    roles = list(owner_roles(directory, config))
    roles += [worker_role(directory, config, name) for name in honest]
    roles += [worker_role(directory, config, name, cheat) for name, cheat in zip(cheaters, CHEATS, strict=True)]
    client = CoordinatorClient(config.coordinator_url, None, deadline_s=LOOK_DEADLINE_S)
    with client, Supervisor(roles) as supervisor:
        with LiveView("shoal demo") as view:
            watch = Watch(config, supervisor, view, client, honest, [*honest, *cheaters])
            status, history = watch.run()
        ledger_ok = _ledger_ok(config, directory)
    summary = summarise(
        status,
        history,
        ledger_ok=ledger_ok,
        wall_s=time.monotonic() - started,
        started_cheaters=cheaters,
        role_restarts=watch.restarts,
    )
    broken = failures(summary)
    _write_outcome(directory, config, summary, status, history, "shoal demo", broken)
    console.print(headline(summary))
    console.print(_where(directory))
    for sentence in broken:
        console.print(f"[red]failed:[/red] {sentence}")
    return 1 if broken else 0


def _write_outcome(
    directory: RunDirectory,
    config: ShoalConfig,
    summary: Summary,
    status: StatusView,
    history: HistoryView,
    title: str,
    problems: Sequence[str] = (),
) -> None:
    """What is left to look at when a run is over: figures, report and a picture of the last view."""
    root = directory.root
    write_picture(root / "view.svg", status, history, ViewExtra(title), columns=110)
    write_summary(root / "summary.json", summary)
    name = title[:1].upper() + title[1:]
    page = render_report(summary, status, history, title=name, problems=problems, settings_toml=to_toml(config))
    write_atomic(root / "report.html", page.encode())


def _where(directory: RunDirectory) -> str:
    return f"report: {directory.root / 'report.html'}   figures: {directory.root / 'summary.json'}"


@dataclass
class Watch:
    """Shows a run until its last version is measured; ends with one sentence when that cannot happen any more."""

    config: ShoalConfig
    supervisor: Supervisor
    view: LiveView
    client: CoordinatorClient
    workers: Sequence[str] = ()
    """Roles of which one must live; none where strangers do the work."""
    local_workers: Sequence[str] = ()
    finish_deadline_s: float | None = FINISH_DEADLINE_S
    """None waits for the last evaluation as long as its evaluator lives: that of a large model takes its time."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    restarts: int = 0
    _finished_at: float | None = None
    _ended: list[str] = field(default_factory=list)

    def run(self) -> tuple[StatusView, HistoryView]:
        self.view.wait("the coordinator is starting")
        while True:
            self._look_after_roles()
            try:
                status, history = self.client.status(), self.client.history()
            except UnavailableError:
                self.view.wait(f"the coordinator at {self.config.coordinator_url} does not answer yet")
                continue  # the client has waited
            self.view.update(status, history)
            if notice := startup_notice(status, self.local_workers, self._ended):
                self.view.wait(notice)
            if any(evaluation.version >= self.config.run.steps for evaluation in history.evaluations):
                return status, history
            if status.run_state == "drained" and "trainer" not in self.supervisor.alive:
                return status, history
            self._check_hope(status)
            self.sleep(LOOK_INTERVAL_S)

    def _look_after_roles(self) -> None:
        for event in self.supervisor.poll():
            self.restarts += event.kind == "restarted"
            if event.kind == "given_up":
                self._ended.append(event.role)
                self.view.ended(event.role, self._reason(event))
            elif _noteworthy(event):
                self.view.note(event.text, "warn")

    def _reason(self, event: RoleEvent) -> str:
        """The last line of the role's log, which says why it ended; how it ended where there is none."""
        log = self.config.run.dir / "logs" / f"{event.role}.log"
        last = log_tail(log, lines=1).strip() if log.exists() else ""
        return last.removeprefix("shoal: ") or event.detail

    def _check_hope(self, status: StatusView) -> None:
        logs = self.config.run.dir / "logs"
        if status.run_state != "finished":
            if self.workers and not set(self.workers) & set(self.supervisor.alive):
                raise UnavailableError("No honest worker is left.", hint=f"See {logs / self.workers[0]}.log.")
            return
        if self._finished_at is None:
            self._finished_at = self.clock()
        if self.finish_deadline_s is not None and self.clock() - self._finished_at > self.finish_deadline_s:
            raise UnavailableError(
                f"The evaluator did not measure the last version within {self.finish_deadline_s:.0f} s.",
                hint=f"See {logs / 'evaluator.log'}.",
            )


def _noteworthy(event: RoleEvent) -> bool:
    """Restarts and the exits that lead to them."""
    final = event.exit_code in (0, None, *HOPELESS_EXIT_CODES)
    return event.kind == "restarted" or (event.kind == "exited" and not final)


def _ledger_ok(config: ShoalConfig, directory: RunDirectory) -> bool:
    try:
        with CoordinatorClient(config.coordinator_url, None, deadline_s=10.0) as client:
            export = client.ledger_export()
        write_atomic(directory.root / "ledger.jsonl", export)
        verify_export(export.splitlines(), directory.descriptor().coordinator_key)
    except LedgerError:
        return False
    except ShoalError as error:
        raise UnavailableError(f"The ledger could not be read: {error}") from error
    return True


def _role(directory: RunDirectory, name: str, *arguments: str, essential: bool = True) -> Role:
    return Role(
        name,
        (sys.executable, "-m", "shoal", *arguments),
        Path(directory.logs / f"{name}.log"),
        {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        essential=essential,
    )
