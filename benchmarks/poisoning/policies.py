"""Versions of one short training with the demo's recipe, and the trainer's statistic of groups under each.

The versions are made once and kept, so that every part of the benchmark, in whichever process, speaks of the same ones.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.poisoning.recipe import demo
from shoal.policy import resolve_model
from shoal.training import ADVANTAGES, World
from shoal.training.model.model import PolicyModel, load_policy
from shoal.training.packing.batch import build_minibatch, choose_members
from shoal.training.packing.samples import Group
from shoal.training.screening import GroupScores

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun as LocalRun  # noqa: E402

__all__ = ["AGES", "VERSIONS", "LocalRun", "Policies", "honest"]

VERSIONS = 5
"""Trained after the bundled one: leases name versions 0 to 3, and the trainer is up to two ahead."""
AGES = (0, 1, 2)


class Policies:
    """The versions of one training, and the trainer's statistic under each."""

    def __init__(self, runs: Path) -> None:
        self.directory = runs / "policy"
        newest = self.directory / "weights" / str(VERSIONS) / "model.safetensors"
        if not newest.exists():
            shutil.rmtree(self.directory, ignore_errors=True)
        self.run = LocalRun(demo(), 0, self.directory if not newest.exists() else Path(tempfile.mkdtemp()))
        while not newest.exists():
            self.run.step(2)
        self.run._weights = self.directory / "weights"
        self._scorers: dict[int, PolicyModel] = {}

    def scorer(self, version: int) -> PolicyModel:
        if version not in self._scorers:
            with tempfile.TemporaryDirectory() as scratch:
                place = Path(scratch)
                for file in resolve_model("bundled").iterdir():
                    if file.is_file() and file.suffix != ".safetensors":
                        shutil.copy(file, place)
                shutil.copy(self.directory / "weights" / str(version) / "model.safetensors", place)
                self._scorers[version] = load_policy(place, temperature=1.0, world=World()).requires_grad_(False)
        return self._scorers[version]

    @torch.no_grad()
    def statistics(self, groups: Sequence[Group], version: int, temperature: float) -> list[float]:
        """As the trainer of that version would report them."""
        policy, config, scores = self.scorer(version), demo().training, GroupScores(len(groups), torch.device("cpu"))
        policy.temperature = temperature
        members = [member for group in choose_members(groups, ADVANTAGES["grpo"], config, 0) for member in group]
        built = build_minibatch(
            members, config.micro_batch_tokens, packed=policy.packed, rank=0, ranks=1, device=torch.device("cpu")
        )
        for micro_batch in built.micro_batches:
            scores.add(micro_batch, *policy(micro_batch.bin))
        return scores.statistics(World())


def honest(policies: Policies, temperature: float, version: int, chunk: int, count: int) -> dict[str, Any]:
    """Statistics by age of groups that only this temperature, version and chunk have."""
    run = policies.run
    run.config, run._random = demo(temperature), random.Random(f"honest/{temperature}/{version}/{chunk}")
    run.engine.load(policies.directory / "weights" / str(version))
    groups = run.generate(version, count)
    return {str(age): policies.statistics(groups, version + age, temperature) for age in AGES}
