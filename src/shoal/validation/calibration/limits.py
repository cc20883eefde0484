"""Limits of the audit with their evidence: what honest numerics do at worst, and what the weakest forgery does at best.

One file per model, which it names by digest; inside it one entry per numerics class (engine, compute dtype, device class), made
from honest runs and from forgeries, with the measured error rates beside the limits. A class that the file does not know is a
fault, never a verdict; a model that it was not made for is refused.
"""

import math
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.coordinator.rules.drift import BAN_AT
from shoal.errors import ConfigError
from shoal.evaluation.statistics import poisson_allowance
from shoal.files import CONFIG_FILE, digest_bytes, digest_file
from shoal.policy.engine import LORA_CLASS
from shoal.validation.flips import steerable_gap
from shoal.validation.ranks import Ladder

FALSE_DRIFTS = 1e-6
"""Per audited submission of an honest worker."""
FALSE_COMPARISONS = 0.01
"""Per pair of honest files of one slot: what follows is an audit, which costs little and penalises no worker."""

COMPUTE_TYPES = ("float32", "float16", "bfloat16")
"""From fine to coarse; any other is taken to be coarser."""


class Limits(BaseModel):
    """Beyond any of these an audit rejects."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    margin_max: float
    """One token with a larger margin was not sampled from the policy with its seed."""
    margin_noise: float
    """Smaller margins are rounding; larger ones count as rounding flips."""
    flips_per_1000: float
    """Rounding flips per 1,000 tokens that honest numerics stay below: an upper confidence bound."""
    flip_scale: float
    """By how much honest numerics move two scores against each other: an upper confidence bound; see `flips`."""
    exponent_mismatches: int
    """Of the k values of a chunk."""
    mantissa_mean: float
    mantissa_median: float
    logprob_error: float
    """Largest difference between a claimed and the recomputed log-probability."""
    commitment_ladders: list[Ladder] = []
    """What the sequential test makes of differences of commitments; see `ranks`. Without any, nothing."""

    def flips_allowed(self, tokens: int) -> int:
        """Rounding flips that an honest submission of this size exceeds once in a million times."""
        return poisson_allowance(self.flips_per_1000 * tokens / 1000, FALSE_DRIFTS)

    def flips_between(self, tokens: int) -> int:
        """Rounding flips between two honest files of one slot; each of them flips against the policy at this rate."""
        return poisson_allowance(2 * self.flips_per_1000 * tokens / 1000, FALSE_COMPARISONS)

    def residual_bits_per_1000(self, tie_density: float) -> float:
        """What a forger can still choose, in bits per 1,000 tokens: one per gap that it may decide the other way for good.

        The density of gaps at zero is d = E[1 − p(token)] per token. The sequential test does not rise while all ties below
        `steerable_gap` scales are lost. Margins below the noise are never counted, and none may exceed margin_max.
        """
        return 1000 * tie_density * min(self.margin_max, max(self.margin_noise, steerable_gap() * self.flip_scale))


class Forgery(BaseModel):
    """How many submissions with this one lie the limits let through."""

    model_config = ConfigDict(frozen=True)
    submissions: int
    missed: int
    missed_upper95: float
    margin_max: float
    flips_per_1000: float
    exponent_mismatches: int
    mantissa_mean: float
    drift_per_submission: float
    """Evidence that the sequential test's most sensitive alternative gains from each; if positive, even misses end in a ban."""

    @property
    def submissions_to_ban(self) -> int | None:
        """About how many audited ones the sequential test takes; None if it never bans."""
        return math.ceil(BAN_AT / self.drift_per_submission) if self.drift_per_submission > 0 else None


class FlipBin(BaseModel):
    """Close draws of one width: how many the honest workers lost, and how many the fitted scale expects."""

    model_config = ConfigDict(frozen=True)
    gap_below: float
    tokens: int
    flips: int
    expected: float


class Evidence(BaseModel):
    """What the limits were made from, and how they did on honest work and forgeries that were held back from making them."""

    model_config = ConfigDict(frozen=True)
    honest_tokens: int
    honest_chunks: int
    honest_margin_max: float
    honest_flips_per_1000: float
    honest_flip_margin_mean: float
    honest_flip_scale: float = 0.0
    """The most likely one; the limit is the upper end of its interval."""
    honest_flip_fit: list[FlipBin] = []
    honest_drift_largest: float = 0.0
    """Of the sequential test over the honest submissions that tested the limits, as if one key had sent them all."""
    honest_exponent_mismatches: int
    honest_mantissa_mean: float
    honest_logprob_error: float
    tie_density: float
    """Mean of 1 − p(token): density of gaps at zero, per token and unit of margin."""
    honest_submissions: int
    honest_rejected: int
    honest_false_reject_upper95: float
    residual_bits_per_1000_tokens: float
    forgeries: dict[str, Forgery] = {}

    @property
    def missed(self) -> dict[str, str]:
        """Each forgery that an audit let pass, with how many of how many, and when it is banned nevertheless."""
        return {name: _missed(forgery) for name, forgery in self.forgeries.items() if forgery.missed}


def _missed(forgery: Forgery) -> str:
    until = forgery.submissions_to_ban
    ends = f"banned after about {until} audits" if until else "never banned"
    return f"{forgery.missed} of {forgery.submissions}, {ends}"


class NumericsClass(BaseModel):
    model_config = ConfigDict(frozen=True)
    limits: Limits
    evidence: Evidence


class ModelIdentity(BaseModel):
    """What a calibration was measured on. Training moves the weights; the base that they started from stays."""

    model_config = ConfigDict(frozen=True)
    architecture: str
    """Digest of config.json."""
    base_weights: str = ""
    """Digest of the safetensors, in the order of their names; empty where only the architecture is known."""

    @classmethod
    def of(cls, directory: Path) -> "ModelIdentity":
        digests = "".join(digest_file(path) for path in sorted(directory.glob("*.safetensors")))
        return cls(architecture=digest_file(directory / CONFIG_FILE), base_weights=digest_bytes(bytes.fromhex(digests)))

    def difference(self, other: "ModelIdentity") -> str:
        """What is not the same, or nothing."""
        if self.architecture != other.architecture:
            return "architecture"
        both = self.base_weights and other.base_weights
        return "base weights" if both and self.base_weights != other.base_weights else ""


class Calibration(BaseModel):
    model_config = ConfigDict(frozen=True)
    model: str
    identity: ModelIdentity | None = None
    """None in files made by hand; they fit no model unless the owner says so."""
    made_with: str
    classes: dict[str, NumericsClass]

    def limits(self, numerics_class: str) -> Limits | None:
        known = self.classes.get(numerics_class)
        return known.limits if known else None

    def of_kind(self, *, adapted: bool) -> "Calibration":
        """Only classes of engines that add an adapter, or only those of engines that do not."""
        classes = {name: known for name, known in self.classes.items() if name.endswith(LORA_CLASS) is adapted}
        return self.model_copy(update={"classes": classes})

    def finest(self) -> tuple[str, ...]:
        """The classes of the finest compute type that was measured."""
        ranks = {name: _rank(name) for name in self.classes}
        return tuple(name for name, rank in ranks.items() if rank == min(ranks.values()))

    def cost(self, numerics_class: str) -> str:
        """What audits of this class let pass, in one sentence."""
        evidence = self.classes[numerics_class].evidence
        passed = ", ".join(f"{name} ({count})" for name, count in evidence.missed.items())
        return (
            f"{evidence.residual_bits_per_1000_tokens:.2f} bits per 1,000 tokens are left to a forger, and audits let pass "
            f"{passed or 'none of the forgeries that were tried'}"
        )

    def require_model(self, model: ModelIdentity) -> None:
        """Refuses a model that this was not measured on: limits of another one are too wide or too narrow."""
        differs = self.identity.difference(model) if self.identity else "identity"
        if differs:
            raise ConfigError(
                f"The calibration was made for the model {self.model!r}; this one has another {differs}.",
                hint="Make one with `shoal calibrate OUT RUN_FILE` and name it in validation.calibration, "
                "or set validation.foreign_calibration if you know that it fits.",
            )


def _rank(numerics_class: str) -> int:
    dtype = numerics_class.partition("/")[2].partition("/")[0]
    return COMPUTE_TYPES.index(dtype) if dtype in COMPUTE_TYPES else len(COMPUTE_TYPES)


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
            f"The calibration {path} cannot be read: {error.strerror}.",
            hint=f"Make it with `shoal calibrate {path} RUN_FILE`.",
        ) from None
    except ValidationError as error:
        raise ConfigError(f"{path} is not a calibration: {error.errors()[0]['msg']}.") from None
