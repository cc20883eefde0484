"""Thresholds with their evidence: what honest arithmetic does at worst, and what the weakest forgery does at best.

One file per model; inside it one entry per numerics class (engine, compute dtype, device class), made from honest runs and from
forgeries, with the measured error rates beside the limits. A class that the file does not know is a fault, never a verdict.
"""

from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ConfigError


class Limits(BaseModel):
    """Beyond any of these an audit rejects."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    margin_max: float
    """One token that lost by more than this was not drawn from the policy with its seed."""
    margin_noise: float
    """Smaller margins are rounding; larger ones count as lost near-ties."""
    lost_per_1000: float
    """Lost near-ties per 1,000 tokens that honest arithmetic stays below."""
    lost_free: int
    """Lost near-ties that even a short submission may have."""
    exponent_mismatches: int
    """Of the k values of a chunk."""
    mantissa_mean: float
    mantissa_median: float
    logprob_error: float
    """Largest difference between a claimed and the recomputed log-probability."""


class Evidence(BaseModel):
    """What the limits were made from."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    honest_tokens: int
    honest_chunks: int
    honest_margin_max: float
    honest_lost_per_1000: float
    honest_exponent_mismatches: int
    honest_mantissa_mean: float
    honest_logprob_error: float
    forgeries: dict[str, dict[str, float]] = {}


class NumericsClass(BaseModel):
    model_config = ConfigDict(frozen=True)
    limits: Limits
    evidence: Evidence


class Calibration(BaseModel):
    model_config = ConfigDict(frozen=True)
    model: str
    made_with: str
    classes: dict[str, NumericsClass]

    def limits(self, numerics_class: str) -> Limits | None:
        known = self.classes.get(numerics_class)
        return known.limits if known else None


def load_calibration(path: str) -> Calibration:
    """`bundled`, or a file made by `shoal calibrate`."""
    try:
        if path == "bundled":
            text = files("shoal.validation").joinpath("calibrations/bundled.json").read_text()
        else:
            text = Path(path).read_text()
        return Calibration.model_validate_json(text)
    except OSError as error:
        raise ConfigError(
            f"The calibration {path} cannot be read: {error.strerror}.", hint="Make one with `shoal calibrate`."
        ) from None
    except ValidationError as error:
        raise ConfigError(f"{path} is not a calibration: {error.errors()[0]['msg']}.") from None
