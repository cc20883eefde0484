"""The owner returns a run to a checkpointed version: chosen here, signed with the run key, done by the coordinator or its store.

Only a version that the trainer can resume exactly is chosen; version 0 always can be, from the base model. A command that was
killed is given again: before the coordinator's transaction nothing has happened, after it everything has.
"""

from collections.abc import Sequence

from shoal.errors import ConfigError
from shoal.owner.control import OwnedRun, find_run
from shoal.protocol import api
from shoal.protocol.signing import rewound_message
from shoal.protocol.steps import Rewind
from shoal.rundir import RunDirectory, checkpoint_steps, void_checkpoints


def rewind(run: OwnedRun, *, version: int | None = None, reason: str, audit: bool = False) -> api.RewindView:
    """Voids everything after a version; by default after that of the newest checkpoint."""
    line = run.line()
    target = chosen_version(version, _checkpoints(run, line), line)
    digests = {view.version: view.manifest_digest for view in run.status()[1].versions}
    message = rewound_message(run.run_id(), line.epoch + 1, target, digests[target])
    facts = {"epoch": line.epoch + 1, "version": target, "manifest_digest": digests[target]}
    signed = facts | {"signature": run.run_key().sign(message)}
    try:
        body = api.RewindBody.model_validate(signed | {"reason": reason, "audit": audit})
    except ValueError:
        raise ConfigError("The reason must be one line of 1 to 200 letters.") from None
    return run.rewind(body)


def rewind_run(directory: RunDirectory, *, reason: str) -> api.RewindView:
    """For a role that runs on the host of the run directory."""
    return rewind(find_run(str(directory.root)), reason=reason)


def chosen_version(version: int | None, checkpoints: Sequence[int], line: api.LineAnswer) -> int:
    """The version that is meant, or why it cannot be."""
    known = [step for step in sorted({0, *checkpoints}) if step <= line.newest_version]
    if not known:
        raise ConfigError("The run has published nothing yet.")
    if version is None:
        return known[-1]
    if version not in known:
        raise ConfigError(
            f"There is no checkpoint of version {version}.", hint=f"There are: {', '.join(map(str, known))}."
        )
    return version


def _checkpoints(run: OwnedRun, line: api.LineAnswer) -> Sequence[int]:
    """Those on this disk; on another host those that the trainer reported with its newest version."""
    if run.directory is None or not (found := checkpoint_steps(run.directory.checkpoints)):
        return line.checkpoints
    void = void_checkpoints(run.directory.checkpoints, [Rewind(one.epoch, one.version) for one in line.rewinds])
    return [step for step in found if step not in void]


def rewound_sentence(done: api.RewindView) -> str:
    lost = f"versions {done.version + 1} to {done.newest_before} are void and trained again"
    if done.lost_steps == 1:
        lost = f"version {done.newest_before} is void and trained again"
    if not done.lost_steps:
        lost = "no version is lost"
    audits = f", {done.audits} files are audited" if done.audits else ""
    return (
        f"returned to version {done.version} (epoch {done.epoch}): {lost};"
        f" {done.groups} groups were withdrawn, their credit stays{audits}"
    )
