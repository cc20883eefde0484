"""`shoal service …` and `shoal key …`: a worker that starts by itself, and a key that outlives its machine. Thin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import in_home
from shoal.errors import ConfigError
from shoal.identity import Keypair
from shoal.rundir import is_address

if TYPE_CHECKING:
    from shoal.contributor.service import Service

service_app = typer.Typer(no_args_is_help=True, help="A worker that starts by itself, as a systemd service of yours.")
key_app = typer.Typer(no_args_is_help=True, help="Your key is your account: keep a copy of it.")

Name = Annotated[str, typer.Option("--name", help="Name of the service.")]
KeyFile = Annotated[Path, typer.Option("--key", help="The key file.")]
PassphraseFile = Annotated[
    Path | None, typer.Option(help="File whose first line is the passphrase; without it you are asked.")
]
HOME, KEY = Path("~/.shoal"), Path("~/.shoal/worker.key")
KEPT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")
KEPT_PATHS = ("SSL_CERT_FILE", "HF_HOME", "PYTHONPATH")
"""Variables that name paths, PYTHONPATH several: they may be relative, and a service starts elsewhere."""


@service_app.command("install", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def install(
    work: Annotated[list[str], typer.Argument(metavar="WHERE [OPTIONS]", help="What you would give to `shoal work`.")],
    name: Name = "worker",
    no_start: Annotated[bool, typer.Option("--no-start", help="Only write the unit file.")] = False,
) -> None:
    """Write the unit file of a worker and start it, now and whenever you log in."""
    from shoal.contributor.service import Manager

    no_start = no_start or "--no-start" in work  # `shoal work` has no such option, so it is meant wherever it stands
    manager, service = Manager.of_user(), _service(name, [word for word in work if word != "--no-start"])
    _check_free(service)
    manager.install(service, start=not no_start)
    typer.echo(f"wrote {manager.path(service.unit)}")
    if not service.is_confined:
        typer.echo("this system allows no user namespaces, so the service may write wherever you may", err=True)
    if no_start:
        typer.echo(f"start it with: systemctl --user daemon-reload && systemctl --user enable --now {service.unit}")
    else:
        typer.echo("it runs while you are logged in; `loginctl enable-linger` lets it run from boot on")


@service_app.command("status")
def status(name: Name = "worker") -> None:
    """What systemd says about the service."""
    raise SystemExit(_show(_unit(name), "systemctl", "--user", "--no-pager", "status"))


@service_app.command("logs")
def logs(
    name: Name = "worker",
    lines: Annotated[int, typer.Option(min=1, help="How many lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes.")] = False,
) -> None:
    """What the worker said."""
    words = ["journalctl", "--user", "--no-pager", f"--lines={lines}", *(["--follow"] if follow else []), "--user-unit"]
    raise SystemExit(_show(_unit(name), *words))


@service_app.command("remove")
def remove(name: Name = "worker") -> None:
    """Stop the service and remove its file. Key, weights and credit stay."""
    from shoal.contributor.service import Manager

    Manager.of_user().remove(_unit(name))
    typer.echo("removed; your key and the worker's directory are still there")


@key_app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; must not exist.")],
    key: KeyFile = KEY,
    passphrase_file: PassphraseFile = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without a passphrase: anyone who reads the file has your key.")
    ] = False,
) -> None:
    """Copy your key into a file that you keep elsewhere, encrypted with a passphrase."""
    from shoal.contributor.keys import write_backup

    if plain and passphrase_file is not None:
        raise ConfigError("--plain and --passphrase-file exclude each other.", hint="Give one of them.")
    passphrase = None if plain else _passphrase(passphrase_file, confirm=True)
    public = write_backup(in_home(key), file, passphrase)
    typer.echo(f"wrote {file}: key {public[:12]}…")
    if plain:
        typer.echo(
            "warning: it is not encrypted. Anyone who reads it can work under your name and lose your credit.", err=True
        )


@key_app.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(help="A backup.")], key: KeyFile = KEY, passphrase_file: PassphraseFile = None
) -> None:
    """Put a key from its backup in place; never over another key. Use it on one machine at a time."""
    from shoal.contributor.keys import is_encrypted, restore_backup

    passphrase = _passphrase(passphrase_file, confirm=False) if is_encrypted(file) else None
    public = restore_backup(file, in_home(key), passphrase)
    typer.echo(f"{key} holds key {public[:12]}…; its credit and trust state come with it")


def _service(name: str, words: list[str]) -> "Service":
    """Checks the words as `shoal work` would, so that a mistake is seen now and not in a log."""
    from shoal.cli.work import memory_bytes, work_app
    from shoal.contributor import Hours
    from shoal.contributor.service import Service, can_confine, check_lasting, check_name

    caches = [os.environ.get("XDG_CACHE_HOME") or "~/.cache", os.environ.get("UV_CACHE_DIR")]
    check_lasting(Path(sys.prefix), *(in_home(Path(cache)) for cache in caches if cache))
    group = typer.main.get_command(work_app)
    command = group.commands["join"]  # type: ignore[attr-defined]
    with command.make_context("shoal work", list(words), resilient_parsing=False) as context:
        given = context.params
    if given["hours"]:
        Hours.parse(given["hours"])
    directory = in_home(Path(given["dir"])).absolute()
    if given["key"] is not None:  # the service may read it, and write nowhere but to its directory
        Keypair.load_or_create(in_home(Path(given["key"])).absolute())
    return Service(
        name=check_name(name),
        command=(sys.executable, "-m", "shoal"),
        arguments=_with_absolute_paths(words),
        directory=directory,
        cpus=given["cpus"],
        memory_bytes=memory_bytes(given["memory"]),
        variables=_kept_variables(),
        is_confined=can_confine(),
    )


def _kept_variables() -> list[tuple[str, str]]:
    values = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    for name in KEPT_PATHS:
        if found := os.environ.get(name):
            values[name] = os.pathsep.join(str(Path(one).absolute()) for one in found.split(os.pathsep))
    return list(values.items())


def _check_free(service: "Service") -> None:
    """A worker that runs there already would keep the service out, which only its log would tell."""
    from shoal.contributor import Control
    from shoal.contributor.service import Manager, ServiceError

    if Control(service.directory).is_running() and not Manager.of_user().path(service.unit).exists():
        raise ServiceError(
            f"A worker runs in {service.directory}.",
            hint="End it with `shoal work finish`, or give the service its own --dir.",
        )


def _with_absolute_paths(words: list[str]) -> list[str]:
    """A service starts elsewhere. Its directory is left out: the unit names it."""
    kept, rest = list[str](), iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in ("--dir", "--key", "--ca"):
            path = in_home(Path(value if equals else next(rest))).absolute()
            kept += [] if option == "--dir" else [option, str(path)]
        elif not word.startswith("-") and not is_address(word) and Path(word).exists():
            kept.append(str(Path(word).absolute()))
        else:
            kept.append(word)
    return kept


def _unit(name: str) -> str:
    from shoal.contributor.service import check_name

    return f"shoal-{check_name(name)}.service"


def _show(unit: str, program: str, *words: str) -> int:
    """Runs systemd's own program on a service that is installed: of another it would say little, or nothing."""
    from shoal.contributor.service import Manager, ServiceError

    if shutil.which(program) is None:
        raise ServiceError(f"{program} is not installed here.", hint="Services need systemd.")
    Manager.of_user().find(unit)
    return subprocess.run([program, *words, unit], check=False).returncode


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    if file is not None:
        try:
            return (file.read_text().splitlines() or [""])[0]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from None
    if not sys.stdin.isatty():
        raise ConfigError("Nobody is there to be asked for a passphrase.", hint="Give --passphrase-file.")
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm))
