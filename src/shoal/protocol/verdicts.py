"""The reasons for which a validator may reject a submission, and how severe each is.

A *proof* shows that the worker lied: its stake is slashed and its key banned. An *anomaly* can happen to an honest worker,
rarely: trust falls and audits rise. A *fault* is not the worker's: the work is tried again or expires, without a penalty.
"""

from collections.abc import Iterable
from enum import StrEnum

SOLVED = 1.0 - 1e-9
"""A task reward from here on counts as solved."""


class Severity(StrEnum):
    PROOF = "proof"
    ANOMALY = "anomaly"
    FAULT = "fault"


class Reason(StrEnum):
    SCHEMA = "schema"
    HEADER = "header"
    ASSIGNMENT = "assignment"
    BOUNDS = "bounds"
    REWARD = "reward"
    REWARD_TOLERANT = "reward_tolerant"
    TERMINATION = "termination"
    REPLAY = "replay"
    REPLAY_TOLERANT = "replay_tolerant"
    SAMPLING = "sampling"
    SAMPLING_DRIFT = "sampling_drift"
    LOGPROBS = "logprobs"
    PROOF_FORMAT = "proof_format"
    PROOF_FORGED = "proof_forged"
    COMMITMENT = "commitment"
    ENVIRONMENT = "environment"
    NUMERICS_UNKNOWN = "numerics_unknown"
    VERSION_GONE = "version_gone"
    FILE_GONE = "file_gone"
    VALIDATOR_CRASH = "validator_crash"


REASONS: dict[Reason, tuple[Severity, str]] = {
    Reason.SCHEMA: (Severity.PROOF, "the signed file is not a rollout file of the agreed columns and sizes"),
    Reason.HEADER: (Severity.PROOF, "the signed file names another run, lease, worker or policy version"),
    Reason.ASSIGNMENT: (Severity.PROOF, "tasks, prompts, targets or samples are not those that the slot seed gives"),
    Reason.BOUNDS: (Severity.PROOF, "a token, length, log-probability or reward lies outside its range"),
    Reason.REWARD: (Severity.PROOF, "a claimed reward differs from the one of an exact verifier"),
    Reason.REWARD_TOLERANT: (Severity.ANOMALY, "many claimed rewards differ from those of a tolerant verifier"),
    Reason.TERMINATION: (Severity.PROOF, "a completion ends without an end token and below the limit"),
    Reason.REPLAY: (Severity.PROOF, "an environment, replayed, does not give what the completion shows"),
    Reason.REPLAY_TOLERANT: (Severity.ANOMALY, "many episodes differ from what a tolerant environment gives here"),
    Reason.SAMPLING: (Severity.PROOF, "a token is not the one that the seed selects from the policy"),
    Reason.SAMPLING_DRIFT: (Severity.ANOMALY, "more rounding flips than honest numerics make"),
    Reason.LOGPROBS: (Severity.ANOMALY, "claimed log-probabilities differ from the policy's"),
    Reason.PROOF_FORMAT: (Severity.PROOF, "commitments are missing, surplus or malformed"),
    Reason.PROOF_FORGED: (Severity.PROOF, "a commitment is a degenerate polynomial that no honest state gives"),
    Reason.COMMITMENT: (Severity.PROOF, "commitments do not fit the states of the policy"),
    Reason.ENVIRONMENT: (Severity.FAULT, "an environment comes to other results each time"),
    Reason.NUMERICS_UNKNOWN: (Severity.FAULT, "no calibration covers this engine, dtype and device"),
    Reason.VERSION_GONE: (Severity.FAULT, "the policy version is no longer available for the audit"),
    Reason.FILE_GONE: (Severity.FAULT, "the uploaded bytes can no longer be read"),
    Reason.VALIDATOR_CRASH: (Severity.FAULT, "the validator failed, not the worker"),
}
WORDS = {str(reason): words for reason, (_, words) in REASONS.items()}


def severity(reason: Reason) -> Severity:
    return REASONS[reason][0]


def public_reason(reason: str) -> str:
    """A reason without its measurements: everybody may read it, and learns nothing about margins and limits."""
    codes = [code.strip() for code in reason.partition(":")[0].split(",")]
    known = [WORDS[code] for code in codes if code in WORDS]
    return "; ".join(f"{code}: {words}" for code, words in zip(codes, known, strict=True)) if known else reason


def most_severe(reasons: Iterable[Reason]) -> Severity | None:
    severities = {severity(reason) for reason in reasons}
    return next(
        (candidate for candidate in (Severity.PROOF, Severity.ANOMALY, Severity.FAULT) if candidate in severities), None
    )


def is_useful(task_rewards: Iterable[float]) -> bool:
    """Whether a group carries a training signal: the task rewards of its samples are not all equal."""
    return len(set(task_rewards)) > 1
