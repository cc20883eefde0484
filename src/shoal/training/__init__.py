"""The training engine: from validated groups to the next policy version."""

from shoal.training.advantages import ADVANTAGES
from shoal.training.checkpoints import CheckpointError, Checkpoints
from shoal.training.corrections import CORRECTIONS
from shoal.training.distributed import World
from shoal.training.losses import LOSSES, TokenBatch, TokenLoss
from shoal.training.model import UnsupportedModelError
from shoal.training.reports import StepReport
from shoal.training.samples import BatchError, Group, Sample
from shoal.training.trainer import DivergedError, Trainer

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "LOSSES",
    "BatchError",
    "CheckpointError",
    "Checkpoints",
    "DivergedError",
    "Group",
    "Sample",
    "StepReport",
    "TokenBatch",
    "TokenLoss",
    "Trainer",
    "UnsupportedModelError",
    "World",
]
