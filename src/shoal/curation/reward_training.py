"""Fits a reward model to preference pairs: L = −log σ(s(chosen) − s(rejected))   (Bradley–Terry).

Starts from the backbone of a policy, so it reads the policy's tokens; accuracy is measured on pairs of held-out tasks. Resumable.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.nn.functional import logsigmoid

from shoal.curation.fitting import Fit, FitReport, FitSettings
from shoal.curation.preferences import Pair
from shoal.errors import ConfigError
from shoal.evaluation.statistics import Estimate, estimate
from shoal.files import TEMPORARY_PREFIX, write_atomic
from shoal.policy.reward_model import RewardModel, build_classifier, classify
from shoal.tasks import CODEC_FILES
from shoal.training import World

FACTS_FILE = "reward_model.json"
REWARD_FIT = FitSettings(epochs=2, batch=32, learning_rate=2e-4, warmup_steps=10)
"""For small backbones; billions of parameters want 1e-5 and one epoch."""


def train_reward_model(
    base: Path,
    pairs: Sequence[Pair],
    heldout: Sequence[Pair],
    output: Path,
    *,
    work_dir: Path,
    settings: FitSettings = REWARD_FIT,
    on_step: Callable[[FitReport], None] = lambda report: None,
) -> Estimate:
    """Writes the model directory; returns its accuracy on held-out pairs."""
    if not pairs or not heldout:
        raise ConfigError(
            f"{len(pairs)} training and {len(heldout)} held-out pairs are too few.",
            hint="Pairs need tasks with right and wrong completions; sample more tasks.",
        )
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} exists and is not empty.", hint="Name another directory, or remove it first.")
    world = World.join()
    torch.manual_seed(settings.seed)
    model = build_classifier(base).to(world.device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fit = Fit(model, settings, work_dir, world)
    plan = {"pairs": _digest(pairs), **asdict(settings)}
    fit.run(plan, len(pairs), lambda chosen: _learn(model, [pairs[index] for index in chosen], world), on_step)
    _save(model, base, output)
    return finish(output, pairs, heldout)


def _learn(model: Any, pairs: Sequence[Pair], world: World) -> float:
    sequences = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    scores = classify(model, sequences, world.device)
    loss: Tensor = -logsigmoid(scores[: len(pairs)] - scores[len(pairs) :]).mean()
    torch.autograd.backward(loss)
    return float(loss.detach())


def pair_accuracy(model: RewardModel, pairs: Sequence[Pair]) -> Estimate:
    """Share of pairs whose chosen completion scores higher; a tie is half right."""
    scores = model.scores([sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)])
    won = [
        0.5 * (1 + (chosen > rejected) - (chosen < rejected))
        for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)
    ]
    return estimate(won)


def finish(output: Path, pairs: Sequence[Pair], heldout: Sequence[Pair]) -> Estimate:
    """Measures what was saved, as the validator will load it, and writes the metrics beside it."""
    model = RewardModel(str(output))
    accuracy = pair_accuracy(model, heldout)
    facts = {
        "pairs": len(pairs),
        "heldout_pairs": len(heldout),
        "heldout_pair_accuracy": asdict(accuracy),
        "training_pair_accuracy": asdict(pair_accuracy(model, pairs[: len(heldout)])),
    }
    write_atomic(output / FACTS_FILE, json.dumps(facts, indent=2).encode() + b"\n")
    return accuracy


def _save(model: Any, base: Path, output: Path) -> None:
    """Whole or absent."""
    temporary = output.parent / f"{TEMPORARY_PREFIX}{output.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for name in CODEC_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, temporary / name)
    if output.exists():
        output.rmdir()
    temporary.rename(output)


def _digest(pairs: Sequence[Pair]) -> str:
    hasher = blake3()
    for pair in pairs:
        hasher.update(repr(pair).encode())
    return hasher.hexdigest()
