"""Started by torchrun from test_distributed: trains a few steps and writes what came out."""

import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shoal.config import LoraConfig, TrainingConfig
from shoal.training import Trainer

from .batches import make_groups


def main(model_dir: Path, work_dir: Path, result: Path, steps: int, rank: int) -> None:
    """With a rank an adapter is trained."""
    torch.set_num_threads(1)
    config = TrainingConfig(
        learning_rate=1e-3,
        warmup_steps=2,
        kl_beta=0.01,
        entropy_eta=0.01,
        micro_batch_tokens=24,
        device="cpu",
        activation_checkpointing=True,
        dither_masters=True,
    )
    lora = LoraConfig(rank=rank, alpha=8) if rank else None
    trainer = Trainer(config, model_dir, work_dir=work_dir, temperature=0.9, seed=3, lora=lora)
    resumed_at = trainer.step if trainer.resume() else None
    reports = [trainer.train_step(make_groups(trainer.step)) for _ in range(trainer.step, steps)]
    trainer.save()
    trainer.close()
    wire = {tensor.name: bytes(tensor.data) for tensor in trainer.wire_tensors()}
    parameters = dict(trainer.policy.model.named_parameters())
    weights = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
    if trainer.world.is_main:
        result.write_bytes(pickle.dumps((resumed_at, [report.as_dict() for report in reports], weights, wire)))
    trainer.world.leave()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:6]))
