"""Run files and flags: TOML in, dotted flags override, `--dry-run` prints the result.

A wrong key or value is refused with the nearest right one. Nothing else in the package reads run files or environment variables for
settings.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.reference import all_keys, sections
from shoal.config.schema import ShoalConfig
from shoal.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ShoalConfig:
    """The run described by a TOML file and flags such as `--training.learning_rate 1e-4`."""
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_toml(path)
    for key, text in _parse_flags(overrides):
        _assign(tree, key, text)
    return build_config(tree)


def build_config(tree: Mapping[str, Any]) -> ShoalConfig:
    try:
        return ShoalConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"Unknown setting {key}.", hint=_nearest_hint(key)) from None
        hint = "See `shoal config` for every setting and its meaning."
        raise ConfigError(f"Setting {key} = {first['input']!r} is wrong: {first['msg'].lower()}.", hint=hint) from None


def to_toml(config: ShoalConfig) -> str:
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    """JSON is TOML for these types, but for tables, pairs of surrogates and the delete character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no run file {path}.", hint="`configs/` has examples.") from None
    except OSError as error:
        raise ConfigError(f"The run file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def _parse_flags(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name, equals, value = flag.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"Unexpected argument {flag!r}.", hint="Settings are given as --section.name VALUE.")
        if name[2:] not in all_keys():
            raise ConfigError(f"Unknown setting {name}.", hint=_nearest_hint(name[2:], prefix="--"))
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value.")
            value = rest.pop(0)
        yield name[2:], value


def _assign(tree: dict[str, Any], key: str, text: str) -> None:
    *tables, name = key.split(".")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    branch = tree
    for table in tables:
        branch = branch.setdefault(table, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"[{table}] must be a table of settings.")
    branch[name] = value


def _nearest_hint(key: str, prefix: str = "") -> str:
    keys = all_keys()
    by_name = {name.split(".")[-1]: name for name in keys}
    key = key.lower()  # every setting is
    matches = difflib.get_close_matches(key, [*keys, *dict(sections())], n=1, cutoff=0.6)
    if not matches:
        matches = [by_name[name] for name in difflib.get_close_matches(key.split(".")[-1], by_name, n=1, cutoff=0.6)]
    return f"Did you mean {prefix}{matches[0]}?" if matches else "See `shoal config` for every setting."
