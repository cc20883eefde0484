"""The `shoal` command: which commands there are, and how each invocation begins and ends.

Settings of a run are given as `--section.name VALUE` to any command that takes a run file; they are collected before the
command line is parsed, so they may stand anywhere. A ShoalError becomes one sentence and a non-zero exit code.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli import data as data_commands
from shoal.cli import records as record_commands
from shoal.cli import roles as role_commands
from shoal.cli.contributor import key_app, service_app
from shoal.cli.extras import missing_extra, with_extra
from shoal.cli.flags import report, split_settings, takes_settings
from shoal.cli.logs import logs
from shoal.cli.run import run_app
from shoal.cli.simulate import simulate
from shoal.cli.work import work_app
from shoal.config import all_settings
from shoal.errors import ConfigError, ShoalError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> None:
    rest, given = split_settings(list(sys.argv[1:] if arguments is None else arguments))
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else somebody said nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        app(rest, prog_name="shoal", obj=given)
    except ShoalError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        _fail(missing)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(ShoalError("The disk is full.", hint="Make room; the same command goes on where it was."))
        if error.filename is None:
            raise
        _fail(ShoalError(f"{error.filename} cannot be used: {(error.strerror or str(error)).lower()}."))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(error: ShoalError) -> None:
    """One sentence; exit code 78 tells a supervisor that starting again cannot help."""
    print(f"shoal: {error}", file=sys.stderr)
    raise SystemExit(os.EX_CONFIG if error.permanent else 1)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Train language models by reinforcement learning on compute that nobody has to trust."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.obj and not takes_settings(COMMANDS.get(context.invoked_subcommand or "")):
        raise ConfigError(
            f"`shoal {context.invoked_subcommand}` takes no settings such as {context.obj[0]}.",
            hint=f"They belong to {', '.join(sorted(name for name in COMMANDS if takes_settings(COMMANDS[name])))}.",
        )


def doctor() -> None:
    """Check this machine and say what is missing."""
    from shoal.cli.doctor import examine

    raise SystemExit(examine(report))


def show_settings() -> None:
    """Every setting with its default and its reason."""
    for setting in all_settings():
        kept = " A run keeps it." if setting.fixed else ""
        typer.echo(f"{setting.key} = {setting.default_text}\n    {setting.reason}{kept}")


COMMANDS: dict[str, Callable[..., None]] = {
    "eval": data_commands.evaluate_policy,
    "curate": data_commands.curate_tasks,
    "filter": data_commands.filter_file,
    "sft": data_commands.warm_start,
    "init": role_commands.init,
    "coordinator": role_commands.coordinator,
    "train": role_commands.train,
    "export": record_commands.export,
    "reproduce": record_commands.reproduce,
    "inspect": record_commands.inspect,
    "view": record_commands.view,
    "plan-memory": record_commands.plan_memory,
    "simulate": simulate,
    "validate": role_commands.validate,
    "evaluator": role_commands.evaluator,
    "relay": role_commands.relay,
    "up": role_commands.up,
    "demo": role_commands.demo,
    "logs": logs,
    "doctor": doctor,
    "config": show_settings,
    "calibrate": record_commands.calibrate,
    "verify": record_commands.verify,
}
"""In the order of `shoal --help`."""

for _name, _command in COMMANDS.items():
    app.command(_name)(with_extra(_name, _command))
app.add_typer(work_app, name="work")
app.add_typer(service_app, name="service")
app.add_typer(key_app, name="key")
app.add_typer(record_commands.ledger_app, name="ledger")
app.add_typer(run_app, name="run")
app.add_typer(data_commands.reward_model_app, name="reward-model")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
