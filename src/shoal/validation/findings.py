"""What a check of a submission found: a reason code with one sentence that points at the row."""

from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.protocol.verdicts import Reason


@dataclass(frozen=True)
class Finding:
    reason: Reason
    detail: str


class RejectedError(ShoalError):
    """Carries a finding out of nested checks."""

    code = "rejected"
    permanent = False

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.finding = Finding(reason, detail)
