"""`shoal demo`: a swarm on this machine with honest workers and two cheaters, one thread each; with `--tools`, one of episodes.

It shows what happens and ends with a report; its exit code says whether accuracy, bans and honesty were as promised.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files

from rich.console import Console

from shoal.config import ShoalConfig, build_config, load_config
from shoal.host.outcome import save_ledger, write_outcome
from shoal.host.supervisor import Supervisor, interrupt_on_termination
from shoal.host.swarm import Swarm, only_supervisor
from shoal.host.threads import Threads
from shoal.host.watch import STATUS_DEADLINE_S, Watch
from shoal.observe import LiveView, failures, headline, summarise, unused_tools
from shoal.observe.summary import END_AT_LEAST, START_AT_MOST
from shoal.observe.words import plural
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

CHEATS = ("stale", "rewards")
TOOL_CHEATS = ("forged-tool", "hidden-turn")
TOOLS_START_AT_MOST, TOOLS_END_AT_LEAST = 0.45, 0.80
RELAYS = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Promise:
    """Who cheats in a swarm of this kind, and what its held-out accuracy has to do."""

    cheats: Sequence[str]
    start_at_most: float
    end_at_least: float | None
    """Without it any accuracy will do."""
    needs_tools: bool = False


def demo_config(
    settings: Sequence[str] = (),
    *,
    steps: int | None = None,
    async_level: int | None = None,
    seed: int | None = None,
    tools: bool = False,
) -> ShoalConfig:
    with as_file(files("shoal.host").joinpath("demo_tools.toml" if tools else "demo.toml")) as path:
        tree = load_config(path, settings).model_dump()
    chosen = {("run", "steps"): steps, ("training", "async_level"): async_level, ("run", "seed"): seed}
    for (section, name), value in chosen.items():
        if value is not None:
            tree[section][name] = value
    return build_config(tree)


def accuracy_goal(config: ShoalConfig) -> float | None:
    """What the demo promises at its own length; a shorter one promises no accuracy."""
    return promised_end(config) if config.run.steps >= demo_config(tools=has_tools(config)).run.steps else None


def promised_end(config: ShoalConfig) -> float:
    return TOOLS_END_AT_LEAST if has_tools(config) else END_AT_LEAST


def has_tools(config: ShoalConfig) -> bool:
    return bool(config.tasks.environment)


def demo_promise(config: ShoalConfig) -> Promise:
    goal = accuracy_goal(config)
    if has_tools(config):
        return Promise(TOOL_CHEATS, TOOLS_START_AT_MOST, goal, needs_tools=goal is not None)
    return Promise(CHEATS, START_AT_MOST, goal)


def run_demo(config: ShoalConfig, *, honest_workers: int, fresh: bool, promise: Promise | None = None) -> int:
    """Runs or resumes the demo, or another swarm with cheaters; 0 if it kept every promise."""
    console = Console()
    try:
        with only_supervisor(config), interrupt_on_termination():
            return _run_demo(config, console, honest_workers, fresh, promise or demo_promise(config))
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here; --fresh starts over.")
        return INTERRUPTED


def demo_swarm(config: ShoalConfig, honest_workers: int) -> Swarm:
    honest = [f"honest-{number}" for number in range(1, honest_workers + 1)]
    return Swarm(RunDirectory(config.run.dir), config, honest, RELAYS, Threads(each=config.run.threads or 1))


def _run_demo(config: ShoalConfig, console: Console, honest_workers: int, fresh: bool, promise: Promise) -> int:
    started = time.monotonic()
    swarm = demo_swarm(config, honest_workers)
    swarm.check_ports()
    _prepare(swarm.directory, config, console, fresh)
    cheaters = {f"cheater-{cheat}": cheat for cheat in promise.cheats}
    roles = [*swarm.owner_roles(), *swarm.worker_roles()]
    roles += [swarm.worker_role(name, cheat) for name, cheat in cheaters.items()]
    url = config.coordinator.url_here
    with CoordinatorClient(url, None, deadline_s=STATUS_DEADLINE_S) as client, Supervisor(roles) as supervisor:
        with LiveView("shoal demo") as view:
            watch = Watch(config, supervisor, view, client, swarm.workers, needs_workers=True)
            status, history = watch.run()
        ledger_ok = save_ledger(swarm.directory, url)
    summary = summarise(
        status,
        history,
        ledger_ok=ledger_ok,
        wall_s=time.monotonic() - started,
        started_cheaters=list(cheaters),
        role_restarts=watch.restarts,
    )
    broken = failures(summary, start_at_most=promise.start_at_most, end_at_least=promise.end_at_least)
    if promise.needs_tools and (unused := unused_tools(summary)):
        broken.append(unused)
    written = write_outcome(swarm.directory, config, summary, status, history, "shoal demo", broken)
    console.print(headline(summary))
    console.print(written)
    if promise.end_at_least is None:
        console.print(f"No accuracy goal is checked for a run of {plural(config.run.steps, 'step')}.")
    for sentence in broken:
        console.print(f"[red]failed:[/red] {sentence}")
    return 1 if broken else 0


def _prepare(directory: RunDirectory, config: ShoalConfig, console: Console, fresh: bool) -> None:
    from shoal.owner.create import initialise

    if fresh:
        directory.remove_run()
    if directory.is_initialised:
        console.print(f"going on with the run in {directory.root}; --fresh starts over")
    else:
        console.print("preparing the run (keys, tasks, the bundled policy) …")
    initialise(config, console.print)
