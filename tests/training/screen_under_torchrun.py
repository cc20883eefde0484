"""Started by torchrun from test_asking: screens a proposed batch, recalls one, hears of a rewind; each rank writes what it did."""

import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shoal.broadcast import Origin, OriginSettings
from shoal.config import build_config
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.training import Trainer, World
from shoal.training.service import TrainerService
from support.fake_coordinator import FakeCoordinator, Refuse
from support.samples import descriptor, keypair

from .test_service import GROUP_SIZE, record_batch

STEPS = 3


def coordinator_of(world: World) -> FakeCoordinator:
    """Batch 0 loses a group when it is screened, batch 1 diverges and is recalled. Only the main rank may ask about batches."""
    coordinator = FakeCoordinator()
    whole = record_batch(coordinator, 0)
    proposed = whole.model_copy(update={"state": "proposed"})
    coordinator.screenings = [
        proposed.model_copy(update={"attempt": 1, "groups": whole.groups[1:]}),
        whole.model_copy(update={"attempt": 1, "groups": whole.groups[1:]}),
    ]
    good = record_batch(coordinator, 1, groups=1).model_copy(update={"attempt": 1})
    record_batch(coordinator, 1, verified=True)  # its log-probabilities are far from the policy's
    coordinator.audited_batches = [good]
    record_batch(coordinator, 2)
    coordinator.batches[0] = api.BatchAnswer(batch=proposed)
    if not world.is_main:
        for path in ("/v1/batches", "/v1/versions", "/v1/run", "/v1/submissions"):  # files: one rank per node
            coordinator.refusals[path] = Refuse("asked", "Only the main rank may ask.")
    return coordinator


def main(model_dir: Path, root: Path, result: Path) -> None:
    torch.set_num_threads(1)
    training = {"learning_rate": 1e-2, "kl_beta": 0.0, "minibatches": 1, "kl_limit": 0.05, "device": "cpu"}
    config = build_config({"run": {"dir": root, "steps": STEPS}, "training": training | {"checkpoint_every": 1}})
    world = World.join("cpu")
    coordinator = coordinator_of(world)
    trainer = Trainer(config.training, model_dir, work_dir=root / "trainer", temperature=1.0, seed=7, world=world)
    origin = Origin(root / "origin", keypair("run"), OriginSettings(run_id="run-1")) if world.is_main else None
    run = descriptor(rollouts=descriptor().rollouts.model_copy(update={"group_size": GROUP_SIZE}))
    service = TrainerService(config, run, trainer, coordinator.client(keypair("trainer")), origin)
    trained: list[list[int]] = []
    train_step = trainer.train_step

    def noting(groups, settle=None):  # type: ignore[no-untyped-def]
        report = train_step(groups, settle)
        trained.append([report.groups])
        return report

    trainer.train_step = noting  # type: ignore[method-assign]
    assert service.run()
    weights = {name: whole(one.detach()).clone() for name, one in trainer.policy.model.named_parameters()}
    coordinator.line = api.LineAnswer(epoch=1)
    try:
        service.wait_for_batch(2)
        heard = ""
    except RefusedError as refusal:
        heard = refusal.code
    facts = {"trained": trained, "heard": heard, "screened": len(coordinator.screened), "weights": weights}
    result.with_suffix(f".{world.rank}").write_bytes(pickle.dumps(facts | {"recalls": len(coordinator.recall)}))
    world.barrier()
    world.leave()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
