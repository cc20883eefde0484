"""One tree of settings describes one run."""

from shoal.config.files import build_config, load_config, to_toml
from shoal.config.reference import Change, Setting, all_keys, all_settings, changes
from shoal.config.schema import (
    TASK_PART,
    BroadcastConfig,
    CoordinatorConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ShoalConfig,
    TasksConfig,
    TrainingConfig,
    TrustConfig,
    ValidationConfig,
)

__all__ = [
    "TASK_PART",
    "BroadcastConfig",
    "Change",
    "CoordinatorConfig",
    "EvaluationConfig",
    "LoraConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Setting",
    "ShoalConfig",
    "TasksConfig",
    "TrainingConfig",
    "TrustConfig",
    "ValidationConfig",
    "all_keys",
    "all_settings",
    "build_config",
    "changes",
    "load_config",
    "to_toml",
]
