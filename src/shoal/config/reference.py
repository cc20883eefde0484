"""What the settings say about themselves, and what two sets of them differ in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from shoal.config.schema import FIXED, Section, ShoalConfig


@dataclass(frozen=True)
class Setting:
    key: str
    """Such as training.async_level."""
    default: Any
    reason: str
    fixed: bool
    """A run keeps it; any other may change between two starts."""

    @property
    def default_text(self) -> str:
        return json.dumps(self.default, default=str)


@dataclass(frozen=True)
class Change:
    setting: Setting
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.setting.key} was {_text(self.old)} and is now {_text(self.new)}"


def sections() -> Iterator[tuple[str, type[Section]]]:
    for name, field in ShoalConfig.model_fields.items():
        annotation = field.annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, Section)
        yield name, annotation


def all_settings() -> Iterator[Setting]:
    for section, model in sections():
        yield from _settings_of(model, section, fixed=FIXED in ShoalConfig.model_fields[section].metadata)


def _settings_of(model: type[Section], prefix: str, *, fixed: bool) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        key, kept = f"{prefix}.{name}", fixed or FIXED in field.metadata
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings_of(field.annotation, key, fixed=kept)
        else:
            yield Setting(key, field.default, field.description or "", kept)


def all_keys() -> list[str]:
    """Every dotted setting."""
    return [setting.key for setting in all_settings()]


def changes(old: ShoalConfig, new: ShoalConfig) -> list[Change]:
    """Every setting that differs."""
    pairs = ((setting, _value(old, setting), _value(new, setting)) for setting in all_settings())
    return [Change(setting, before, after) for setting, before, after in pairs if before != after]


def _value(config: ShoalConfig, setting: Setting) -> Any:
    return reduce(getattr, setting.key.split("."), config)


def _text(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
