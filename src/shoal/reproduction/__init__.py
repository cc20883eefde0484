"""A finished run, repeated from what it left behind: training steps bit for bit, verdicts from their files, one page about it."""

from shoal.reproduction.evidence import Evidence, ReproductionError, read_evidence
from shoal.reproduction.page import headline, render_page
from shoal.reproduction.repeat import Reproduction, StepOutcome, reproduce

__all__ = [
    "Evidence",
    "Reproduction",
    "ReproductionError",
    "StepOutcome",
    "headline",
    "read_evidence",
    "render_page",
    "reproduce",
]
