"""The coordinator as a process."""

from shoal.metrics import Report
from shoal.roles.process import keep_what_is_loaded
from shoal.rundir import RunDirectory


def coordinate(directory: RunDirectory, report: Report) -> None:
    from shoal.coordinator import run_coordinator
    from shoal.coordinator.rules.trust import LossRule
    from shoal.coordinator.rules.unaudited import cost_of_share
    from shoal.inspection.groups import GroupReader

    def on_ready(url: str) -> None:
        report(f"coordinator of {directory.descriptor().run_id} at {url}")
        config = directory.config()
        report(f"cheating loses: {LossRule.of(config)}")
        report(cost_of_share(config.training, config.trust))

    keep_what_is_loaded()
    run_coordinator(directory, on_ready=on_ready, rollouts=GroupReader(directory))
