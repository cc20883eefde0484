"""Where the metrics of a step go: JSON lines always, TensorBoard and Weights & Biases by config.

One line per trained step, in `steps.jsonl`; a step that was trained again after a kill appears again, with the same values but
the times. Only numbers go to the other trackers; W&B honours WANDB_MODE=offline.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ConfigError


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "steps.jsonl").open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, directory: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise _missing("wandb") from None
        try:
            # A fixed id: a resumed run continues its own curve.
            self._run = wandb.init(
                project="shoal", name=run_name, id=run_name, resume="allow", dir=str(directory), config=dict(settings)
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"training.trackers names 'wandb', which cannot be used: {reason}.",
                hint="Log in with `wandb login`, set WANDB_MODE=offline, or remove it from training.trackers.",
            ) from None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run behind one `log`."""

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = (),
        *,
        run_name: str = "run",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._trackers: list[Tracker] = [JsonLines(directory)]
        if "tensorboard" in names:
            self._trackers.append(TensorBoard(directory))
        if "wandb" in names:
            self._trackers.append(WeightsAndBiases(directory, run_name, settings or {}))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Scalars, and histograms as one scalar per bar."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float)):
            numbers[name] = float(value)
        elif isinstance(value, Mapping):
            numbers |= {f"{name}/{bar}": float(count) for bar, count in value.items()}
    return numbers


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"training.trackers names {package!r}, which is not installed.",
        hint=f"Run `pip install 'shoal[tracking]'`, or `pip install {package}`.",
    )
