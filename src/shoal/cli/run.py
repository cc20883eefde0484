"""`shoal run …`: what the owner asks of a run, one thin command each. Heavy imports happen inside the commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Where

if TYPE_CHECKING:
    from shoal.owner.control import OwnedRun
    from shoal.protocol import api

run_app = typer.Typer(
    no_args_is_help=True,
    help="Look at a run and steer it: pause, resume, drain, rewind, ban, unban, link, backup, restore.",
)

Key = Annotated[
    Path | None, typer.Option("--key", help="The run key; taken from the run directory if that is on this host.")
]
WorkerName = Annotated[str, typer.Argument(metavar="KEY", help="Key of a worker, its beginning, or its name.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; recorded in the public ledger.")]


@run_app.command("status")
def status(where: Where = None) -> None:
    """Show a run once."""
    from rich.console import Console

    from shoal.observe import render
    from shoal.observe.view import alert_lines

    console = Console()
    seen, history = _find(where, None).status()
    console.print(render(seen, history))
    rewinds = [
        f"epoch {one.epoch}: returned to version {one.version}, {one.lost_steps} steps lost ({one.reason})"
        for one in history.rewinds
    ]
    for line in [*rewinds, *([seen.advice] if seen.advice else []), *alert_lines(seen)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@run_app.command("pause")
def pause(where: Where = None, key: Key = None) -> None:
    """Give out no new work; what is leased goes on. `resume` ends it."""
    answer = _find(where, key).set_state("paused")
    typer.echo(f"paused at step {answer.step}: {_outstanding(answer)} will still be finished")


@run_app.command("resume")
def resume(where: Where = None, key: Key = None) -> None:
    """Give out work again after a pause or a drain."""
    answer = _find(where, key).set_state("running")
    typer.echo(f"{answer.run_state} at step {answer.step}, version {answer.newest_version}")


@run_app.command("drain")
def drain(where: Where = None, key: Key = None) -> None:
    """Finish what is leased, train on what makes a batch, write a checkpoint and stop."""
    answer = _find(where, key).set_state("draining")
    if answer.run_state == "drained":
        typer.echo(f"drained at version {answer.newest_version}")
    else:
        typer.echo(
            f"draining at step {answer.step}: {_outstanding(answer)} left; `shoal run status` shows when it is done"
        )


@run_app.command("ban")
def ban(worker: WorkerName, reason: Reason, where: Where = None, key: Key = None) -> None:
    """Ban a key: its stake is slashed, its unconsumed work withdrawn. Bans stick until you lift them."""
    view = _find(where, key).ban(worker, reason)
    typer.echo(f"{view.name} ({view.key[:12]}…) is {view.state}: {view.reason}")


@run_app.command("unban")
def unban(worker: WorkerName, reason: Reason, where: Where = None, key: Key = None) -> None:
    """Lift a ban: the key begins again on probation. What was slashed stays slashed."""
    view = _find(where, key).unban(worker, reason)
    typer.echo(f"{view.name} ({view.key[:12]}…) is on {view.state} again")


@run_app.command("recall")
def recall(
    step: Annotated[int, typer.Argument(min=0, help="The step that is being trained.")],
    reason: Reason,
    where: Where = None,
    key: Key = None,
) -> None:
    """Take back the batch that is being trained: all of it is audited, then proposed again without what fails."""
    answer = _find(where, key).recall(step, reason)
    typer.echo(f"the batch of step {step} is recalled; {answer.groups} of its groups are audited now")


@run_app.command("rewind")
def rewind(
    where: Where = None,
    to: Annotated[
        int | None, typer.Option("--to", min=0, help="Version with a checkpoint; default: the newest checkpoint.")
    ] = None,
    reason: Reason = "by the owner",
    audit: Annotated[
        bool, typer.Option("--audit", help="Audit everything that the voided steps were trained on.")
    ] = False,
    key: Key = None,
) -> None:
    """Return a run to a checkpointed version: what came after it is void, and is trained again. Credit stays."""
    from shoal.owner.rewinding import rewind as rewind_run
    from shoal.owner.rewinding import rewound_sentence

    typer.echo(rewound_sentence(rewind_run(_find(where, key), version=to, reason=reason, audit=audit)))
    typer.echo("a trainer that runs begins again there by itself; start one that does not run")


@run_app.command("link")
def link(
    where: Where = None,
    key: Key = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make a new link; every earlier one, and every open page, loses access.")
    ] = False,
) -> None:
    """Print the link to the owner's page. Anyone who has it sees rollouts and measurements: keep it secret."""
    typer.echo(_find(where, key).page_link(rotate=rotate))


@run_app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; must not exist. It will hold the run's private keys.")],
    where: Where = None,
    references: Annotated[
        bool, typer.Option("--references", help="Only name rollouts, weights and checkpoint, which must then be kept.")
    ] = False,
) -> None:
    """Copy a run, live or not, into one file from which it can continue."""
    from shoal.metrics.units import size
    from shoal.owner.backup import write_backup
    from shoal.owner.control import find_directory

    index = write_backup(find_directory(where), file, typer.echo, references_only=references)
    written = size(file.stat().st_size)
    typer.echo(f"wrote {file} ({written}, {len(index.left_out)} files only named); keep it secret")


@run_app.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(help="A backup.")],
    to: Annotated[Path | None, typer.Option(help="Run directory to make; default: where the run was.")] = None,
    files: Annotated[
        Path | None, typer.Option(help="Run directory that has what a backup with --references only names.")
    ] = None,
) -> None:
    """Make a run directory from a backup; never overwrites one."""
    from shoal.owner.restore import restore_backup

    directory = restore_backup(file, typer.echo, target=to, files=files)
    typer.echo(f"go on with: shoal up {directory.run_file}")


def _find(where: str | None, key: Path | None) -> "OwnedRun":
    from shoal.owner.control import find_run

    return find_run(where, key)


def _outstanding(answer: "api.RunStateAnswer") -> str:
    return f"{answer.leases_outstanding} leases and {answer.submissions_pending} submissions without a verdict"
