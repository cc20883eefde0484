"""Whole runs on one host: `shoal up` starts the owner's roles, `shoal demo` a swarm with honest workers and two cheaters.

Every role is a process of its own that speaks HTTP like it would across the world. The demo watches them, shows what happens and
ends with a report; its exit code says whether accuracy, bans and honesty were as promised.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from shoal.config import ShoalConfig, build_config, load_config, to_toml
from shoal.coordinator.ledger import LedgerError, verify_export
from shoal.errors import ShoalError, UnavailableError
from shoal.observe import LiveView, failures, headline, summarise, write_report, write_summary
from shoal.protocol.api import HistoryView, StatusView
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory
from shoal.supervisor import Role, RoleEvent, Supervisor, interrupt_on_termination

RELAYS = 2
CHEATS = ("stale", "rewards")
LOOK_INTERVAL_S = 0.5
FINISH_DEADLINE_S = 120.0
"""How long the last evaluation may take once the last version is published."""


def demo_config(
    settings: Sequence[str] = (), *, steps: int | None = None, async_level: int | None = None, seed: int | None = None
) -> ShoalConfig:
    with as_file(files("shoal").joinpath("demo.toml")) as path:
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
    yield _role(directory, "evaluator", "evaluate", run_file, "--threads", "1")


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


def worker_role(directory: RunDirectory, config: ShoalConfig, name: str, cheat: str = "") -> Role:
    lie = ("--cheat", cheat) if cheat else ()
    root = str(directory.root / "workers" / name)
    arguments = ("work", config.coordinator_url, "--dir", root, "--name", name, "--threads", "1", *lie)
    return _role(directory, name, *arguments, restart=not cheat, essential=False)


def run_owner_roles(directory: RunDirectory, report: Callable[[str], None]) -> None:
    """Supervises the owner's roles until the run is finished or Ctrl-C."""
    config = directory.config()
    report(f"contributors join with: shoal work {config.coordinator_url} --run-key {directory.descriptor().run_key}")
    with interrupt_on_termination(), Supervisor(list(owner_roles(directory, config))) as supervisor:
        _watch(config, supervisor, LiveView(directory.descriptor().run_id))


def run_demo(config: ShoalConfig, *, honest_workers: int, fresh: bool) -> int:
    """Runs or resumes the demo; 0 if it kept every promise."""
    from shoal.runs import initialise

    started, console = time.monotonic(), Console()
    if fresh and config.run.dir.exists():
        shutil.rmtree(config.run.dir)
    console.print("preparing the run (keys, tasks, the bundled policy) …")
    directory = initialise(config)
    cheaters = [f"cheater-{cheat}" for cheat in CHEATS]
    roles = list(owner_roles(directory, config))
    roles += [worker_role(directory, config, f"honest-{number}") for number in range(1, honest_workers + 1)]
    roles += [worker_role(directory, config, name, cheat) for name, cheat in zip(cheaters, CHEATS, strict=True)]
    with interrupt_on_termination(), Supervisor(roles) as supervisor:
        status, history, restarts = _watch(config, supervisor, LiveView("shoal demo"))
        ledger_ok = _ledger_ok(config, directory)
    summary = summarise(
        status,
        history,
        ledger_ok=ledger_ok,
        wall_s=time.monotonic() - started,
        started_cheaters=cheaters,
        role_restarts=restarts,
    )
    broken = failures(summary)
    write_summary(directory.root / "summary.json", summary)
    write_report(
        directory.root / "report.html",
        summary,
        status,
        history,
        title="Shoal demo",
        problems=broken,
        settings_toml=to_toml(config),
    )
    console.print(headline(summary))
    console.print(f"report: {directory.root / 'report.html'}   figures: {directory.root / 'summary.json'}")
    for sentence in broken:
        console.print(f"[red]failed:[/red] {sentence}")
    return 1 if broken else 0


def _watch(config: ShoalConfig, supervisor: Supervisor, view: LiveView) -> tuple[StatusView, HistoryView, int]:
    """Shows the run until its last version is published and evaluated."""
    restarts, last_version_at = 0, None
    with view, CoordinatorClient(config.coordinator_url, None, deadline_s=1.0) as client:
        view.wait("the coordinator is starting")
        while True:
            for event in supervisor.poll():
                restarts += event.kind == "restarted"
                if _noteworthy(event):
                    view.note(event.text, "bad" if event.kind == "given_up" else "warn")
            try:
                status, history = client.status(), client.history()
            except UnavailableError:
                view.wait(f"the coordinator at {config.coordinator_url} does not answer yet")
                continue
            view.update(status, history)
            if any(evaluation.version >= config.run.steps for evaluation in history.evaluations):
                return status, history, restarts
            if status.run_state == "finished":
                last_version_at = last_version_at or time.monotonic()
                if time.monotonic() - last_version_at > FINISH_DEADLINE_S:
                    raise UnavailableError(
                        f"The evaluator did not measure the last version within {FINISH_DEADLINE_S:.0f} s.",
                        hint=f"See {config.run.dir}/logs/evaluator.log.",
                    )
            time.sleep(LOOK_INTERVAL_S)


def _noteworthy(event: RoleEvent) -> bool:
    return event.kind in ("restarted", "given_up") or (event.kind == "exited" and event.exit_code not in (0, None))


def _ledger_ok(config: ShoalConfig, directory: RunDirectory) -> bool:
    try:
        with CoordinatorClient(config.coordinator_url, None, deadline_s=10.0) as client:
            export = client.ledger_export()
        (directory.root / "ledger.jsonl").write_bytes(export)
        verify_export(export.splitlines(), directory.descriptor().coordinator_key)
    except LedgerError:
        return False
    except ShoalError as error:
        raise UnavailableError(f"The ledger could not be read: {error}") from error
    return True


def _role(directory: RunDirectory, name: str, *arguments: str, restart: bool = True, essential: bool = True) -> Role:
    return Role(
        name,
        (sys.executable, "-m", "shoal", *arguments),
        Path(directory.logs / f"{name}.log"),
        {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        restart=restart,
        essential=essential,
    )
