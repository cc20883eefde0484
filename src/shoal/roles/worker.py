"""A worker as a process: joins a run by its address, says what that costs, and works until the run ends."""

import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.files import CONFIG_FILE, remove_all_leftovers
from shoal.identity import Keypair
from shoal.locks import hold
from shoal.metrics import Report, ReportingEventLog
from shoal.protocol.client import CoordinatorClient
from shoal.roles.joining import joined_descriptor
from shoal.roles.process import OUTAGE_S, use_threads
from shoal.roles.welcome import describe_model, describe_scoring, explain_run, explain_weights, trust_authority

if TYPE_CHECKING:
    from shoal.worker import Worker


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
) -> None:
    key_path = key_file or root / "worker.key"
    if os.path.lexists(key_path):
        Keypair.load(key_path)  # a key that cannot be used is refused before anybody is waited for
    with hold(root / "lock", f"Another worker uses {root}.", hint="Give this one its own directory with --dir."):
        remove_all_leftovers(root)
        if authority is not None:
            trust_authority(authority, root / "trusted.pem")
        descriptor = joined_descriptor(url, run_key, root, report)
        is_new = not key_path.exists()
        keypair = Keypair.load_or_create(key_path)
        made = ", made just now: it is your account and your credit, keep it" if is_new else ""
        report(f"your key is {key_path}{made}")
        explain_run(descriptor, report)
        use_threads(threads)
        from shoal.joined import join_run
        from shoal.policy.engines import choose_numerics, devices_here

        numerics = choose_numerics(engine, descriptor.numerics_classes, devices_here())
        metrics = ReportingEventLog(root / "events.jsonl", report, reported=("relay_lied",))
        client = CoordinatorClient.for_run(descriptor, keypair, url, deadline_s=OUTAGE_S, on_wait=report)
        client.relays()  # any answer brings the server's time, by which a head has expired or not
        run = join_run(
            descriptor, root / "cache", metrics=metrics, own_verifiers=own_verifiers, clock=client.server_time
        )
        report(f"model: {describe_model(run.model_files / CONFIG_FILE)}")
        report(f"scoring: {describe_scoring(run.workload.tasks.train, descriptor.reward)}")
        explain_weights(run.weights, descriptor.async_level + 2, root, report)
        name = name or platform.node()[:60] or "worker"
        kind, ready_engine = _worker_kind(cheat), run.make_engine(engine, numerics)
        kind(run, client, ready_engine, name=name, metrics=metrics, report=report).run()


def _worker_kind(cheat: str | None) -> "type[Worker]":
    from shoal.worker import CHEATERS, Worker

    if cheat is None:
        return Worker
    if cheat not in CHEATERS:
        raise ConfigError(f"There is no cheat {cheat!r}.", hint=f"Known: {', '.join(CHEATERS)}.")
    return CHEATERS[cheat]
