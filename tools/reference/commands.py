"""docs/reference/cli.md: every command with its arguments and options, as `--help` describes them."""

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand as Command
from typer.core import TyperGroup as Group

from shoal.cli.main import app
from tools.reference.text import item, wrapped

Parameter = Any
"""A click parameter; typer brings a click of its own, whose types it does not export."""

INTRODUCTION = (
    "`shoal --help` lists the commands and `shoal COMMAND --help` prints one of them."
    " Commands that take a run file also take every [setting](settings.md) as `--section.name VALUE`."
    " A failed command prints one sentence with a hint. Exit code 78 means that starting it again cannot help."
)


def commands() -> Iterator[tuple[str, Command]]:
    """Every command by its full name, in the order of `--help`."""
    group = typer.main.get_group(app)
    yield from _below("shoal", group)


def _below(prefix: str, group: Group) -> Iterator[tuple[str, Command]]:
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from _below(f"{prefix} {name}", command)
        else:
            assert isinstance(command, Command)
            yield prefix if name == getattr(group, "default", "") else f"{prefix} {name}", command


def page() -> str:
    lines = ["# Commands", "", wrapped(INTRODUCTION)]
    for name, command in commands():
        lines += ["", f"## {name}", "", wrapped(command.help or ""), ""]
        lines += ["```", _usage(name, command), "```", ""]
        lines += [item(_described(parameter)) for parameter in command.params if _is_shown(parameter)]
    return "\n".join(lines).rstrip() + "\n"


def _usage(name: str, command: Command) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    return " ".join([name, "[OPTIONS]", *(_metavar(one) for one in arguments)])


def _metavar(argument: Parameter) -> str:
    name = str(argument.name).upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _is_shown(parameter: Parameter) -> bool:
    return not getattr(parameter, "hidden", False) and parameter.name != "help"


def _described(parameter: Parameter) -> str:
    words = getattr(parameter, "help", "") or ""
    return f"{_spelled(parameter)}{_default(parameter)}: {words}"


def _spelled(parameter: Parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"**`{str(parameter.name).upper()}`**"
    return " / ".join(f"**`{name}`**" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if parameter.param_type_name == "argument" or isinstance(value, bool) or value in (None, "", ()):
        return ""
    return f" (default `{value}`)"
