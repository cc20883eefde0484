"""Where workers and cheats meet the validator's checks: a real policy, real slots, no network.

The true policy is the last of six versions, each one optimiser step from the one before, so that stale versions are as close as
in a run. Every cheat works on the same slots as the honest worker. Work on the same slots is shared: what one engine samples, and
how the true policy checks given tokens, is computed once until `forget`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from shoal.config import ShoalConfig, build_config
from shoal.files import WEIGHTS_FILE, write_atomic
from shoal.policy import TorchEngine, build_model, bundled_directory
from shoal.policy.directory import base_of, is_adapter, resolve_model, weight_files
from shoal.policy.engine import Completion, Engine, GenerationRequest, Scored, ScoreRequest, Stream
from shoal.policy.lora.files import read_settings
from shoal.policy.weights import unique_tensors
from shoal.proofs import build_proofs, split_chunks
from shoal.protocol.api import AuditMetrics
from shoal.protocol.rollouts import Rollout
from shoal.protocol.verdicts import Reason
from shoal.tasks import TextCodec, load_tasks
from shoal.tasks.workload import WorkItem, Workload
from shoal.validation import Calibration, Checked, RejectedError, audit, check_claims, load_calibration
from shoal.validation.calibration.forgeries import noisy
from shoal.validation.calibration.limits import Limits
from shoal.validation.calibration.measure import calibrate
from shoal.validation.calibration.work import Setting, Work
from shoal.worker.submission import as_rollout
from support.samples import descriptor
from support.submissions import Submission, header_for
from support.tiny_run import make_lease

VERSIONS = 6
LEARNING_RATE = 2e-4
"""That of the demo."""
COARSE_CLASS = "torch/bfloat16/cpu"
OFF_THE_GRID = 2e-3
"""Relative noise: a fraction of a step of 4 bits, many steps of bf16."""


@dataclass(frozen=True)
class GroupAudit:
    """What the audit of one group alone finds."""

    reasons: tuple[Reason, ...]
    metrics: AuditMetrics


@dataclass(frozen=True)
class AuditOutcome:
    reasons: tuple[Reason, ...]
    """Of an audit of all groups."""
    tokens: int
    metrics: AuditMetrics | None = None
    """None if the claims alone gave the cheat away: no audit was needed."""
    metrics_if_coarse: AuditMetrics | None = None
    reasons_if_coarse: tuple[Reason, ...] = ()
    """Had the worker declared bfloat16, where the run admits that."""
    groups: tuple[GroupAudit, ...] = ()


def joint(groups: Sequence[GroupAudit], limits: Limits) -> GroupAudit:
    """What one audit of these groups together finds: extremes and sums over them, and flips in the tokens of all."""
    tokens, flips = sum(one.metrics.tokens for one in groups), sum(one.metrics.rounding_flips for one in groups)
    margin_sum = sum(one.metrics.margin_sum for one in groups)
    found = {reason for one in groups for reason in one.reasons} - {Reason.SAMPLING_DRIFT}
    if Reason.SAMPLING not in found and flips > limits.flips_allowed(tokens):
        found.add(Reason.SAMPLING_DRIFT)
    metrics = AuditMetrics(
        tokens=tokens,
        margin_max=max(one.metrics.margin_max for one in groups),
        margin_sum=margin_sum,
        rounding_flips=flips,
        drift_llrs=[sum(own) for own in zip(*(one.metrics.drift_llrs for one in groups), strict=True)],
    )
    return GroupAudit(tuple(sorted(found)), metrics)


class RememberingEngine:
    """Scores given tokens once, however often and in whatever company they are asked for."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.vocab_size, self.numerics_class = engine.vocab_size, engine.numerics_class
        self._known: dict[ScoreRequest, Scored] = {}

    def load(self, directory: Path) -> None:
        raise AssertionError("the arena's validator holds one version")

    def generate(self, *arguments: object, **named: object) -> list[Completion]:
        raise AssertionError("a validator does not generate")

    def open(self, *arguments: object, **named: object) -> Stream:
        raise AssertionError("a validator does not generate")

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        missing = list(dict.fromkeys(request for request in requests if request not in self._known))
        for request, scored in zip(missing, self._engine.score(missing, temperature=temperature), strict=True):
            self._known[request] = scored
        return [self._known[request] for request in requests]

    def forget(self) -> None:
        self._known.clear()


@dataclass
class Arena:
    root: Path
    workload: Workload
    versions: list[Path]
    """Whole model directories; the last one is the true policy."""
    validator: RememberingEngine
    calibration: Calibration
    _sampled: dict[tuple[Path, float, int], Submission] = field(default_factory=dict)

    @property
    def policy(self) -> Path:
        return self.versions[-1]

    @property
    def temperature(self) -> float:
        return self.workload.descriptor.rollouts.temperature

    def engine(self, directory: Path | None = None, *, dtype: str = "float32", max_batch: int = 256) -> TorchEngine:
        place, adapted = directory or self.policy, is_adapter(directory or self.policy)
        engine = TorchEngine(
            resolve_model(base_of(place)) if adapted else place,
            eos_token_ids=self.workload.codec.eos_token_ids,
            dtype=dtype,
            max_batch=max_batch,
            lora=read_settings(place) if adapted else None,
        )
        if adapted:
            engine.load(place)
        return engine

    def declared(self, engine: Engine) -> str:
        """The class that a worker with this engine names; one that the run does not admit would be refused at once."""
        known = engine.numerics_class in self.workload.descriptor.numerics_classes
        return engine.numerics_class if known else self.validator.numerics_class

    def items(self, slot: int) -> list[WorkItem]:
        return self.workload.items(bytes.fromhex(make_lease(slot).slot_seed))

    def honest(self, slots: Sequence[int]) -> list[Submission]:
        """Honest work in float32."""
        return self.sampled_once(slots, self.policy)

    def sampled_once(self, slots: Sequence[int], directory: Path, temperature: float | None = None) -> list[Submission]:
        """What a worker with these weights uploads, made once per slot."""
        heat = temperature or self.temperature
        missing = [slot for slot in slots if (directory, heat, slot) not in self._sampled]
        for submission in self.sampled(missing, self.engine(directory), heat) if missing else []:
            self._sampled[directory, heat, submission.lease.slot] = submission
        return [self._sampled[directory, heat, slot] for slot in slots]

    def forget(self) -> None:
        """Frees what was shared between the cheats of some slots."""
        self._sampled.clear()
        self.validator.forget()

    def sampled(self, slots: Sequence[int], engine: Engine, temperature: float | None = None) -> list[Submission]:
        """What a worker with this engine and temperature uploads: consistent in everything else."""
        items = [item for slot in slots for item in self.items(slot)]
        limit = self.workload.descriptor.rollouts.max_new_tokens
        completions = engine.generate(
            [GenerationRequest(item.prompt_tokens, item.seed, limit) for item in items],
            temperature=temperature or self.temperature,
        )
        size = len(items) // len(slots)
        submissions = []
        for number, slot in enumerate(slots):
            part = slice(number * size, (number + 1) * size)
            rows = [self.rollout(item, done) for item, done in zip(items[part], completions[part], strict=True)]
            lease = make_lease(slot)
            header = header_for(lease).model_copy(update={"numerics_class": self.declared(engine)})
            submissions.append(Submission(lease, header, rows))
        return submissions

    def rollout(self, item: WorkItem, completion: Completion) -> Rollout:
        reward = self.workload.reward(item.task, item.target_length, completion.tokens)
        return as_rollout(item, completion, reward)

    def score(self, *submissions: Submission) -> list[Scored]:
        """What the true policy says of these tokens, row by row; the forger's best friend."""
        requests = [
            ScoreRequest(item.prompt_tokens, tuple(row.output_tokens), item.seed, tuple(row.segment_lengths))
            for submission in submissions
            for row, item in zip(submission.rollouts, self.items(submission.lease.slot), strict=True)
        ]
        return self.validator.score(requests, temperature=self.temperature)

    def proved(self, submission: Submission) -> Submission:
        """The same tokens with the true policy's proofs and log-probabilities, true rewards and a fitting ending."""
        rows = []
        items = self.items(submission.lease.slot)
        for row, item, scored in zip(submission.rollouts, items, self.score(submission), strict=True):
            ended = row.output_tokens[-1] in self.workload.codec.eos_token_ids
            completion = Completion(
                row.output_tokens,
                scored.logprobs.tolist(),
                "stop" if ended else "length",
                build_proofs(split_chunks(scored.states)),
            )
            rows.append(self.rollout(item, completion))
        return replace(submission, rollouts=rows)

    def verify(self, submission: Submission) -> AuditOutcome:
        """Every check of a full audit, as the validator runs them, and of each group alone."""
        tokens = sum(len(row.output_tokens) for row in submission.rollouts)
        try:
            checked = check_claims(submission.data, submission.claim(), self.workload, self.validator.vocab_size)
        except RejectedError as rejected:
            return AuditOutcome((rejected.finding.reason,), tokens)
        everything, declared = list(checked.rows_by_group()), submission.header.numerics_class
        reasons, metrics = self.audit(checked, declared, everything)
        groups = tuple(GroupAudit(*self.audit(checked, declared, [group])) for group in everything)
        outcome = AuditOutcome(reasons, tokens, metrics, groups=groups)
        if COARSE_CLASS not in self.calibration.classes:
            return outcome
        coarse_reasons, coarse_metrics = self.audit(checked, COARSE_CLASS, everything)
        return replace(outcome, metrics_if_coarse=coarse_metrics, reasons_if_coarse=coarse_reasons)

    def audit(
        self, checked: Checked, numerics_class: str, groups: Sequence[int]
    ) -> tuple[tuple[Reason, ...], AuditMetrics]:
        findings, metrics = audit(checked, self.validator, self.limits(numerics_class), self.temperature, groups)
        return tuple(finding.reason for finding in findings), metrics

    def limits(self, numerics_class: str) -> Limits:
        limits = self.calibration.limits(numerics_class)
        assert limits is not None
        return limits


def small_config() -> ShoalConfig:
    """Slots that a test can afford."""
    return build_config(
        {
            "tasks": {"count": 200, "heldout": 8},
            "rollouts": {"group_size": 4, "tasks_per_slot": 3, "max_prompt_tokens": 64, "max_new_tokens": 48},
            "reward": {"target_lengths": [21, 30], "length_alpha": 0.003},
        }
    )


def make_arena(root: Path, config: ShoalConfig) -> Arena:
    """The run of a config with the bundled policy, its calibration, and a short history of versions."""
    model, calibration = bundled_directory(), load_calibration("bundled")
    workload = make_workload(config, model, tuple(calibration.classes))
    return arena_of(root, workload, train_versions(root, model, workload), calibration)


def with_model(config: ShoalConfig, model: Path, **rollouts: int) -> ShoalConfig:
    """The same run with another model, in slots of another shape."""
    changed = {
        "model": config.model.model_copy(update={"path": str(model)}),
        "rollouts": config.rollouts.model_copy(update=rollouts),
    }
    return config.model_copy(update=changed)


def make_model_arena(root: Path, config: ShoalConfig) -> Arena:
    """The run of a config with its own model. Its weights are moved off any grid that they were quantised to, or a
    quantisation cheat would change nothing; a small calibration is made for it. It has no history."""
    base, policy, limits = Path(config.model.path), root / "v0", root / "calibration.json"
    if not (policy / WEIGHTS_FILE).exists():
        shutil.copytree(base, policy, ignore=shutil.ignore_patterns("*.safetensors"))
        weights = {name: tensor for path in weight_files(base) for name, tensor in load_file(path).items()}
        save_file(noisy(OFF_THE_GRID)(weights), policy / WEIGHTS_FILE, metadata={"format": "pt"})
    workload = make_workload(config, policy, ("torch/float32/cpu",))
    if not limits.exists():
        made = small_calibration(workload, policy, config)
        write_atomic(limits, made.model_dump_json(indent=2).encode())
    return arena_of(root, workload, [policy], load_calibration(str(limits)))


def small_calibration(workload: Workload, policy: Path, config: ShoalConfig) -> Calibration:
    slots = [workload.items(bytes.fromhex(make_lease(slot, step=1000).slot_seed)) for slot in range(4)]
    work = Work(
        policy,
        [item.prompt_tokens for items in slots for item in items],
        workload.codec.eos_token_ids,
        config.rollouts.temperature,
        config.rollouts.max_new_tokens,
        len(slots[0]),
    )
    return calibrate(
        work,
        model_name=config.model.path,
        settings=(Setting(1, 16), Setting(1, 3)),
        honest_submissions=2 * len(slots),
        forged_submissions=len(slots),
    )


def make_workload(config: ShoalConfig, model: Path, numerics_classes: tuple[str, ...]) -> Workload:
    sets = load_tasks(config.tasks)
    run = descriptor(
        tasks=config.tasks,
        task_set_digest=sets.train.digest,
        task_count=len(sets.train),
        rollouts=config.rollouts,
        reward=config.reward,
        numerics_classes=numerics_classes,
    )
    return Workload(run, TextCodec.from_directory(model), sets)


def arena_of(root: Path, workload: Workload, versions: list[Path], calibration: Calibration) -> Arena:
    validator = RememberingEngine(TorchEngine(versions[-1], eos_token_ids=workload.codec.eos_token_ids))
    return Arena(root, workload, versions, validator, calibration)


def train_versions(root: Path, model_directory: Path, workload: Workload) -> list[Path]:
    """Policy-gradient steps with the demo's optimiser on the policy's own samples; bf16 on disk, as on the wire."""
    if (root / f"v{VERSIONS - 1}" / WEIGHTS_FILE).exists():
        return [root / f"v{version}" for version in range(VERSIONS)]

    model = build_model(model_directory)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    versions = [save_version(root / "v0", model, model_directory)]
    for step in range(1, VERSIONS):
        engine = TorchEngine(versions[-1], eos_token_ids=workload.codec.eos_token_ids)
        items = workload.items(bytes.fromhex(make_lease(step, step=1000).slot_seed))
        limit = workload.descriptor.rollouts.max_new_tokens
        completions = engine.generate(
            [GenerationRequest(item.prompt_tokens, item.seed, limit) for item in items], temperature=1.0
        )
        rewards = [
            workload.reward(item.task, item.target_length, done.tokens).total
            for item, done in zip(items, completions, strict=True)
        ]
        mean = sum(rewards) / len(rewards)
        optimiser.zero_grad()
        for item, done, reward in zip(items, completions, rewards, strict=True):
            loss = (reward - mean) * _negative_logprob(model, item.prompt_tokens, done.tokens) / len(items)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        versions.append(save_version(root / f"v{step}", model, model_directory))
    return versions


def _negative_logprob(model: torch.nn.Module, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *output]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    loss: torch.Tensor = torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :])
    return loss


def save_version(directory: Path, model: torch.nn.Module, model_directory: Path) -> Path:
    shutil.copytree(model_directory, directory)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in unique_tensors(model).items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return directory
