"""The policy in memory: model loading, publication of its weights, and the engines that generate and score."""

from shoal.policy.directory import ArchitectureError, ModelError, bundled_directory, resolve_model
from shoal.policy.embedded.engine import TorchEngine
from shoal.policy.engine import (
    Completion,
    Engine,
    EngineBusyError,
    GenerationRequest,
    RequestError,
    Scored,
    ScoreRequest,
    Stream,
    WeightsNotLoadedError,
)
from shoal.policy.memory import NotEnoughMemoryError
from shoal.policy.models import build_empty_model, build_model
from shoal.policy.weights import WireCopy, load_weights

__all__ = [
    "ArchitectureError",
    "Completion",
    "Engine",
    "EngineBusyError",
    "GenerationRequest",
    "ModelError",
    "NotEnoughMemoryError",
    "RequestError",
    "ScoreRequest",
    "Scored",
    "Stream",
    "TorchEngine",
    "WeightsNotLoadedError",
    "WireCopy",
    "build_empty_model",
    "build_model",
    "bundled_directory",
    "load_weights",
    "resolve_model",
]
