"""Makes a calibration: honest runs set the limits, other honest runs and forgeries show what the limits are worth.

Honest work is generated under different batch shapes, thread counts and compute types, because that is how honest machines
differ, and judged as validators judge, in float32 on the CPU. One half sets the limits of a class, the other half is judged by
them, submission by submission, and so is each forgery. The file keeps the counts with exact confidence bounds. A new kind of
machine is measured on such a machine and added to the file.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shoal import __version__
from shoal.config import ShoalConfig
from shoal.errors import ConfigError
from shoal.evaluation.statistics import binomial_upper, poisson_upper
from shoal.files import write_atomic
from shoal.metrics import Report, silent
from shoal.policy.directory import resolve_model
from shoal.policy.embedded.engine import TorchEngine
from shoal.policy.engine import Completion, Engine, GenerationRequest, Scored, ScoreRequest
from shoal.policy.engines import ENGINES, Numerics, devices_here, make_engine
from shoal.proofs.commitments import ChunkDifference, compare_chunks, split_chunks
from shoal.protocol.api import AuditMetrics
from shoal.tasks import PromptStyle, TextCodec, load_tasks
from shoal.validation.calibration.forgeries import EDITS, TEMPERATURES, WEIGHTS, Edit, forged_weights
from shoal.validation.calibration.limits import (
    Calibration,
    Evidence,
    Forgery,
    Limits,
    ModelIdentity,
    NumericsClass,
    load_calibration,
)
from shoal.validation.checks import compare

SMALLEST_NOISE = 1e-4
"""Below this a margin is indistinguishable from the last bits of an fp32 sum on another machine."""
SMALLEST_FLIP_MARGIN = 5e-4
SMALLEST_MARGIN_MAX = 2.5e-3
SMALLEST_LOGPROB_ERROR = 1e-3
WORST_FACTOR = 3.0
"""From the worst honest margin seen to the limit: errors of rounding have Gaussian tails, so that no sample comes near."""

HONEST_SETTINGS = ((1, 128), (2, 128), (1, 7), (2, 32))
"""Compute threads and rows per batch."""
FORGERY_ROUNDS = 4
"""Each forges every prompt anew."""

Sampled = tuple[Sequence[GenerationRequest], Sequence[Completion]]


@dataclass(frozen=True)
class Machine:
    """What honest workers compute with: each dtype is a numerics class."""

    engine: str = "torch"
    device: str = "cpu"
    dtypes: Sequence[str] = ("float32", "bfloat16")

    def check(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"There is no engine {self.engine!r}.", hint=f"Known: {', '.join(ENGINES)}.")
        if self.engine == "vllm" and len(self.dtypes) != 1:
            raise ConfigError(
                "vLLM starts once per process, so it is calibrated for one compute type at a time.",
                hint="Name one with --dtype, and add others with --extend.",
            )


@dataclass(frozen=True)
class Work:
    """What is sampled: everything a setting needs but the numerics."""

    model_directory: Path
    prompts: Sequence[tuple[int, ...]]
    eos_token_ids: Sequence[int]
    temperature: float
    max_new_tokens: int
    submission_size: int
    """Completions that are judged together."""

    def engine(self, dtype: str = "float32", max_batch: int = 256, device: str = "cpu") -> TorchEngine:
        return TorchEngine(
            self.model_directory, eos_token_ids=self.eos_token_ids, dtype=dtype, max_batch=max_batch, device=device
        )

    def requests(self, salt: str) -> list[GenerationRequest]:
        """The prompts with seeds of their own: another salt is another sample."""
        return [
            GenerationRequest(prompt, random.Random(f"{salt} {index}").getrandbits(64), self.max_new_tokens)
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass
class Measured:
    """Honest work, token by token and chunk by chunk."""

    margins: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    differences: list[ChunkDifference] = field(default_factory=list)
    logprob_error: float = 0.0

    def add(self, completions: Sequence[Completion], scored: Sequence[Scored]) -> None:
        self.margins += [row.margins for row in scored]
        self.logprobs += [row.logprobs for row in scored]
        claimed = torch.tensor([value for completion in completions for value in completion.logprobs])
        error = (claimed - torch.cat([row.logprobs for row in scored])).abs().max()
        self.logprob_error = max(self.logprob_error, float(error))
        proofs = [proof for completion in completions for proof in completion.proofs]
        self.differences += compare_chunks(proofs, [chunk for row in scored for chunk in split_chunks(row.states)])

    @property
    def tokens(self) -> int:
        return sum(margin.numel() for margin in self.margins)

    @property
    def margin_max(self) -> float:
        return float(torch.cat(self.margins).max())

    @property
    def lost(self) -> torch.Tensor:
        margins = torch.cat(self.margins).double()
        return margins[margins > SMALLEST_NOISE]

    @property
    def tie_density(self) -> float:
        return float(1 - torch.cat(self.logprobs).double().exp().mean())

    def worst(self, name: str) -> float:
        return max(float(getattr(difference, name)) for difference in self.differences)


@dataclass
class Judged:
    """Submissions that went through the checks of an audit."""

    submissions: int = 0
    rejected: int = 0
    metrics: list[AuditMetrics] = field(default_factory=list)

    def add(self, completions: Sequence[Completion], scored: Sequence[Scored], limits: Limits, size: int) -> None:
        for start in range(0, len(completions) - size + 1, size):
            rows = completions[start : start + size]
            proofs = [proof for row in rows for proof in row.proofs]
            findings, metrics = compare([row.logprobs for row in rows], proofs, scored[start : start + size], limits)
            self.submissions += 1
            self.rejected += bool(findings)
            self.metrics.append(metrics)

    def as_forgery(self) -> Forgery:
        metrics, missed = self.metrics, self.submissions - self.rejected
        tokens = sum(one.tokens for one in metrics)
        return Forgery(
            submissions=self.submissions,
            missed=missed,
            missed_upper95=round(binomial_upper(missed, self.submissions), 6),
            margin_max=max(one.margin_max for one in metrics),
            flips_per_1000=1000 * sum(one.rounding_flips for one in metrics) / tokens,
            exponent_mismatches=max(one.exponent_mismatches_max for one in metrics),
            mantissa_mean=max(one.mantissa_mean_max for one in metrics),
            drift_per_submission=sum(one.drift_llr for one in metrics) / len(metrics),
        )


def calibrate_run(
    config: ShoalConfig,
    prompt_count: int,
    out: Path,
    report: Report,
    *,
    machine: Machine = Machine(),  # noqa: B008  # frozen
    extend: bool = False,
) -> None:
    """Calibrates the model and settings of a run and writes the file; `extend` keeps the other classes that it has."""
    directory = resolve_model(config.model.path)
    old = load_calibration(str(out)) if extend else None
    if old is not None:
        old.require_model(ModelIdentity.of(directory))
    codec, tasks = TextCodec.from_directory(directory), load_tasks(config.tasks).train
    targets, style = config.reward.target_lengths or (0,), PromptStyle.of(config.tasks)
    prompts = [
        tuple(codec.prompt_tokens(tasks[index % len(tasks)], targets[index % len(targets)], style))
        for index in range(prompt_count)
    ]
    rollouts = config.rollouts
    work = Work(
        directory,
        prompts,
        codec.eos_token_ids,
        rollouts.temperature,
        rollouts.max_new_tokens,
        min(rollouts.group_size * rollouts.tasks_per_slot, prompt_count),
    )
    calibration = calibrate(work, model_name=config.model.path, machine=machine, report=report)
    if old is not None:
        calibration = calibration.model_copy(update={"classes": old.classes | calibration.classes})
    write_atomic(out, calibration.model_dump_json(indent=2).encode() + b"\n")
    for line in table(calibration):
        report(line)
    report(f"wrote {out}")


def calibrate(
    work: Work,
    *,
    model_name: str,
    machine: Machine = Machine(),  # noqa: B008  # frozen
    settings: Sequence[tuple[int, int]] = HONEST_SETTINGS,
    rounds: int = FORGERY_ROUNDS,
    report: Report = silent,
) -> Calibration:
    """Measures the engine of this machine; every prompt is two honest samples per setting and dtype."""
    scorer, worker = work.engine(), _Honest(work, machine)
    measured: dict[str, tuple[Limits, Measured, Judged]] = {}
    for dtype in machine.dtypes:
        honest, judged, name = Measured(), Judged(), ""
        for threads, rows in settings:
            name, (requests, completions) = worker.sample(dtype, threads, rows, "limits")
            honest.add(completions, _score(scorer, requests, completions, work.temperature))
        limits = _limits(honest)
        for threads, rows in settings:
            _, (requests, completions) = worker.sample(dtype, threads, rows, "test")
            scored = _score(scorer, requests, completions, work.temperature)
            judged.add(completions, scored, limits, work.submission_size)
        measured[name] = limits, honest, judged
        report(
            f"{name}: worst honest margin {honest.margin_max:.2e}, {judged.rejected} of {judged.submissions} rejected"
        )
    forged: dict[str, dict[str, Judged]] = {name: {} for name in measured}
    for forgery, completions, scored in _forgeries(work, scorer, rounds):
        for name, (limits, _, _) in measured.items():
            judged = forged[name].setdefault(forgery, Judged())
            judged.add(completions, scored, limits, work.submission_size)
        report(f"forgery {forgery}: {len(completions) // work.submission_size} submissions judged")
    classes = {
        name: NumericsClass(limits=limits, evidence=_evidence(limits, honest, judged, forged[name]))
        for name, (limits, honest, judged) in measured.items()
    }
    identity = ModelIdentity.of(work.model_directory)
    return Calibration(model=model_name, identity=identity, made_with=f"shoal {__version__}", classes=classes)


def table(calibration: Calibration) -> Iterator[str]:
    """What the limits let through and whom they wrong, one line each."""
    for name, known in calibration.classes.items():
        evidence = known.evidence
        yield f"{name}: {evidence.residual_bits_per_1000_tokens:.3f} bits per 1,000 tokens remain to a forger"
        yield f"  {'':22s} {'judged':>7s} {'rejected':>8s}  error rate below (95 %)"
        rejected, bound = evidence.honest_rejected, evidence.honest_false_reject_upper95
        yield f"  {'honest':22s} {evidence.honest_submissions:7d} {rejected:8d}  {bound:.4f}"
        for forgery, judged in evidence.forgeries.items():
            caught = judged.submissions - judged.missed
            yield f"  {forgery:22s} {judged.submissions:7d} {caught:8d}  {judged.missed_upper95:.4f}"


class _Honest:
    """Honest workers of a machine, under settings that differ as honest machines do."""

    def __init__(self, work: Work, machine: Machine) -> None:
        machine.check()
        self._work, self._machine = work, machine
        self._vllm: Engine | None = None

    def sample(self, dtype: str, threads: int, rows: int, salt: str) -> tuple[str, Sampled]:
        """The numerics class, and what such a worker makes of every prompt."""
        work, requests = self._work, self._work.requests(f"{salt} {dtype} {threads} {rows}")
        if self._machine.engine == "vllm":
            engine = self._vllm = self._vllm or self._start_vllm(dtype)
            parts = [requests[start : start + rows] for start in range(0, len(requests), rows)]
        else:
            engine, parts = work.engine(dtype, rows, self._machine.device), [requests]
        with _threads(threads):
            made = [done for part in parts for done in engine.generate(part, temperature=work.temperature)]
        return engine.numerics_class, (requests, made)

    def _start_vllm(self, dtype: str) -> Engine:
        # Once, and before the scorer: it looks through all modules of the process and stumbles over those of a compiler.
        return make_engine(
            "vllm",
            self._work.model_directory,
            self._work.eos_token_ids,
            numerics=Numerics(devices_here()[0], dtype),
        )


def _limits(honest: Measured) -> Limits:
    lost = honest.lost
    # The mean of k exponential margins is known to about 1/√k; none seen leaves the smallest that counts.
    mean = float(lost.mean()) * (1 + 1.65 / lost.numel() ** 0.5) if lost.numel() else 0.0
    return Limits(
        margin_max=max(SMALLEST_MARGIN_MAX, WORST_FACTOR * honest.margin_max),
        margin_noise=SMALLEST_NOISE,
        flips_per_1000=1000 * poisson_upper(lost.numel()) / honest.tokens,
        flip_margin_mean=max(SMALLEST_FLIP_MARGIN, mean),
        exponent_mismatches=2 * int(honest.worst("exponent_mismatches")) + 4,
        mantissa_mean=2 * honest.worst("mantissa_mean") + 1.0,
        mantissa_median=2 * honest.worst("mantissa_median") + 1.0,
        logprob_error=max(SMALLEST_LOGPROB_ERROR, WORST_FACTOR * honest.logprob_error),
    )


def _evidence(limits: Limits, honest: Measured, judged: Judged, forged: dict[str, Judged]) -> Evidence:
    lost = honest.lost
    return Evidence(
        honest_tokens=honest.tokens,
        honest_chunks=len(honest.differences),
        honest_margin_max=honest.margin_max,
        honest_flips_per_1000=1000 * lost.numel() / honest.tokens,
        honest_flip_margin_mean=float(lost.mean()) if lost.numel() else 0.0,
        honest_exponent_mismatches=int(honest.worst("exponent_mismatches")),
        honest_mantissa_mean=honest.worst("mantissa_mean"),
        honest_logprob_error=honest.logprob_error,
        tie_density=honest.tie_density,
        honest_submissions=judged.submissions,
        honest_rejected=judged.rejected,
        honest_false_reject_upper95=round(binomial_upper(judged.rejected, judged.submissions), 6),
        residual_bits_per_1000_tokens=round(limits.residual_bits_per_1000(honest.tie_density), 4),
        forgeries={name: forgery.as_forgery() for name, forgery in forged.items()},
    )


def _forgeries(work: Work, scorer: Engine, rounds: int) -> Iterator[tuple[str, list[Completion], list[Scored]]]:
    """Each forgery with the validator's view of it. Forgers compute in float32: rounding would only give them away."""
    for name, forge in WEIGHTS.items():
        with forged_weights(work.model_directory, forge) as forged:
            cheat = work.engine()
            cheat.load(forged)
            for number in range(rounds):
                yield name, *_forged(work, scorer, cheat, f"{name} {number}")
    cheat = work.engine()
    for factor in TEMPERATURES:
        for number in range(rounds):
            name = f"temperature_x{factor}"
            yield name, *_forged(work, scorer, cheat, f"{name} {number}", temperature=factor * work.temperature)
    for name, edit in EDITS.items():
        for number in range(rounds):
            yield name, *_forged(work, scorer, cheat, f"{name} {number}", edit=edit)


def _forged(
    work: Work, scorer: Engine, cheat: Engine, salt: str, *, temperature: float | None = None, edit: Edit = list
) -> tuple[list[Completion], list[Scored]]:
    requests, size = work.requests(salt), work.submission_size
    sampled = cheat.generate(requests, temperature=temperature or work.temperature)
    edited = [row for start in range(0, len(sampled), size) for row in edit(sampled[start : start + size])]
    return edited, _score(scorer, requests, edited, work.temperature)


def _score(
    engine: Engine, requests: Sequence[GenerationRequest], completions: Sequence[Completion], temperature: float
) -> list[Scored]:
    return engine.score(
        [
            ScoreRequest(request.prompt_tokens, tuple(completion.tokens), request.seed)
            for request, completion in zip(requests, completions, strict=True)
        ],
        temperature=temperature,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
