"""One rank of a training, started by tests as its own process with a directory of its own: a node without a shared disk."""

import json
import os
import pickle
import subprocess
import sys
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

TESTS = Path(__file__).parents[1]


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
    arguments = [str(steps), json.dumps(settings)]
    nodes = [
        _start(model_dir, directory, world | {"RANK": rank}, arguments) for rank, directory in enumerate(directories)
    ]
    outcomes = []
    for process, result in nodes:
        output = process.communicate(timeout=280)[1]
        assert result.exists(), output[-3000:]
        outcomes.append(Outcome(**pickle.loads(result.read_bytes())))
    return outcomes


def _start(
    model_dir: Path, directory: Path, place: dict[str, int], arguments: list[str]
) -> "tuple[subprocess.Popen[str], Path]":
    env = os.environ | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    directory.mkdir(parents=True, exist_ok=True)
    result = directory / f"outcome-{place['RANK']}.pkl"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "training.node", str(model_dir), str(directory), str(result), *arguments]
    return subprocess.Popen(command, cwd=TESTS, env=env, stderr=subprocess.PIPE, text=True), result


def main(model_dir: Path, directory: Path, result: Path, steps: int, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    loses_a_part = settings.pop("loses_a_part", False)
    config = TrainingConfig(**{"learning_rate": 1e-3, "kl_beta": 0.0, "device": "cpu", "warmup_steps": 0, **settings})
    trainer = Trainer(config, model_dir, work_dir=directory, temperature=0.9, seed=3)
    if loses_a_part and not trainer.world.is_main:
        lose_a_part()
    try:
        outcome = _train(trainer, steps)
    except ShoalError as error:
        outcome = Outcome(refusal=str(error))
    result.write_bytes(pickle.dumps(vars(outcome)))
    if not outcome.refusal:
        trainer.world.barrier()
    trainer.world.leave()


def _train(trainer: Trainer, steps: int) -> Outcome:
    resumed_at = trainer.step if trainer.resume() else None
    reports = [trainer.train_step(make_groups(trainer.step)) for _ in range(trainer.step, steps)]
    trainer.save()
    trainer.close()
    weights = {name: whole(one.detach()).clone() for name, one in trainer.policy.model.named_parameters()}
    losses = tuple(report.loss for report in reports)
    return Outcome(resumed_at, weights, losses, tuple(report.entropy for report in reports))


def lose_a_part() -> None:
    """The disk of this node loses what was written to it before it is looked for."""
    from shoal.training import checkpoints
    from shoal.training.disks import missing_parts

    def losing(directory: Path, sizes: dict[str, int], names: list[str]) -> list[str]:
        for name in names:
            (directory / name).unlink()
        return missing_parts(directory, sizes, names)

    vars(checkpoints)["missing_parts"] = losing


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
