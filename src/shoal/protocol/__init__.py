"""What roles say to each other: run descriptor, assignment, rollout file, API bodies, signed HTTP."""

from shoal.protocol.assignment import TaskAssignment, assign, slot_seed
from shoal.protocol.client import CoordinatorClient, fetch_descriptor
from shoal.protocol.descriptor import FileReference, RunDescriptor, open_descriptor
from shoal.protocol.rollouts import (
    Rollout,
    RolloutFileError,
    RolloutHeader,
    RolloutLimits,
    read_rollouts,
    write_rollouts,
)
from shoal.protocol.signing import PROTOCOL_VERSION
from shoal.protocol.steps import StepId, VersionId, secret_commitment, step_commitment, step_secret
from shoal.protocol.verdicts import REASONS, Reason, Severity, most_severe, severity

__all__ = [
    "PROTOCOL_VERSION",
    "REASONS",
    "CoordinatorClient",
    "FileReference",
    "Reason",
    "Rollout",
    "RolloutFileError",
    "RolloutHeader",
    "RolloutLimits",
    "RunDescriptor",
    "Severity",
    "StepId",
    "TaskAssignment",
    "VersionId",
    "assign",
    "fetch_descriptor",
    "most_severe",
    "open_descriptor",
    "read_rollouts",
    "secret_commitment",
    "severity",
    "slot_seed",
    "step_commitment",
    "step_secret",
    "write_rollouts",
]
