"""The trainer that a run's settings describe: of all weights, or of an adapter."""

from pathlib import Path

from shoal.config import ShoalConfig
from shoal.policy import resolve_model
from shoal.policy.lora.checks import check_lora
from shoal.training.model.distributed import World
from shoal.training.trainer import Trainer


def build_trainer(
    config: ShoalConfig, work_dir: Path, *, model_dir: Path | None = None, world: World | None = None
) -> Trainer:
    """`model_dir` takes the place of the model, or base, that the settings name."""
    base = model_dir or resolve_model(config.model.path)
    start = check_lora(config.model, base)
    return Trainer(
        config.training,
        base,
        work_dir=work_dir,
        temperature=config.rollouts.temperature,
        seed=config.run.seed,
        max_new_tokens=config.rollouts.max_new_tokens,
        longest_row=config.rollouts.longest_row,
        steps=config.run.steps,
        lora=config.model.adapter,
        start=start,
        world=world,
    )
