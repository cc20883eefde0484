"""Verification of submissions: staged checks, and the calibration of their limits."""

from shoal.validation.calibration.limits import Calibration, Limits, load_calibration
from shoal.validation.checks import Checked, audit, check_claims
from shoal.validation.findings import Finding, RejectedError
from shoal.validation.validator import Validator

__all__ = [
    "Calibration",
    "Checked",
    "Finding",
    "Limits",
    "RejectedError",
    "Validator",
    "audit",
    "check_claims",
    "load_calibration",
]
