"""A scenario file: TOML that says who takes part, how fast everything is, and how much there is to send.

Each value that a run decides by (`[settings.*]`) is a setting of a run file. A wrong key or value is refused with the nearest right
one, and so is a swarm in which nobody works.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.config import ShoalConfig, build_config
from shoal.config.reference import all_keys as all_settings
from shoal.errors import ConfigError

BUNDLED = Path(__file__).parents[1] / "scenarios"
MOST_MACHINES = 200_000
MOST_ROWS = 20_000_000
"""Of all engines together; both keep a simulation in a few gigabytes of memory."""
MOST_SAMPLES = 65_536
"""Of a slot: the lengths of some thousand slots are kept."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number in quotes is a mistake."""
Whole = Annotated[int, Field(strict=True)]
Positive = Annotated[Number, Field(gt=0, le=1e15)]
NotNegative = Annotated[Number, Field(ge=0, le=1e15)]
Seconds = Annotated[Number, Field(ge=0, le=1e7)]
Spread = Annotated[Number, Field(ge=0, le=5)]
"""Of a logarithm: 5 is a factor of 150 either way."""
Count = Annotated[Whole, Field(ge=1, le=1_000_000)]
Share = Annotated[Number, Field(ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Label = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""It is printed in a terminal."""
Conduct = Literal["honest", "stall", "junk", "forge"]
"""`stall` leases and never delivers, `junk` sends files that do not hold, `forge` sends good files with forged groups in them."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Run(Section):
    name: Label = "scenario"
    steps: Annotated[Whole, Field(ge=2, le=100_000)] = 100
    seed: Whole = 0
    """The same scenario with the same seed gives the same numbers."""


class Work(Section):
    median_tokens: Positive
    """Of a completion."""
    spread: Spread = 0.5
    """Standard deviation of the logarithm of the length."""
    prompt_tokens: NotNegative = 100.0
    """An audit reads prompts too."""
    useful_share: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """Of the groups, those whose rewards differ."""
    bytes_per_token: NotNegative = 12.0
    """Of a rollout file."""


class Weights(Section):
    full_bytes: Positive
    delta_bytes: NotNegative = 0.0
    """Of a version that follows another one; 0 publishes every version in full."""
    keyframe_every: Count = 8
    """One version of this many is published in full too."""


class TrainerSpec(Section):
    step_s: Annotated[Seconds, Field(gt=0)]
    """From a batch to the weights that follow from it."""
    stage_s: Seconds = 0.0
    """To encode, hash and record a version, beside the next step."""
    batch_s: Seconds = 0.0
    """To fetch the files of a batch."""


class ValidatorSpec(Section):
    count: Count = 1
    file_s: Seconds = 0.1
    """Of every file, without its audit."""
    audit_tokens_per_s: Positive = 1e4
    """Tokens of audited groups, prompts included, that one validator reads per second."""


class CoordinatorSpec(Section):
    requests_per_s: NotNegative = 1700.0
    """What one process answers, heartbeats included; 0: any number."""
    backups: Flag = True
    """Only a simulation can do without them."""


class Link(Section):
    up_mbit_s: Positive = 1000.0


class RelaySpec(Section):
    count: Count = 1
    up_mbit_s: Positive = 1000.0
    region: str = ""


class WorkerSpec(Section):
    name: Label
    count: Count
    tokens_per_s: Positive
    """Of one machine with all its rows busy."""
    rows: Annotated[Whole, Field(ge=1, le=4096)] = 16
    """Samples at a time."""
    speed_spread: Spread = 0.0
    """Standard deviation of the logarithm of the speed, over the machines."""
    down_mbit_s: Positive = 100.0
    up_mbit_s: Positive = 20.0
    region: str = ""
    swap_s: Seconds = 0.1
    """To change weights in an engine with nothing in it."""
    deliver_s: Seconds = 0.0
    """From the last sample of a slot to its file at the coordinator, beside the link: scoring, writing, waiting for a processor.
    The engine goes on meanwhile."""
    stays_s: Seconds = 0.0
    """Mean time until it leaves without a word; 0: it stays."""
    away_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """Mean time until it is back."""
    continuous: Flag = True
    """Whether samples enter while others run; else a slot ends before the next begins."""
    conduct: Conduct = "honest"
    forged_share: Share = 0.25
    """Of the groups of a key that forges."""


class Network(Section):
    between_regions_mbit_s: Positive = 1e5
    """Of one download from a relay of another region."""
    latency_s: Seconds = 0.3
    """From the publication of a version until a worker receives it: head, hops, verification."""


class SwarmSpec(Section):
    run: Run = Run()
    settings: dict[str, dict[str, Any]] = {}
    """Settings of a run file, by section."""
    work: Work
    weights: Weights
    trainer: TrainerSpec
    validators: ValidatorSpec = ValidatorSpec()
    coordinator: CoordinatorSpec = CoordinatorSpec()
    origin: Link = Link()
    network: Network = Network()
    relays: tuple[RelaySpec, ...] = ()
    workers: Annotated[tuple[WorkerSpec, ...], Field(min_length=1)]

    def config(self) -> ShoalConfig:
        tree = {name: dict(values) for name, values in self.settings.items()}
        tree.setdefault("run", {})["steps"] = 10 * self.run.steps + 1000  # the end of a run is no part of a scenario
        return build_config(tree)

    @property
    def machines(self) -> int:
        return sum(group.count for group in self.workers)


def bundled_names() -> list[str]:
    return sorted(path.stem for path in BUNDLED.glob("*.toml"))


def load_scenario(where: str | Path) -> SwarmSpec:
    """A scenario of the package by its name, or a file."""
    return build_scenario(_read(where))


def _read(where: str | Path) -> dict[str, Any]:
    path = Path(where)
    try:
        if path.name == str(where) and not path.suffix and not path.exists():
            path = BUNDLED / f"{where}.toml"
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no scenario {where}.", hint=_nearest_name(str(where))) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{where} is a directory, not a scenario.", hint="Name a file, or a run's directory."
        ) from None
    except OSError as error:
        raise ConfigError(f"The scenario {where} cannot be read: {error.strerror}.") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # of the parser: also numbers of 5,000 digits, and brackets without end
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def build_scenario(tree: Mapping[str, Any]) -> SwarmSpec:
    if not tree:
        raise ConfigError("The scenario is empty.", hint=f"Copy one of the package: {BUNDLED}.")
    try:
        spec = SwarmSpec.model_validate(tree)
    except ValidationError as error:
        raise _refusal(error) from None
    _require_memory(spec, spec.config())
    _require_names(spec)
    if all(group.conduct != "honest" for group in spec.workers):
        raise ConfigError("Nobody in this swarm is honest.", hint='Add [[workers]] with conduct = "honest".')
    return spec


def with_values(spec: SwarmSpec, **sections: Mapping[str, Any]) -> SwarmSpec:
    """The scenario with other values in some of its sections; they are checked like those of a file."""
    tree = spec.model_dump(mode="json")
    return build_scenario(tree | {name: tree[name] | values for name, values in sections.items()})


def _require_names(spec: SwarmSpec) -> None:
    """Keys and draws of a worker follow from its name."""
    names = [group.name for group in spec.workers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"Two classes of workers are called {twice!r}.", hint="Give each [[workers]] its own name.")
    if "steps" in spec.settings.get("run", {}):
        raise ConfigError("settings.run.steps has no effect.", hint="Did you mean run.steps?")


def _require_memory(spec: SwarmSpec, config: ShoalConfig) -> None:
    samples = config.rollouts.tasks_per_slot * config.rollouts.group_size
    if samples > MOST_SAMPLES:
        raise ConfigError(
            f"A slot of {samples:,} samples is too large to simulate.",
            hint=f"rollouts.tasks_per_slot times rollouts.group_size is at most {MOST_SAMPLES:,}.",
        )
    rows = sum(group.count * group.rows for group in spec.workers)
    if spec.machines > MOST_MACHINES or rows > MOST_ROWS:
        raise ConfigError(
            f"{spec.machines:,} workers with {rows:,} rows are too many to simulate.",
            hint=f"At most {MOST_MACHINES:,} workers and {MOST_ROWS:,} rows; simulate a part, with a batch as much smaller.",
        )


HINTS = {
    "relays.count": "Without relays leave [[relays]] out: then the origin serves the workers.",
    "validators.count": "Without a validator no file is accepted and no step is trained.",
    "workers.count": "A class of workers without a machine is left out.",
}


def _refusal(error: ValidationError) -> ConfigError:
    found = error.errors()
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"Unknown key {place}.", hint=_nearest_key(place))
    if first["type"] == "missing":
        what = f"[{place}]" if place in SwarmSpec.model_fields else place
        return ConfigError(f"The scenario has no {what}.", hint="docs/design/simulation.md has every key.")
    if first["type"] == "model_type":
        return ConfigError(f"{place} is no section.", hint=f"Write [{place}] and its keys below.")
    if place in ("workers", "relays") and first["type"] == "tuple_type":
        return ConfigError(f"{place} is no list of classes.", hint=f"Write [[{place}]] with two brackets.")
    if first["type"] == "string_pattern_mismatch":
        return ConfigError(f"{place} = {first['input']!r} cannot be printed.", hint="Leave control characters out.")
    if place == "workers":
        return ConfigError("The swarm is empty.", hint="Add [[workers]] with name, count and tokens_per_s.")
    hint = HINTS.get(_without_numbers(place), "") if first["input"] == 0 else ""
    hint = hint or "docs/design/simulation.md has every key."
    return ConfigError(f"{place} = {first['input']!r} is wrong: {first['msg'].lower()}.", hint=hint)


def _without_numbers(place: str) -> str:
    """Numbers of tables in a list are no part of a key."""
    return ".".join(part for part in place.split(".") if not part.isdigit())


def all_keys() -> list[str]:
    return list(_keys(SwarmSpec, ""))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        inner = [kind for kind in (info.annotation, *getattr(info.annotation, "__args__", ())) if _is_section(kind)]
        for kind in inner:
            yield from _keys(kind, f"{prefix}{name}.")


def _setting_keys() -> list[str]:
    sections = [f"settings.{name}" for name in ShoalConfig.model_fields]
    return sections + [f"settings.{key}" for key in all_settings()]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _nearest_key(place: str) -> str:
    """The same name in another section, else the most similar key, else the most similar name."""
    wanted, keys = _without_numbers(place).lower(), [*all_keys(), *_setting_keys()]
    name, by_name = wanted.split(".")[-1], {key.split(".")[-1]: key for key in reversed(keys)}
    matches = [by_name[name]] if name in by_name else difflib.get_close_matches(wanted, keys, n=1, cutoff=0.6)
    if not matches:
        matches = [by_name[near] for near in difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)]
    return f"Did you mean {matches[0]}?" if matches else f"Sections: {', '.join(SwarmSpec.model_fields)}."


def _nearest_name(name: str) -> str:
    stem = Path(name).stem.lower()
    near = [one for one in bundled_names() if stem and stem in one]
    near = near or difflib.get_close_matches(stem, bundled_names(), n=1, cutoff=0.5)
    known = f"The package has {', '.join(bundled_names())}."
    return f"Did you mean {near[0]}? {known}" if near else f"Give a file, or one of these. {known}"
