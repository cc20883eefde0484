"""Which records are shown, and in which order: pure decisions over the fields of a record."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from shoal.errors import ConfigError
from shoal.inspection.records import Record

Order = Literal["run", "reward", "length", "age", "margin"]


@dataclass(frozen=True)
class Filter:
    """Everything that is set must hold; `None` and empty mean any."""

    step: int | None = None
    slot: int | None = None
    version: int | None = None
    worker: str = ""
    """Beginning of a key, or a name."""
    task: str = ""
    state: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_age: int | None = None
    max_age: int | None = None
    truncated: bool | None = None
    pattern: re.Pattern[str] | None = None
    """Searched in prompt and completion."""

    def wants(self, record: Record) -> bool:
        header = record.header
        return (
            self.step in (None, header.step)
            and self.slot in (None, header.slot)
            and self.version in (None, header.policy_version)
            and (header.worker_key.startswith(self.worker) or record.worker_name == self.worker)
            and self.task in ("", record.rollout.task_id)
            and self.state in ("", record.state)
            and _between(self.min_reward, record.reward, self.max_reward)
            and _between(self.min_age, record.age, self.max_age)
            and self.truncated in (None, record.truncated)
            and (self.pattern is None or bool(self.pattern.search(f"{record.prompt}\n{record.text}")))
        )


def _between(low: float | None, value: float, high: float | None) -> bool:
    return (low is None or low <= value) and (high is None or value <= high)


def sort_records(records: Iterable[Record], order: Order, *, reverse: bool = False) -> list[Record]:
    """In the order of the run, or by a metric with the order of the run among equals."""
    chosen = sorted(records, key=_place)
    if order == "run":
        return chosen[::-1] if reverse else chosen
    return sorted(chosen, key=lambda record: _figure(record, order), reverse=reverse)


def _place(record: Record) -> tuple[int, int, int, int, str]:
    header, rollout = record.header, record.rollout
    return header.step, header.slot, rollout.group, rollout.sample, header.lease_id


def _figure(record: Record, order: Order) -> float:
    if order == "margin":
        return record.margins.worst if record.margins else 0.0
    return {"reward": record.reward, "length": float(record.length), "age": float(record.age)}[order]


def known_order(name: str) -> Order:
    if name not in get_args(Order):
        raise ConfigError(f"Rollouts cannot be sorted by {name!r}.", hint=f"Known: {', '.join(get_args(Order))}.")
    return cast(Order, name)


def known_pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise ConfigError(f"{text!r} is no regular expression: {error}.") from None
