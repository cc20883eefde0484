"""What the commands share: common flags, the settings given as `--section.name VALUE`, and the run that these describe.

`main` collects the settings before the command line is parsed and hands them over as `typer.Context.obj`. A command takes
settings if it has a parameter `context: typer.Context`; others refuse them.
"""

import os
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from shoal.config import ShoalConfig, to_toml
from shoal.config.schema import EngineKind
from shoal.errors import ConfigError
from shoal.rundir import RunDirectory, load_run

Where = Annotated[
    str | None,
    typer.Argument(help="Run file, run directory, or the coordinator's address; without it the directory of run.dir."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved settings, warn about what cannot work, and stop.")
]
Threads = Annotated[int, typer.Option(min=0, help="Compute threads; 0 lets torch decide.")]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", help="Also trust the TLS certificates of this PEM file, such as a private authority's."),
]
EngineName = Annotated[EngineKind, typer.Option(help="`torch`, or `vllm` where it is installed.")]
Joinable = Annotated[
    str,
    typer.Argument(
        metavar="WHERE", help="The coordinator's address, such as http://host:7300, a run file or directory."
    ),
]


def split_settings(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Dotted flags with their values, and everything else."""
    rest: list[str] = []
    found: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        if argument.startswith("--") and "." in argument.partition("=")[0]:
            found.append(argument)
            if "=" not in argument and arguments:
                found.append(arguments.pop(0))
        else:
            rest.append(argument)
    return rest, found


def takes_settings(command: Callable[..., object] | None) -> bool:
    return command is not None and "context" in signature(command).parameters


def run_config(context: typer.Context, where: str | None, dry_run: bool = False) -> ShoalConfig:
    config = load_run(where, context.obj)
    if dry_run:
        print_dry_run(config)
        raise SystemExit(0)
    return config


def print_dry_run(config: ShoalConfig) -> None:
    """The settings on the output; what cannot work about them beside it."""
    from shoal.owner.preflight import foreseen_problems

    typer.echo(to_toml(config))
    for problem in foreseen_problems(config):
        typer.echo(f"shoal: warning: {problem}", err=True)


def run_directory(context: typer.Context, where: str | None, dry_run: bool = False) -> RunDirectory:
    """The directory of a run, made if it is new."""
    from shoal.owner.create import initialise

    return initialise(_addressed(run_config(context, where, dry_run)), report)


def _addressed(config: ShoalConfig) -> ShoalConfig:
    """Asks how others reach a new run that listens everywhere, if somebody is there to answer."""
    from shoal.owner.addresses import likely_host, missing_addresses, parse_host, with_public_host

    known = RunDirectory(config.run.dir).is_initialised
    if known or not missing_addresses(config) or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return config
    answer = typer.prompt("How do other machines reach this one? Name or address", default=likely_host())
    return with_public_host(config, parse_host(answer))


def report_join_command(directory: RunDirectory) -> None:
    from shoal.owner.addresses import is_local

    descriptor = directory.descriptor()
    report(f"contributors join with: shoal work {descriptor.coordinator_url} --run-key {descriptor.run_key}")
    if is_local(descriptor.coordinator_url):
        report("that works on this machine only; for others add --coordinator.host 0.0.0.0 --broadcast.host 0.0.0.0")


def report_page_links(directory: RunDirectory) -> None:
    from shoal.owner.control import current_secret, owner_link

    url = directory.config().coordinator.url_here
    report(f"everybody's page: {directory.descriptor().coordinator_url}")
    report(f"your page, keep this link secret: {owner_link(url, current_secret(directory))}")


def report(text: str) -> None:
    """Prints; under torchrun only the first rank does."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(text)
        sys.stdout.flush()


def in_home(path: Path) -> Path:
    """With `~` in place. A user without a home, as containers have, learns what to give instead."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} cannot be found: this user has no home.", hint="Set HOME, or name a directory with --dir."
        ) from None
