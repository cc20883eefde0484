"""What workers draw, and how the scorer sees it, as arrays: one row per sampled token, one per chunk of commitments.

`generated` is the real thing: an engine samples, the scorer scores. `forced` gives every kind of worker the same text: given its
prefix, the draw of a token depends on nothing else, so one prefill per kind of worker shows at every place which token it would
have drawn. `benchmarks/detection_bf16.py` compares the two on a sample.

Shapes: N sampled tokens, V vocabulary, D hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.coarse.models import Policy
from shoal.policy import TorchEngine
from shoal.policy.batching import length_batches
from shoal.policy.embedded.attention import PrefillStep
from shoal.policy.embedded.prompts import padded
from shoal.policy.engine import Completion, Engine, GenerationRequest, ScoreRequest, signed_seed
from shoal.proofs import build_proofs, compare_chunks, gumbel_noise, split_chunks
from shoal.proofs.sampling import token_margins

Array = NDArray[np.float64]
Narrow = Callable[[torch.Tensor], torch.Tensor]
PASS_TOKENS = 2048
LOGITS_ROWS = 256
ROUNDED = "+rounded_logits"
"""Ends the name of a worker that rounds its logits to bf16, as engines do that Shoal does not run."""


@dataclass(frozen=True)
class Worker:
    """What a worker computes with: which weights, in which type, with which cache and at which multiple of the temperature."""

    weights: str = "true"
    dtype: str = "bfloat16"
    cache: str = ""
    heat: float = 1.0


HONEST = "honest"
CHEATS = {
    "int8": Worker("int8"),
    "fp8": Worker("fp8"),
    "int4": Worker("int4"),
    "cache_fp8": Worker(cache="fp8"),
    "cache_int8": Worker(cache="int8"),
    "stale": Worker("stale"),
    "stale_layer": Worker("stale_layer"),
    "temperature_x0.95": Worker(heat=0.95),
    "temperature_x1.05": Worker(heat=1.05),
    "int8_in_float32": Worker("int8", "float32"),
}
WORKERS = {HONEST: Worker(), **CHEATS}


@dataclass
class Draws:
    margins: Array
    rivals: Array  # [N, 4], as `Scored.rivals`
    logprob_errors: Array
    places: Array
    """Index of each token in its completion."""
    submissions: Array
    """Number of the submission of each token."""
    pair_errors: Array
    """By how much the worker's scores move the closest rival towards the winner; empty where they are not known."""
    chunks: Array  # [C, 4]: exponent mismatches, sign mismatches, mantissa mean, values compared
    chunk_submissions: Array

    def save(self) -> dict[str, Array]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, Array]]) -> "Draws":
        """Pieces one after the other; submissions are counted on."""
        first, numbered = 0.0, list[dict[str, Array]]()
        for part in parts:
            moved = {name: part[name] + first for name in ("submissions", "chunk_submissions")}
            numbered.append({**part, **moved})
            first = float(moved["submissions"].max()) + 1
        return cls(**{field.name: np.concatenate([part[field.name] for part in numbered]) for field in fields(cls)})

    def of(self, submission: float) -> "Draws":
        tokens, chunks = self.submissions == submission, self.chunk_submissions == submission
        return Draws(
            self.margins[tokens],
            self.rivals[tokens],
            self.logprob_errors[tokens],
            self.places[tokens],
            self.submissions[tokens],
            self.pair_errors[tokens] if len(self.pair_errors) else self.pair_errors,
            self.chunks[chunks],
            self.chunk_submissions[chunks],
        )


def generated(policy: Policy, worker: Engine, scorer: TorchEngine, slots: Sequence[int], heat: float = 1.0) -> Draws:
    """Submissions of a worker, as an audit of all their groups sees them."""
    requests = policy.requests(slots)
    made = worker.generate(requests, temperature=heat * policy.temperature)
    scored = scorer.score(
        [
            ScoreRequest(request.prompt_tokens, tuple(row.tokens), request.seed)
            for request, row in zip(requests, made, strict=True)
        ],
        temperature=policy.temperature,
    )
    size = len(requests) // len(slots)
    claimed = np.array([value for row in made for value in row.logprobs])
    lengths = [len(row.tokens) for row in made]
    chunks = [split_chunks(row.states) for row in scored]
    return Draws(
        torch.cat([row.margins for row in scored]).double().numpy(),
        torch.cat([row.rivals for row in scored]).double().numpy(),
        claimed - torch.cat([row.logprobs for row in scored]).double().numpy(),
        _places(lengths),
        _numbers(lengths, size),
        np.zeros(0),
        _compared([proof for row in made for proof in row.proofs], [chunk for row in chunks for chunk in row]),
        _numbers([len(row) for row in chunks], size),
    )


Text = tuple[Sequence[GenerationRequest], Sequence[Completion]]


def text_of(policy: Policy, scorer: TorchEngine, slots: Sequence[int], most_tokens: int = 0) -> Text:
    requests = policy.requests(slots, most_tokens)
    return requests, scorer.generate(requests, temperature=policy.temperature)


def forced(
    policy: Policy, workers: Mapping[str, Worker], scorer: TorchEngine, text: Text, submissions: int
) -> dict[str, Draws]:
    """What each worker draws after the prefixes of one text; the honest one with rounded logits too."""
    requests, made = text
    lengths, size = [len(row.tokens) for row in made], len(requests) // submissions
    truth = Computed(scorer, states_of(scorer, requests, made))
    computed = {
        worker: _computed(policy, worker, requests, made) for worker in {_without_heat(one) for one in workers.values()}
    }
    seeds = torch.tensor(
        [signed_seed(request.seed) for request, n in zip(requests, lengths, strict=True) for _ in range(n)]
    )
    drawn = _draw(truth, computed, workers, seeds, torch.tensor(_places(lengths)).long(), policy.temperature)
    tokens = {"places": _places(lengths), "submissions": _numbers(lengths, size)}
    chunks = _chunks(truth.states_ND, lengths)
    chunk_numbers = _numbers([len(row) for row in chunks], size)
    compared = {
        worker: _compared(build_proofs(_flat(_chunks(one.states_ND, lengths))), _flat(chunks))
        for worker, one in computed.items()
    }
    return {
        name: Draws(**drawn[name], **tokens, chunks=compared[_without_heat(worker)], chunk_submissions=chunk_numbers)
        for name, worker in _with_rounded(workers).items()
    }


@dataclass
class Computed:
    engine: TorchEngine
    states_ND: torch.Tensor

    def logits(self, part: slice) -> torch.Tensor:
        runner: Any = self.engine._runner
        logits_NV: torch.Tensor = runner.logits(self.states_ND[part])
        return logits_NV


def _without_heat(worker: Worker) -> Worker:
    """A temperature changes no state."""
    return replace(worker, heat=1.0)


def _with_rounded(workers: Mapping[str, Worker]) -> dict[str, Worker]:
    """Honest work alone: what coarser logits cost is how much wider honest errors become."""
    return {**workers, **{name + ROUNDED: worker for name, worker in workers.items() if name == HONEST}}


def _computed(
    policy: Policy, worker: Worker, requests: Sequence[GenerationRequest], made: Sequence[Completion]
) -> Computed:
    engine = policy.engine(worker.weights, worker.dtype)
    return Computed(engine, states_of(engine, requests, made, CACHES[worker.cache]))


@torch.inference_mode()
def _draw(
    truth: Computed,
    computed: Mapping[Worker, Computed],
    workers: Mapping[str, Worker],
    seeds_N: torch.Tensor,
    places_N: torch.Tensor,
    temperature: float,
) -> dict[str, dict[str, Array]]:
    names = _with_rounded(workers)
    drawn: dict[str, dict[str, list[torch.Tensor]]] = {
        name: {"margins": [], "rivals": [], "logprob_errors": [], "pair_errors": []} for name in names
    }
    for start in range(0, len(seeds_N), LOGITS_ROWS):
        part = slice(start, start + LOGITS_ROWS)
        noise = gumbel_noise(seeds_N[part], places_N[part], truth.engine.vocab_size)
        scaled = truth.logits(part) / temperature
        scores = scaled + noise
        best, pair = scores.amax(-1), scores.topk(2, dim=-1).indices
        rivals = token_margins(scaled, seeds_N[part], places_N[part], pair[:, 0], 1.0)[2]
        between, true_logprobs = _between(scores, pair), torch.log_softmax(scaled, -1)
        logits_of = {worker: one.logits(part) for worker, one in computed.items()}
        for name, worker in names.items():
            logits = logits_of[_without_heat(worker)]
            logits = logits.to(torch.bfloat16).float() if name.endswith(ROUNDED) else logits
            own = logits / (temperature * worker.heat)
            tokens = (own + noise).argmax(-1)
            claimed = torch.log_softmax(own, -1) - true_logprobs
            found = {
                "margins": best - _at(scores, tokens),
                "rivals": rivals,
                "logprob_errors": _at(claimed, tokens),
                "pair_errors": _between(own + noise, pair) - between,
            }
            for field, values in found.items():
                drawn[name][field].append(values)
    return {
        name: {field: torch.cat(values).double().numpy() for field, values in of.items()} for name, of in drawn.items()
    }


def _at(values_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    return values_NV.gather(-1, tokens_N[:, None]).squeeze(-1)


def _between(scores_NV: torch.Tensor, pair_N2: torch.Tensor) -> torch.Tensor:
    """Rival minus winner."""
    return _at(scores_NV, pair_N2[:, 1]) - _at(scores_NV, pair_N2[:, 0])


class QuantisedPrefill(PrefillStep):
    """Keys and values pass through a narrower type, as a quantised cache gives them back."""

    def __init__(self, narrow: Narrow) -> None:
        super().__init__()
        self._narrow = narrow

    def attend(
        self,
        layer: int,
        query_BHSd: torch.Tensor,
        key_BKSd: torch.Tensor,
        value_BKSd: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return super().attend(layer, query_BHSd, self._narrow(key_BKSd), self._narrow(value_BKSd), scale, window)


def as_fp8(values: torch.Tensor) -> torch.Tensor:
    """e4m3 without a scale, as engines store a cache that was not calibrated."""
    return values.float().to(torch.float8_e4m3fn).to(values.dtype)


def as_int8(values: torch.Tensor) -> torch.Tensor:
    """One scale per head and position."""
    scale = values.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
    return ((values.float() / scale).round() * scale).to(values.dtype)


CACHES: dict[str, Narrow | None] = {"": None, "fp8": as_fp8, "int8": as_int8}


@torch.inference_mode()
def states_of(
    engine: TorchEngine,
    requests: Sequence[GenerationRequest],
    made: Sequence[Completion],
    narrow: Narrow | None = None,
) -> torch.Tensor:
    """The states that produced every token, completion after completion, by prefills of sequences of similar length."""
    runner: Any = engine._runner
    sequences = [(*request.prompt_tokens, *row.tokens[:-1]) for request, row in zip(requests, made, strict=True)]
    states: dict[int, torch.Tensor] = {}
    lengths = {at: len(tokens) for at, tokens in enumerate(sequences)}
    for batch in length_batches(lengths, token_limit=PASS_TOKENS):
        ids_BS = padded([sequences[at] for at in batch], runner.device)
        positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
        found = runner.run(ids_BS, positions_BS, QuantisedPrefill(narrow) if narrow else PrefillStep())
        for row, at in enumerate(batch):
            first = len(requests[at].prompt_tokens) - 1
            states[at] = found[row, first : len(sequences[at])].clone()
    return torch.cat([states[at] for at in range(len(sequences))])


def _chunks(states_ND: torch.Tensor, lengths: Sequence[int]) -> list[list[torch.Tensor]]:
    return [split_chunks(part) for part in states_ND.to(torch.bfloat16).split_with_sizes(list(lengths))]


def _flat(rows: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [chunk for row in rows for chunk in row]


def _compared(proofs: Sequence[bytes], chunks: Sequence[torch.Tensor]) -> Array:
    found = compare_chunks(proofs, chunks)
    return np.array([[one.exponent_mismatches, one.sign_mismatches, one.mantissa_mean, one.compared] for one in found])


def _places(lengths: Sequence[int]) -> Array:
    return np.concatenate([np.arange(length) for length in lengths]).astype(float)


def _numbers(counts: Sequence[int], size: int) -> Array:
    """Of every item the number of the submission; `counts` items belong to each completion, `size` completions to each."""
    return np.repeat(np.arange(len(counts)) // size, counts).astype(float)
