"""Ranks of one training as processes with directories of their own: nodes without a shared disk.

Forked, so that torch is imported once; nothing may have used the process group of this process before.
"""

import multiprocessing
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.config import TrainingConfig
from shoal.errors import ShoalError
from shoal.training import Trainer
from support.ports import free_port

from .batches import make_groups
from .train_under_torchrun import whole

DEADLINE_S = 600


@dataclass(frozen=True)
class Outcome:
    """What one rank says at its end."""

    resumed_at: int | None = None
    weights: dict[str, torch.Tensor] | None = None
    losses: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    refusal: str = ""


def train_on_nodes(model_dir: Path, directories: list[Path], steps: int, **settings: Any) -> list[Outcome]:
    """Every directory belongs to one node with one rank. What the ranks say, by rank."""
    world = {"WORLD_SIZE": len(directories), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    fork, nodes = multiprocessing.get_context("fork"), []
    for rank, directory in enumerate(directories):
        directory.mkdir(parents=True, exist_ok=True)
        result = directory / f"outcome-{rank}.pkl"
        result.unlink(missing_ok=True)
        node = fork.Process(target=_run, args=(model_dir, directory, result, world | {"RANK": rank}, steps, settings))
        node.start()
        nodes.append((node, result))
    return [_outcome(node, result) for node, result in nodes]


def _outcome(node: Any, result: Path) -> Outcome:
    node.join(DEADLINE_S)
    if node.is_alive():
        node.kill()
    assert result.exists(), f"rank ended with {node.exitcode}"
    return Outcome(**pickle.loads(result.read_bytes()))


def _run(
    model_dir: Path, directory: Path, result: Path, place: dict[str, int], steps: int, settings: dict[str, Any]
) -> None:
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    loses_a_part = settings.pop("loses_a_part", False)
    config = TrainingConfig(**{"learning_rate": 1e-3, "kl_beta": 0.0, "device": "cpu", "warmup_steps": 0, **settings})
    trainer = Trainer(config, model_dir, work_dir=directory, temperature=0.9, seed=3)
    if loses_a_part and not trainer.world.is_main:
        _lose_a_part()
    try:
        outcome = _train(trainer, steps)
    except ShoalError as error:
        outcome = Outcome(refusal=str(error))
    result.write_bytes(pickle.dumps(vars(outcome)))
    trainer.world.barrier()  # a rank that leaves early would break the others' last words
    trainer.world.leave()


def _train(trainer: Trainer, steps: int) -> Outcome:
    resumed_at = trainer.step if trainer.resume() else None
    reports = [trainer.train_step(make_groups(trainer.step)) for _ in range(trainer.step, steps)]
    trainer.save()
    trainer.close()
    weights = {name: whole(one.detach()).clone() for name, one in trainer.policy.model.named_parameters()}
    losses = tuple(report.loss for report in reports)
    return Outcome(resumed_at, weights, losses, tuple(report.entropy for report in reports))


def _lose_a_part() -> None:
    """The disk of this node loses what was written to it before it is looked for."""
    from shoal.training import checkpoints
    from shoal.training.disks import missing_parts

    def losing(directory: Path, sizes: dict[str, int], names: list[str]) -> list[str]:
        for name in names:
            (directory / name).unlink()
        return missing_parts(directory, sizes, names)

    vars(checkpoints)["missing_parts"] = losing
