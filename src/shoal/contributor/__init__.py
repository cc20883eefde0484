"""A contributor's side without a model: when a worker may work, how it is controlled, its service, its key. Never imports torch."""

from shoal.contributor.control import Control, Wish, WorkerStatus
from shoal.contributor.limits import Conditions, Hours, Limits, Rest, reason_to_rest
from shoal.contributor.watch import LimitWatch

__all__ = ["Conditions", "Control", "Hours", "LimitWatch", "Limits", "Rest", "Wish", "WorkerStatus", "reason_to_rest"]
