"""Repeats the training of a run from its files, step by step, and compares the digest of every version with the ledger's.

Begins at the base model, or at a checkpoint whose weights the ledger vouches for. The first step that does not come out as recorded
is named, and with it whether its inputs or the numerics differ. On another class of machine bits may differ: there a step counts
as repeated if its weights lie within `TOLERANCE` of the recorded ones, measured against how far training had moved them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from shoal.broadcast import WireTensor
from shoal.broadcast.manifest import digest_weights
from shoal.broadcast.wire import tensor_entry
from shoal.errors import ShoalError
from shoal.metrics import Report, silent
from shoal.policy import resolve_model
from shoal.policy.weights import published_tensors
from shoal.reproduction.copies import changed_copies, weights_at
from shoal.reproduction.evidence import Evidence, ReproductionError
from shoal.reproduction.history import RecordedFile
from shoal.reproduction.verdicts import Auditor, RepeatedVerdict
from shoal.rundir import checkpoint_path, checkpoint_steps, checkpoints_of
from shoal.training.building import build_trainer
from shoal.training.machine import TrainingMachine
from shoal.training.trainer import DivergedError, Trainer

TOLERANCE = 0.05
"""Largest distance to the recorded weights on another class of machine, as a share of the way from the first version."""

State = Literal["identical", "close", "unmeasured", "differs", "impossible"]


@dataclass(frozen=True)
class StepOutcome:
    step: int
    state: State
    recorded: str = ""
    """Digest of the version that the step made."""
    repeated: str = ""
    groups: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether training may go on from it; what could not be measured is settled by a later step."""
        return self.state in ("identical", "close", "unmeasured")


@dataclass(frozen=True)
class _Scene:
    """What a repetition works with."""

    trainer: Trainer
    auditor: Auditor
    base: Path
    first: Mapping[str, Tensor]
    """The weights that it began with; only where they are needed to measure a distance."""


@dataclass
class Reproduction:
    evidence: Evidence
    machine: TrainingMachine
    began_at: int
    """The step before which the weights were taken as they are: 0 is the base model."""
    start: StepOutcome
    """The weights that it began with, compared with the ledger's."""
    steps: list[StepOutcome] = field(default_factory=list)
    verdicts: list[RepeatedVerdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Why something was not repeated."""

    @property
    def same_class(self) -> bool:
        return self.evidence.machine is None or self.evidence.machine == self.machine

    @property
    def first_difference(self) -> StepOutcome | None:
        return next((outcome for outcome in [self.start, *self.steps] if not outcome.ok), None)

    @property
    def ok(self) -> bool:
        agreed = all(verdict.agrees for verdict in self.verdicts)
        return not self.evidence.findings and self.first_difference is None and agreed and self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether the last step was compared with recorded weights."""
        return bool(self.steps) and self.steps[-1].state in ("identical", "close")


def reproduce(
    evidence: Evidence,
    scratch: Path,
    *,
    steps: Sequence[int] | None = None,
    sample: int = 8,
    model: Path | None = None,
    report: Report = silent,
) -> Reproduction:
    """Repeats the chosen steps, or all; `scratch` takes weights and is the caller's to remove."""
    unended = evidence.history.in_training()
    wanted = sorted(set(evidence.history.steps).difference(unended) if steps is None else set(steps))
    if unknown := [step for step in wanted if step not in evidence.history.steps]:
        raise ReproductionError(f"Step {unknown[0]} is not recorded in the ledger.", hint=_range(evidence))
    if not wanted:
        raise ReproductionError("The ledger records no training step that has ended.", hint="Let the run go on first.")
    base = model or resolve_model(evidence.config.model.path)
    for changed in changed_copies(evidence, base):
        evidence.findings.append(changed)
        report(changed)
    began_at = _begin_at(evidence, wanted[0])
    trainer = _trainer(evidence, base, scratch, began_at)
    machine = TrainingMachine.here(evidence.config.training.device)
    result = Reproduction(evidence, machine, began_at, _begin(evidence, trainer))
    result.notes += [f"Step {step} was in training: its version is not in the ledger." for step in unended]
    auditor = Auditor(evidence, base, scratch)
    drawn = auditor.draw(sample, range(began_at, wanted[-1] + 2))
    first = (
        {}
        if result.same_class
        else {name: one.clone() for name, one in published_tensors(trainer.policy.model).items()}
    )
    with trainer:
        _repeat(result, _Scene(trainer, auditor, base, first), wanted[-1], {file.version for file in drawn}, report)
    _audit(result, auditor, drawn, report)
    return result


def _audit(result: Reproduction, auditor: Auditor, drawn: Sequence[RecordedFile], report: Report) -> None:
    for file in drawn:
        if not auditor.has_policy(file.version):
            continue
        try:
            result.verdicts.append(auditor.audit(file, result.evidence.config.validation.calibration))
        except ShoalError as error:
            result.notes.append(f"The verdict on {file}: {error.message}")
            continue
        report(str(result.verdicts[-1]))


def _repeat(result: Reproduction, scene: _Scene, last: int, kept: Collection[int], report: Report) -> None:
    """Until the last wanted step, or the first that does not come out: everything after it would differ too."""
    trainer, auditor = scene.trainer, scene.auditor
    if result.began_at in kept:
        auditor.keep_policy(result.began_at, trainer.wire_tensors())
    while result.first_difference is None and trainer.step <= last:
        step = trainer.step
        outcome = _train(result, scene, step)
        result.steps.append(outcome)
        report(f"step {step}: {outcome.state}{f', {outcome.reason}' if outcome.reason else ''}")
        if outcome.ok and step + 1 in kept:
            auditor.keep_policy(step + 1, trainer.wire_tensors())


def _train(result: Reproduction, scene: _Scene, step: int) -> StepOutcome:
    evidence, trained = result.evidence, result.evidence.history.steps.get(step)
    if trained is None or trained.unknown:
        return StepOutcome(step, "impossible", reason="the ledger does not say what it was trained on")
    try:
        groups = [scene.auditor.group(group) for group in trained.groups]
    except ReproductionError as error:
        return StepOutcome(step, "impossible", groups=len(trained.groups), reason=error.message.rstrip("."))
    try:
        _ = scene.trainer.train_step(groups) if groups else scene.trainer.skip_step()
    except DivergedError as error:
        return StepOutcome(step, "differs", groups=len(groups), reason=error.message.rstrip("."))
    outcome = _compare(evidence, step, scene.trainer.wire_tensors(), len(groups))
    return outcome if outcome.ok or result.same_class else _within_tolerance(evidence, scene, outcome)


def _begin(evidence: Evidence, trainer: Trainer) -> StepOutcome:
    """What training begins with: the base model, or a checkpoint whose weights the ledger must vouch for."""
    outcome = _compare(evidence, trainer.step - 1, trainer.wire_tensors(), 0)
    if outcome.ok:
        return outcome
    what = f"checkpoint of version {trainer.step}" if trainer.step else "base model"
    return replace(outcome, reason=f"the {what} is not the one that the ledger records")


def _compare(evidence: Evidence, step: int, tensors: Sequence[WireTensor], groups: int) -> StepOutcome:
    """The weights after a step with those that the ledger records; step −1 stands for what training began with."""
    recorded = evidence.history.weights.get(step + 1, "")
    repeated = digest_weights([tensor_entry(tensor) for tensor in tensors])
    if not recorded:
        return StepOutcome(step, "impossible", "", repeated, groups, f"version {step + 1} is not in the ledger")
    if recorded == repeated:
        return StepOutcome(step, "identical", recorded, repeated, groups)
    return StepOutcome(step, "differs", recorded, repeated, groups, _why(evidence))


def _why(evidence: Evidence) -> str:
    here = TrainingMachine.here(evidence.config.training.device)
    if evidence.machine is not None and evidence.machine != here:
        return f"the run was trained on {evidence.machine}; this is {here}"
    return "its files are the recorded ones, so settings, software or machine differ"


def _within_tolerance(evidence: Evidence, scene: "_Scene", outcome: StepOutcome) -> StepOutcome:
    """Needs the recorded weights themselves, which only a checkpoint or the exported policy has."""
    recorded = _recorded_weights(evidence, scene.base, outcome)
    if recorded is None:
        return replace(outcome, state="unmeasured", reason="no recorded weights of this version are here")
    share = _distance(published_tensors(scene.trainer.policy.model), recorded, scene.first)
    compared = f"{share:.4f} of the way that training had come lies between them, {TOLERANCE} is allowed"
    return replace(outcome, state="close" if share <= TOLERANCE else "differs", reason=compared)


def _recorded_weights(evidence: Evidence, base: Path, outcome: StepOutcome) -> Mapping[str, Tensor] | None:
    """Those that the ledger vouches for, by their digest."""
    checkpoints, version = checkpoints_of(evidence.directory.trainer), outcome.step + 1
    places = [checkpoint_path(checkpoints, version)] if version in checkpoint_steps(checkpoints) else []
    exported = evidence.directory.root.parent
    for place in [*places, *([exported] if any(exported.glob("*.safetensors")) else [])]:
        tensors, wire = weights_at(place, base, evidence.config.model.adapter)
        if digest_weights(map(tensor_entry, wire)) == outcome.recorded:
            return tensors
    return None


def _distance(found: Mapping[str, Tensor], recorded: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> float:
    """How far two ends are apart, as a share of the way to one of them."""
    apart = sum(float((found[name] - recorded[name]).float().square().sum()) for name in recorded)
    moved = sum(float((recorded[name] - first[name]).float().square().sum()) for name in recorded)
    return math.sqrt(apart / moved) if moved else math.inf


def _begin_at(evidence: Evidence, first: int) -> int:
    """The newest checkpoint that is not behind the first wanted step; 0 is the base model."""
    steps = checkpoint_steps(checkpoints_of(evidence.directory.trainer))
    return max((step for step in steps if step <= first), default=0)


def _trainer(evidence: Evidence, base: Path, scratch: Path, began_at: int) -> Trainer:
    config = evidence.config
    work_dir = scratch / "trainer"
    if began_at:
        checkpoints_of(work_dir).mkdir(parents=True)
        source = checkpoint_path(checkpoints_of(evidence.directory.trainer), began_at)
        checkpoint_path(checkpoints_of(work_dir), began_at).symlink_to(source, target_is_directory=True)
    trainer = build_trainer(config, work_dir, model_dir=base)
    trainer.resume()
    return trainer


def _range(evidence: Evidence) -> str:
    steps = sorted(evidence.history.steps)
    return f"Recorded are {steps[0]} to {steps[-1]}." if steps else "It records none."
