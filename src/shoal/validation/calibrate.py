"""Makes a calibration: honest runs set the limits, forgeries show that the limits still tell them apart.

Honest work is generated and scored under different batch shapes and thread counts, because that is how honest machines differ.
Each forgery is the same work with one lie; the file keeps how far the weakest of its submissions lies beyond the limits.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shoal import __version__
from shoal.config import ShoalConfig
from shoal.files import write_atomic
from shoal.policy.engine import Completion, Engine, GenerationRequest, Scored, ScoreRequest
from shoal.policy.models import WEIGHTS_FILE, resolve_model
from shoal.policy.torch_engine import TorchEngine
from shoal.proofs.commitments import ChunkDifference, compare_chunks, split_chunks
from shoal.tasks import TextCodec, load_tasks
from shoal.validation.calibration import Calibration, Evidence, Limits, NumericsClass

NOISE_FACTOR = 4.0
LIMIT_FACTOR = 25.0
SMALLEST_NOISE = 1e-4
"""Below this a margin is indistinguishable from the last bits of an fp32 sum on another machine."""

HONEST_SETTINGS = ((1, 128), (2, 128), (1, 7), (2, 32))
"""Compute threads and rows per batch."""

Forge = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class Measured:
    margins: list[torch.Tensor] = field(default_factory=list)
    differences: list[ChunkDifference] = field(default_factory=list)
    logprob_error: float = 0.0

    def add(self, completions: Sequence[Completion], scored: Sequence[Scored]) -> None:
        self.margins += [row.margins for row in scored]
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

    def lost_per_1000(self, noise: float) -> float:
        return 1000 * float((torch.cat(self.margins) > noise).double().mean())

    def worst(self, name: str) -> float:
        return max(float(getattr(difference, name)) for difference in self.differences)


def calibrate_run(config: ShoalConfig, prompt_count: int, out: Path, report: Callable[[str], None]) -> None:
    """Calibrates the model and settings of a run and writes the file."""
    directory = resolve_model(config.model.path)
    codec, tasks = TextCodec.from_directory(directory), load_tasks(config.tasks).train
    targets = config.reward.target_lengths or (0,)
    prompts = [
        tuple(
            codec.prompt_tokens(
                tasks[index % len(tasks)],
                targets[index % len(targets)],
                system_prompt=config.tasks.system_prompt,
                length_instruction=config.tasks.length_instruction,
            )
        )
        for index in range(prompt_count)
    ]
    calibration = calibrate(
        directory,
        prompts,
        codec.eos_token_ids,
        model_name=config.model.path,
        temperature=config.rollouts.temperature,
        max_new_tokens=config.rollouts.max_new_tokens,
        report=report,
    )
    write_atomic(out, calibration.model_dump_json(indent=2).encode() + b"\n")
    report(f"wrote {out}")


def calibrate(
    model_directory: Path,
    prompts: Sequence[tuple[int, ...]],
    eos_token_ids: Sequence[int],
    *,
    model_name: str,
    temperature: float,
    max_new_tokens: int,
    settings: Sequence[tuple[int, int]] = HONEST_SETTINGS,
    report: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measures the embedded engine on this machine; every prompt is one honest sample per setting."""
    requests = [
        GenerationRequest(prompt, random.Random(index).getrandbits(64), max_new_tokens)
        for index, prompt in enumerate(prompts)
    ]
    scorer = TorchEngine(model_directory, eos_token_ids=eos_token_ids)
    honest = Measured()
    for threads, max_batch in settings:
        with _threads(threads):
            engine = TorchEngine(model_directory, eos_token_ids=eos_token_ids, max_batch=max_batch)
            completions = engine.generate(requests, temperature=temperature)
        honest.add(completions, _score(scorer, requests, completions, temperature))
        report(f"honest, {threads} threads, batch {max_batch}: worst margin so far {honest.margin_max:.2e}")
    limits = _limits(honest)
    forgeries = {}
    for name, measured in _forgeries(model_directory, scorer, requests, eos_token_ids, temperature):
        forgeries[name] = _separation(measured, limits)
        report(f"forgery {name}: {forgeries[name]}")
    evidence = Evidence(
        honest_tokens=honest.tokens,
        honest_chunks=len(honest.differences),
        honest_margin_max=honest.margin_max,
        honest_lost_per_1000=honest.lost_per_1000(limits.margin_noise),
        honest_exponent_mismatches=int(honest.worst("exponent_mismatches")),
        honest_mantissa_mean=honest.worst("mantissa_mean"),
        honest_logprob_error=honest.logprob_error,
        forgeries=forgeries,
    )
    classes = {scorer.numerics_class: NumericsClass(limits=limits, evidence=evidence)}
    return Calibration(model=model_name, made_with=f"shoal {__version__}", classes=classes)


def _limits(honest: Measured) -> Limits:
    noise = max(SMALLEST_NOISE, NOISE_FACTOR * honest.margin_max)
    return Limits(
        margin_max=LIMIT_FACTOR * noise,
        margin_noise=noise,
        lost_per_1000=1.0,
        lost_free=1,
        exponent_mismatches=2 * int(honest.worst("exponent_mismatches")) + 4,
        mantissa_mean=2 * honest.worst("mantissa_mean") + 1.0,
        mantissa_median=2 * honest.worst("mantissa_median") + 1.0,
        logprob_error=max(1e-3, LIMIT_FACTOR * honest.logprob_error),
    )


def _forgeries(
    directory: Path,
    scorer: Engine,
    requests: Sequence[GenerationRequest],
    eos_token_ids: Sequence[int],
    temperature: float,
) -> Iterator[tuple[str, Measured]]:
    for name, forge in {"weights_noise_1e-3": _noisy, "int8": _int8}.items():
        with _forged_weights(directory, forge) as forged:
            cheat = TorchEngine(directory, eos_token_ids=eos_token_ids)
            cheat.load(forged)
            yield name, _measure(cheat, scorer, requests, temperature, temperature)
    for factor in (0.9, 1.1):
        cheat = TorchEngine(directory, eos_token_ids=eos_token_ids)
        yield f"temperature_x{factor}", _measure(cheat, scorer, requests, factor * temperature, temperature)


def _measure(
    cheat: Engine, scorer: Engine, requests: Sequence[GenerationRequest], sampled_at: float, judged_at: float
) -> Measured:
    completions = cheat.generate(requests, temperature=sampled_at)
    measured = Measured()
    measured.add(completions, _score(scorer, requests, completions, judged_at))
    return measured


def _separation(measured: Measured, limits: Limits) -> dict[str, float]:
    """How far beyond each limit the forgery lies; above 1 it is rejected."""
    figures = {
        "margin": measured.margin_max / limits.margin_max,
        "lost": measured.lost_per_1000(limits.margin_noise) / limits.lost_per_1000,
        "exponent": measured.worst("exponent_mismatches") / limits.exponent_mismatches,
        "mantissa": measured.worst("mantissa_mean") / limits.mantissa_mean,
        "logprob": measured.logprob_error / limits.logprob_error,
    }
    return {name: round(value, 3) for name, value in figures.items()}


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
def _forged_weights(directory: Path, forge: Forge) -> Iterator[Path]:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as temporary:
        save_file(forge(load_file(directory / WEIGHTS_FILE)), Path(temporary) / WEIGHTS_FILE)
        yield Path(temporary)


def _noisy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (tensor.float() * (1 + 1e-3 * torch.randn(tensor.shape, generator=generator))).to(torch.bfloat16)
        for name, tensor in tensors.items()
    }


def _int8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _round_rows(tensor) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


def _round_rows(tensor: torch.Tensor) -> torch.Tensor:
    scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return ((tensor.float() / scale).round() * scale).to(torch.bfloat16)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
