"""Cheats of a run whose versions are adapters: no adapter, an old one, one of another rank, one merged into bf16, another base.

The true policy is the last of some adapters that a trainer made one after the other with the demo's settings: stale ones are
as close as in a run. The stronger version of each proves with the true policy.
"""

import shutil
from pathlib import Path

import torch

from adversaries.arena import Arena, RememberingEngine, make_workload
from adversaries.cheats import Cheat, made_once, stale, stale_true_proofs, with_model
from shoal.config import LoraConfig, ShoalConfig
from shoal.files import WEIGHTS_FILE
from shoal.policy import bundled_directory
from shoal.policy.lora.files import write_adapter_config
from shoal.validation import Calibration, load_calibration
from shoal.validation.calibration.adapters import merged_model
from shoal.validation.calibration.forgeries import Forge, adapter_off, forged_weights, lower_rank, quantised
from support.local_run import LocalRun

LORA = LoraConfig(rank=16)
LEARNING_RATE = 2e-3
"""Ten times that of the demo's full training, as is usual."""
VERSIONS = 6


def make_adapter_arena(root: Path, config: ShoalConfig, calibration: Calibration | None = None) -> Arena:
    """The run of a config with the bundled policy as base."""
    known = (calibration or load_calibration("bundled")).of_kind(adapted=True)
    workload = make_workload(config, bundled_directory(), tuple(known.classes))
    arena = Arena(root, workload, train_adapters(root, config), None, known)  # type: ignore[arg-type]
    arena.validator = RememberingEngine(arena.engine())
    return arena


def train_adapters(root: Path, config: ShoalConfig) -> list[Path]:
    versions = [root / "weights" / str(number) for number in range(VERSIONS)]
    if not (versions[-1] / WEIGHTS_FILE).exists():
        changed = {
            "model": config.model.model_copy(update={"lora": LORA}),
            "training": config.training.model_copy(
                update={"learning_rate": LEARNING_RATE, "warmup_steps": 0, "groups_per_step": 8, "device": "cpu"}
            ),
        }
        run = LocalRun(config.model_copy(update=changed), 0, root)
        while run.trainer.step < VERSIONS - 1:
            run.step(0)
        run.trainer.close()
    for version in versions:
        write_adapter_config(version, LORA, base="bundled")
    return versions


def nearest_lower_rank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Half of the rank, chosen so that as little as possible of what the adapter adds is lost."""
    made = {}
    for name, down in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        up_name, rank = name.replace("lora_A", "lora_B"), len(down)
        left, sizes, right = torch.linalg.svd(tensors[up_name] @ down, full_matrices=False)
        sizes[rank // 2 :] = 0
        made[name] = right[:rank].contiguous()
        made[up_name] = (left * sizes)[:, :rank].contiguous()
    return made


def changed_adapter(forge: Forge, name: str, *, prove: bool = False) -> Cheat:
    def make(arena: Arena, path: Path) -> None:
        with forged_weights(arena.policy, forge) as forged:
            shutil.copytree(forged, path)

    return with_model(made_once(name, make), prove=prove)


def _merged(arena: Arena, path: Path) -> None:
    with merged_model(bundled_directory(), arena.policy, LORA) as merged:
        shutil.copytree(merged, path)


def _int8_base(arena: Arena, path: Path) -> None:
    """The true adapter, on a base in 8 bits."""
    with forged_weights(bundled_directory(), quantised(8)) as base:
        shutil.copytree(base, path.with_name(f"{path.name}-base"))
    for file in bundled_directory().glob("*token*"):
        (path.with_name(f"{path.name}-base") / file.name).write_bytes(file.read_bytes())
    shutil.copytree(arena.policy, path)
    write_adapter_config(path, LORA, base=str(path.with_name(f"{path.name}-base")))


ADAPTER_CHEATS: dict[str, Cheat] = {
    "stale_adapter_by_1": stale(1),
    "stale_adapter_by_2": stale(2),
    "stale_adapter_by_1_true_proofs": stale_true_proofs(1),
    "stale_adapter_by_2_true_proofs": stale_true_proofs(2),
    "adapter_off": changed_adapter(adapter_off, "off"),
    "adapter_off_true_proofs": changed_adapter(adapter_off, "off", prove=True),
    "adapter_lower_rank": changed_adapter(lower_rank, "lower-rank"),
    "adapter_lower_rank_true_proofs": changed_adapter(lower_rank, "lower-rank", prove=True),
    "adapter_nearest_rank": changed_adapter(nearest_lower_rank, "nearest-rank"),
}
ADAPTER_SLOW_CHEATS: dict[str, Cheat] = {
    "merged_bf16": with_model(made_once("merged", _merged)),
    "merged_bf16_true_proofs": with_model(made_once("merged", _merged), prove=True),
    "int8_base": with_model(made_once("int8-base", _int8_base)),
    "int8_base_true_proofs": with_model(made_once("int8-base", _int8_base), prove=True),
    "adapter_nearest_rank_true_proofs": changed_adapter(nearest_lower_rank, "nearest-rank", prove=True),
}
