"""The evaluator as a process: measures published versions on held-out tasks."""

from pathlib import Path

from shoal.metrics import Report
from shoal.protocol.client import CoordinatorClient
from shoal.roles.process import COORDINATOR_OUTAGE_S, keep_what_is_loaded, own_directory, use_threads
from shoal.rundir import RunDirectory


def evaluate(directory: RunDirectory, report: Report, *, threads: int) -> None:
    use_threads(threads)
    with own_directory(directory.root, "evaluator") as root:
        _evaluate(directory, root, report)


def _evaluate(directory: RunDirectory, root: Path, report: Report) -> None:
    from shoal.evaluation import Evaluator
    from shoal.joined import follow_relays, join_run

    config, descriptor = directory.config(), directory.descriptor()
    key = directory.existing_key("evaluator")
    client = CoordinatorClient.for_run(
        descriptor, key, config.coordinator_url, deadline_s=COORDINATOR_OUTAGE_S, on_wait=report
    )
    run = join_run(descriptor, root, heldout=True, clock=client.server_time, report=report)
    follow_relays(run, client)
    settings = config.evaluation
    report(f"measuring every {settings.every} versions of {descriptor.run_id}")
    engine = run.make_engine()
    keep_what_is_loaded()
    Evaluator(
        run,
        client,
        engine,
        every=settings.every,
        samples=settings.samples,
        steps=config.run.steps,
        report=report,
    ).run()
