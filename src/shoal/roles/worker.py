"""A worker as a process: joins a run by its address, says what that costs, and works until the run ends."""

import errno
import os
import platform
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.contributor import Control, Limits, LimitWatch
from shoal.contributor.conditions import Machine
from shoal.contributor.priority import be_nice, take_cpus
from shoal.errors import ConfigError, RefusedError, UnavailableError
from shoal.files import CONFIG_FILE, remove_all_leftovers
from shoal.identity import Keypair
from shoal.locks import hold
from shoal.metrics import Report, ReportingEventLog, serve_metrics
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.roles.authority import trust_authority
from shoal.roles.joining import joined_descriptor
from shoal.roles.process import COORDINATOR_OUTAGE_S, check_engine, keep_what_is_loaded, use_threads
from shoal.roles.welcome import describe_model, describe_scoring, explain_run, explain_weights

if TYPE_CHECKING:
    from shoal.joined import JoinedRun
    from shoal.worker import Worker

FIRST_BAN_PAUSE_S = 15.0
LAST_BAN_PAUSE_S = 300.0
LOCK_WAIT_S = 1.0
"""`shoal work status` touches the lock for a moment."""


@dataclass(frozen=True)
class Share:
    """How much of a machine its contributor gives, and when."""

    limits: Limits = field(default_factory=Limits)
    cpus: int = 0
    """0: all of them."""
    is_nice: bool = False

    def take(self) -> None:
        """Before anything is loaded; what this machine cannot keep is refused."""
        Machine().check(self.limits)
        if self.cpus:
            take_cpus(self.cpus)
        if self.is_nice:
            be_nice()


def work(
    url: str,
    report: Report,
    *,
    root: Path,
    key_file: Path | None,
    run_key: str | None,
    name: str,
    threads: int,
    engine: str = "torch",
    own_verifiers: Collection[str] | None = (),
    authority: Path | None = None,
    cheat: str | None = None,
    metrics_port: int | None = None,
    share: Share | None = None,
) -> None:
    """Refuses what cannot work before anybody is asked; then joins, and works until the run ends."""
    key_path = key_file or root / "worker.key"
    if os.path.lexists(key_path):
        Keypair.load(key_path)
    check_engine(engine)
    check_name(name)
    kind = _worker_kind(cheat) if cheat else None
    check_directory(root)
    share, busy = share or Share(), f"Another worker uses {root}."
    share.take()
    with hold(root / "lock", busy, hint="Give this one its own directory with --dir.", wait_s=LOCK_WAIT_S):
        remove_all_leftovers(root)
        control = Control(root)
        control.begin()
        watch = LimitWatch(share.limits, control, Machine().look, report)
        if not watch.wait("waiting to join"):
            control.end()
            return
        if authority is not None:
            trust_authority(authority, root / "trusted.pem")
        descriptor = joined_descriptor(url, run_key, root, report)
        is_new = not key_path.exists()
        keypair = Keypair.load_or_create(key_path)
        made = ", made just now: it is your account and your credit, keep it" if is_new else ""
        report(f"your key is {key_path}{made}")
        explain_run(descriptor, report)
        report(f"your page: {url.rstrip('/')}/worker/{keypair.public}")
        use_threads(threads or share.cpus)
        from shoal.joined import join_run
        from shoal.policy.engines import choose_numerics, devices_here
        from shoal.policy.memory import limit_memory

        limit_memory(share.limits.memory_bytes)

        numerics = choose_numerics(engine, descriptor.numerics_classes, devices_here())
        metrics = ReportingEventLog(root / "events.jsonl", report, reported=("relay_lied",))
        if metrics_port is not None:
            report(f"metrics for Prometheus: http://127.0.0.1:{serve_metrics(metrics, 'worker', metrics_port)}/metrics")

        def connect() -> CoordinatorClient:
            return CoordinatorClient.for_run(descriptor, keypair, url, deadline_s=COORDINATOR_OUTAGE_S, on_wait=report)

        client = connect()
        client.relays()  # any answer brings the server's time, by which a head has expired or not
        join = partial(
            join_run,
            descriptor,
            root / "cache",
            metrics=metrics,
            own_verifiers=own_verifiers,
            clock=client.server_time,
            report=report,
        )
        run = join()
        report(f"model: {describe_model(run.model_files / CONFIG_FILE)}")
        report(f"scoring: {describe_scoring(run.workload.tasks.train, descriptor.reward, descriptor.environments)}")
        explain_weights(run.weights, descriptor.async_level + 2, root, report)
        name = name or platform.node()[:60] or "worker"
        kind, ready_engine = kind or _worker_kind(None), run.make_engine(engine, numerics)

        def new_worker(run: "JoinedRun") -> "Worker":
            return kind(
                run,
                connect(),
                ready_engine,
                name=name,
                outbox=root / "outbox",
                evidence=root,
                metrics=metrics,
                report=report,
                limits=watch,
            )

        keep_what_is_loaded()
        while _is_banned(new_worker(run)):
            wait_for_unban(connect(), report, sleep=partial(watch.sleep, activity="waiting until the ban is lifted"))
            run = join()  # a worker that ended has closed its connections to relays
        control.end()


def _is_banned(worker: "Worker") -> bool:
    """Works until the run is over (False) or the key is banned (True)."""
    try:
        worker.run()
    except RefusedError as refusal:
        if refusal.code != "banned":
            raise
        worker.report(f"{refusal} Waiting until the ban is lifted; Ctrl-C ends.")
        return True
    return False


def wait_for_unban(client: CoordinatorClient, report: Report, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Asks now and then. What the worker holds in memory stays there: loading it again may cost minutes."""
    pause_s = FIRST_BAN_PAUSE_S
    while True:
        sleep(pause_s)
        try:
            client.heartbeat(api.HeartbeatBody(activity="waiting for the ban to be lifted"))
        except RefusedError as refusal:
            if refusal.code == "banned":
                pause_s = min(2 * pause_s, LAST_BAN_PAUSE_S)
                continue
        except UnavailableError:
            continue
        report("the ban is lifted, joining again")
        return


def check_directory(root: Path) -> None:
    """Refuses a place where nothing can be kept before anybody is asked."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(root, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(
            f"{root} cannot be used: {problem.lower()}.", hint="Name a directory that you may write to with --dir."
        )


def check_name(name: str) -> None:
    try:
        api.HeartbeatBody(activity=name)  # the same kind of text as a name
    except ValueError:
        raise ConfigError("A worker's name is one line of up to 200 letters.", hint="Give another --name.") from None


def _worker_kind(cheat: str | None) -> "type[Worker]":
    from shoal.worker import CHEATERS, Worker

    if cheat is None:
        return Worker
    if cheat not in CHEATERS:
        raise ConfigError(f"There is no cheat {cheat!r}.", hint=f"Known: {', '.join(CHEATERS)}.")
    return CHEATERS[cheat]
