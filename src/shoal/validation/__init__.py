"""Trusted judgement: staged checks of submissions, calibration of their limits, and held-out evaluation."""

from shoal.evaluation.evaluator import Evaluator
from shoal.validation.calibration.limits import Calibration, Limits, load_calibration
from shoal.validation.checks import Checked, Finding, RejectedError, audit, check_claims
from shoal.validation.validator import Validator

__all__ = [
    "Calibration",
    "Checked",
    "Evaluator",
    "Finding",
    "Limits",
    "RejectedError",
    "Validator",
    "audit",
    "check_claims",
    "load_calibration",
]
