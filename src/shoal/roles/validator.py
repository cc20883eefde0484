"""A validator as a process; a host may run several."""

from pathlib import Path

from shoal.files import CONFIG_FILE
from shoal.metrics import EventLog, Report
from shoal.protocol.client import CoordinatorClient
from shoal.roles.process import COORDINATOR_OUTAGE_S, keep_what_is_loaded, own_directory, use_threads
from shoal.rundir import RunDirectory


def validate(directory: RunDirectory, report: Report, *, threads: int, engine: str = "") -> None:
    with own_directory(directory.root, "validator") as place:
        _validate(directory, report, place, threads=threads, engine_kind=engine)


def _validate(directory: RunDirectory, report: Report, place: Path, *, threads: int, engine_kind: str) -> None:
    use_threads(threads)
    from shoal.coordinator.rules.trust import LossRule
    from shoal.joined import follow_relays, join_run
    from shoal.validation import Validator, load_calibration
    from shoal.validation.calibration.limits import ModelIdentity
    from shoal.validation.reward_models import make_scorer

    config, descriptor = directory.config(), directory.descriptor()
    rule = LossRule.of(config)
    rule.require()
    report(f"cheating loses: {rule}")
    calibration = load_calibration(config.validation.calibration)
    if not config.validation.foreign_calibration:
        calibration.require_model(ModelIdentity(architecture=descriptor.model_files[CONFIG_FILE].digest))
    key = directory.existing_key("validator")
    client = CoordinatorClient.for_run(
        descriptor, key, config.coordinator_url, deadline_s=COORDINATOR_OUTAGE_S, on_wait=report
    )
    run = join_run(descriptor, place, keep_versions=descriptor.async_level + 3, clock=client.server_time, report=report)
    follow_relays(run, client)
    engine = run.make_scorer(engine_kind or config.validation.engine)
    metrics = EventLog(directory.events / f"{place.name}.jsonl")
    report(f"validating {descriptor.run_id} with {engine.numerics_class}")
    reward_models = make_scorer(config.validation.reward_models, descriptor, run.workload.tasks.train)
    keep_what_is_loaded()
    Validator(run, client, engine, calibration, reward_models=reward_models, metrics=metrics, report=report).run()
