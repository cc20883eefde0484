"""What a validator may say, and what each word means for the worker.

A *proof* shows that the worker lied: its stake is slashed and its key banned. An *anomaly* can happen to the honest, rarely:
trust falls and audits rise. A *fault* is nobody's: the work is tried again or expires without blame.
"""

from enum import StrEnum

SOLVED = 1.0 - 1e-9
"""A task reward from here on counts as solved."""


class Weight(StrEnum):
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
    SAMPLING = "sampling"
    SAMPLING_DRIFT = "sampling_drift"
    LOGPROBS = "logprobs"
    PROOF_FORMAT = "proof_format"
    PROOF_FORGED = "proof_forged"
    COMMITMENT = "commitment"
    NUMERICS_UNKNOWN = "numerics_unknown"
    VERSION_GONE = "version_gone"
    FILE_GONE = "file_gone"
    VALIDATOR_CRASH = "validator_crash"


REASONS: dict[Reason, tuple[Weight, str]] = {
    Reason.SCHEMA: (Weight.PROOF, "the signed file is not a rollout file of the agreed columns and sizes"),
    Reason.HEADER: (Weight.PROOF, "the signed file names another run, lease, worker or policy version"),
    Reason.ASSIGNMENT: (Weight.PROOF, "tasks, prompts, targets or samples are not those that the slot seed gives"),
    Reason.BOUNDS: (Weight.PROOF, "a token, length, log-probability or reward lies outside its range"),
    Reason.REWARD: (Weight.PROOF, "a claimed reward differs from the one of an exact verifier"),
    Reason.REWARD_TOLERANT: (Weight.ANOMALY, "many claimed rewards differ from those of a tolerant verifier"),
    Reason.TERMINATION: (Weight.PROOF, "a completion ends without an end token and below the limit"),
    Reason.SAMPLING: (Weight.PROOF, "a token is not the one that the seed draws from the policy"),
    Reason.SAMPLING_DRIFT: (Weight.ANOMALY, "more near-ties were lost than honest arithmetic loses"),
    Reason.LOGPROBS: (Weight.ANOMALY, "claimed log-probabilities differ from the policy's"),
    Reason.PROOF_FORMAT: (Weight.PROOF, "commitments are missing, surplus or malformed"),
    Reason.PROOF_FORGED: (Weight.PROOF, "a commitment is a degenerate polynomial that no honest state gives"),
    Reason.COMMITMENT: (Weight.PROOF, "commitments do not fit the states of the policy"),
    Reason.NUMERICS_UNKNOWN: (Weight.FAULT, "no calibration covers this engine, dtype and device"),
    Reason.VERSION_GONE: (Weight.FAULT, "the policy version is no longer available to judge by"),
    Reason.FILE_GONE: (Weight.FAULT, "the uploaded bytes can no longer be read"),
    Reason.VALIDATOR_CRASH: (Weight.FAULT, "the validator failed, not the worker"),
}


def weight(reason: Reason) -> Weight:
    return REASONS[reason][0]


def heaviest(reasons: list[Reason]) -> Weight | None:
    weights = {weight(reason) for reason in reasons}
    return next((candidate for candidate in (Weight.PROOF, Weight.ANOMALY, Weight.FAULT) if candidate in weights), None)
