"""The training engine: from validated groups to the next policy version."""

from shoal.training.building import build_trainer
from shoal.training.checkpoints import Checkpoints
from shoal.training.disks import CheckpointError
from shoal.training.export import ExportError, RunFacts, export_policy, latest_checkpoint
from shoal.training.memory import ModelShape, TrainerMemory, model_shape, plan_memory
from shoal.training.model.distributed import World
from shoal.training.model.layouts import UnsupportedModelError
from shoal.training.objective.advantages import ADVANTAGES
from shoal.training.objective.corrections import CORRECTIONS
from shoal.training.objective.losses import LOSSES, TokenBatch, TokenLoss
from shoal.training.packing.samples import BatchError, Group, Sample
from shoal.training.replay import ReplayError, recorded_groups, replay
from shoal.training.reports import StepReport
from shoal.training.trackers import Trackers
from shoal.training.trainer import DivergedError, Trainer

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "LOSSES",
    "BatchError",
    "CheckpointError",
    "Checkpoints",
    "DivergedError",
    "ExportError",
    "Group",
    "ModelShape",
    "ReplayError",
    "RunFacts",
    "Sample",
    "StepReport",
    "TokenBatch",
    "TokenLoss",
    "Trackers",
    "Trainer",
    "TrainerMemory",
    "UnsupportedModelError",
    "World",
    "build_trainer",
    "export_policy",
    "latest_checkpoint",
    "model_shape",
    "plan_memory",
    "recorded_groups",
    "replay",
]
