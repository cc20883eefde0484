"""A swarm under fire: `shoal up`, a second validator, strangers and a cheater, all behind a faulty network, killed at random.

Which role is killed and when follows from a seed. Kills are SIGKILL; the supervisor is among the targets and takes its roles
with it. When the last kill is done the swarm gets the time to finish; then `invariants` looks at what it left behind.
"""

import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from end_to_end.faults import FaultRates, FaultyProxy
from end_to_end.swarm import free_ports, small_config
from shoal.config import ShoalConfig, to_toml
from shoal.errors import UnavailableError
from shoal.host.supervisor import RestartPolicy, Role, RoleEvent, Supervisor
from shoal.owner.create import initialise
from shoal.protocol.api import StatusView
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

MARK = "SHOAL_CHAOS_MARK"
"""Environment variable by which a process of the swarm is recognised, whatever its parent is now."""
HONEST = ("honest-1", "honest-2", "honest-3")
CHEATER = "cheater-rewards"
OWNED = ("coordinator", "trainer", "relay-1", "relay-2", "validator", "evaluator")
"""Roles that `shoal up` starts, by the name of their log."""
WEIGHTS = {
    "coordinator": 17,
    "relay-1": 13,
    "relay-2": 10,
    "trainer": 10,
    "validator": 8,
    "validator-2": 6,
    **dict.fromkeys(HONEST, 8),
    "evaluator": 3,
    "up": 4,
}
"""How often each is drawn: more often what starts quickly, or the swarm would do nothing but start."""
PATIENT = RestartPolicy(first_pause_s=0.3, last_pause_s=3.0, max_fast_failures=1000)
"""An owner and contributors who start again whatever was killed."""
APPEAR_DEADLINE_S = 25.0
LARGEST_LEAD = 0.15
"""Kills may be ahead of the steps by this share, in bursts that leave nobody time to start; then they wait for work to be done."""
CATCH_UP_S = 20.0
LOOK_INTERVAL_S = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    steps: int = 20
    kills: int = 100
    mean_pause_s: float = 3.3
    seed: int = 1
    faults: FaultRates = field(default_factory=FaultRates)
    deadline_s: float = 2400.0


@dataclass
class Outcome:
    plan: Plan
    directory: RunDirectory
    temporary: Path
    """What the processes used as their directory for temporary files."""
    mark: str
    killed: Counter[str] = field(default_factory=Counter)
    first_version: int = 0
    last_version: int = 0
    """The newest when the kills began and when they ended."""
    restarts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    finished: bool = False
    survivors: list[str] = field(default_factory=list)
    """Processes that outlived their supervisor."""

    @property
    def kills(self) -> int:
        return sum(self.killed.values())


def run_chaos(root: Path, plan: Plan, say: Say = lambda text: None) -> Outcome:
    """Plays the plan; returns when the swarm has finished and was stopped, or at the deadline."""
    started = time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        config = chaos_config(root, plan)
        targets = {
            "coordinator": f"http://127.0.0.1:{config.coordinator.port}",
            "origin": f"http://127.0.0.1:{config.broadcast.port}",
        }
        ports = {"coordinator": config.coordinator_url, "origin": config.origin_url}
        proxies = [
            stack.enter_context(
                FaultyProxy(target, plan.faults, seed=plan.seed, port=int(ports[name].rsplit(":", 1)[1]))
            )
            for name, target in targets.items()
        ]
        outcome = Outcome(plan, initialise(config), root / "tmp", secrets.token_hex(8))
        outcome.temporary.mkdir()
        supervisor = stack.enter_context(Supervisor(roles(outcome, config), policy=PATIENT))
        client = stack.enter_context(CoordinatorClient(targets["coordinator"], None, deadline_s=0.5))
        Storm(outcome, supervisor, client, say).rage()
    for proxy in proxies:
        outcome.faults += proxy.counts
    outcome.survivors = processes_of(outcome.mark)
    outcome.wall_s = time.monotonic() - started
    return outcome


def chaos_config(root: Path, plan: Plan) -> ShoalConfig:
    """Everybody reaches coordinator and origin through a proxy, the owner's roles too."""
    proxies = free_ports(2)
    return small_config(
        root / "run",
        steps=plan.steps,
        training={"groups_per_step": 4, "checkpoint_every": 3},
        coordinator={"public_url": f"http://127.0.0.1:{proxies}", "lease_s": 30, "gone_after_s": 15},
        broadcast={"public_url": f"http://127.0.0.1:{proxies + 1}"},
        validation={"claim_s": 15, "max_tries": 50},
        trust={"probation_audits": 4, "stake_tokens": 20_000},
        evaluation={"every": 100},
    )


def roles(outcome: Outcome, config: ShoalConfig) -> list[Role]:
    directory = outcome.directory
    home = directory.root.parent
    run_file = home / "chaos.toml"
    run_file.write_text(to_toml(config))

    def role(name: str, *arguments: object) -> Role:
        environment = {
            MARK: outcome.mark,
            "TMPDIR": str(outcome.temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "160",
        }
        command = (sys.executable, "-m", "shoal", *map(str, arguments))
        return Role(name, command, home / "logs" / f"{name}.log", environment, essential=False)

    def stranger(name: str, *options: str) -> Role:
        return role(
            name, "work", config.coordinator_url, "--dir", home / name, "--name", name, "--threads", 1, *options
        )

    return [
        role("up", "up", run_file),
        role("validator-2", "validate", run_file, "--threads", 1),
        *(stranger(name) for name in HONEST),
        stranger(CHEATER, "--cheat", "rewards"),
    ]


@dataclass
class Storm:
    outcome: Outcome
    supervisor: Supervisor
    client: CoordinatorClient
    say: Say
    _heard: int = 0

    def rage(self) -> None:
        plan = self.outcome.plan
        dice = random.Random(plan.seed)
        until = time.monotonic() + plan.deadline_s
        self._until(until, lambda status: status.newest_version >= 0)
        self.outcome.first_version = self._version()
        for number in range(plan.kills):
            target = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self._pause(dice.uniform(0, 2 * plan.mean_pause_s), number / plan.kills)
            if time.monotonic() >= until:
                break
            self._kill(target)
        self.outcome.last_version = self._version()
        self.say(f"all {self.outcome.kills} kills are done")
        self.outcome.finished = self._until(until, lambda status: False, ended=True)

    def _pause(self, seconds: float, share: float) -> None:
        """Cut short when the swarm is so fast that it would finish before the last kill, drawn out when it gets nothing done."""
        now = time.monotonic()
        while (lead := share - self._progress()) >= 0 and time.monotonic() < now + seconds + (
            CATCH_UP_S if lead > LARGEST_LEAD else 0
        ):
            self._look()
            time.sleep(LOOK_INTERVAL_S)

    def _progress(self) -> float:
        """Share of the steps that are done."""
        return self._version() / (self.outcome.plan.steps - 1)

    def _version(self) -> int:
        """The newest, as last heard."""
        status = self._status()
        if status is not None:
            self._heard = status.newest_version
        return self._heard

    def _until(self, until: float, holds: Callable[[StatusView], bool], *, ended: bool = False) -> bool:
        """Waits for a state of the run, or for the end of `shoal up`, which comes with the last version."""
        while time.monotonic() < until:
            self._look()
            if ended and "up" not in self.supervisor.alive:
                return True
            status = self._status()
            if status is not None and holds(status):
                return True
            time.sleep(LOOK_INTERVAL_S)
        return False

    def _status(self) -> StatusView | None:
        try:
            return self.client.status()
        except UnavailableError:
            return None

    def _look(self) -> None:
        for event in self.supervisor.poll():
            self.outcome.restarts += event.kind == "restarted"
            if _unexpected(event):
                self.say(event.text)

    def _kill(self, name: str) -> None:
        """Kills this role as soon as it lives; another one if it does not come back, such as a relay that was marked as gone."""
        until = time.monotonic() + APPEAR_DEADLINE_S
        while (pid := self._pid(name)) is None and time.monotonic() < until:
            self._look()
            time.sleep(LOOK_INTERVAL_S)
        if pid is None:
            self.say(f"{name} is not there to be killed")
            name = next(other for other in (*HONEST, "validator-2", "up") if self._pid(other) is not None)
            pid = self._pid(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.outcome.killed[name] += 1
        status = self._status()
        where = f"step {status.step}, version {status.newest_version}" if status else "the coordinator is away"
        self.say(f"kill {self.outcome.kills}: {name} ({where})")

    def _pid(self, name: str) -> int | None:
        if name not in OWNED:
            return self.supervisor.pid(name)
        up = self.supervisor.pid("up")
        return None if up is None else dict(owned_processes(up)).get(name)


def _unexpected(event: RoleEvent) -> bool:
    return event.kind == "failed" or (event.kind == "exited" and event.exit_code not in (0, -signal.SIGKILL))


def owned_processes(supervisor_pid: int) -> Iterator[tuple[str, int]]:
    """Name and pid of the roles of `shoal up`."""
    commands = {"coordinator": "coordinator", "train": "trainer", "validate": "validator", "evaluator": "evaluator"}
    for pid in _children(supervisor_pid):
        words = _words(pid, "cmdline")
        if "shoal" not in words[:-1] or "tether" in " ".join(words):
            continue
        command = words[words.index("shoal") + 1]
        if command == "relay":
            yield Path(words[words.index("--dir") + 1]).name, pid
        elif command in commands:
            yield commands[command], pid


def _children(pid: int) -> list[int]:
    try:
        return [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def processes_of(mark: str) -> list[str]:
    """Every process of the swarm that still lives."""
    own = os.getpid()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != own]
    return [" ".join(_words(pid, "cmdline")) for pid in pids if f"{MARK}={mark}" in _words(pid, "environ")]
