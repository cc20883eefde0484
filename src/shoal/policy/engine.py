"""What worker and validator ask of an engine, whichever one runs the policy.

In: token requests, each with its own sampling seed. Out: completions with log-probabilities and commitments, or the
scores of given tokens. A `Stream` takes requests while others run and gives each completion when it ends; `generate` is a loop
over one, whose answers keep the order of the requests. The same seed gives the same tokens whatever else is in the batch, up to
rounding ties. A request that cannot be served is refused before any work starts. Weights change only while no request is
unfinished, so one completion comes from one version. The turns of an episode are requests of one sample: each goes on with the
noise, the chunk of states and, where the engine keeps it, the cache of the one before.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from torch import Tensor

from shoal.errors import ShoalError
from shoal.protocol.segments import sampled_count, segment_complaint

FinishReason = Literal["stop", "length", "done", "turns", "context", "failed"]
"""Of a plain completion the first two; of an episode all but the first."""
SEED_LIMIT = 1 << 64
LORA_CLASS = "+lora"
"""Ends the numerics class of an engine that adds an adapter's product to that of a frozen base."""


class RequestError(ShoalError):
    """A request that no engine can serve; the message says which one and why."""

    code = "engine_request"
    permanent = False


class EngineBusyError(ShoalError):
    """The engine is asked for something that its open stream does not allow."""

    code = "engine_busy"
    permanent = False


class WeightsNotLoadedError(ShoalError):
    """An engine was asked to work before it got weights."""

    code = "no_weights"
    permanent = False


@dataclass(frozen=True, eq=False)
class Carry:
    """What a turn of a sample leaves for the next one; only for the engine that made it, and its weights of then."""

    sampled: int
    """Tokens that the sample has sampled so far."""
    states: Tensor  # [sampled mod 32, D] bf16, those of the unfinished chunk
    weights: int
    """Counts the weights that the engine has loaded."""
    cache: object = None
    """What the engine keeps of the tokens it has seen, if anything."""


@dataclass(frozen=True)
class GenerationRequest:
    prompt_tokens: tuple[int, ...]
    """Of a later turn: everything before it, with what was sampled and given."""
    seed: int  # unsigned, 64 bits
    max_new_tokens: int
    carry: Carry | None = field(default=None, compare=False)
    """Of the turn before, if there was one."""
    keeps: bool = False
    """Whether its completion is to have a carry."""

    @property
    def first_index(self) -> int:
        """Sampling index of its first token."""
        return self.carry.sampled if self.carry is not None else 0


@dataclass
class Completion:
    tokens: list[int] = field(default_factory=list)
    """An end-of-sequence token, if one was sampled, is the last entry."""
    logprobs: list[float] = field(default_factory=list)
    """log_softmax(logits / T) of each token, without the noise."""
    finish_reason: FinishReason = "length"
    proofs: list[bytes] = field(default_factory=list)
    """One commitment per started chunk of states; of a later turn, from the chunk that the turn before left unfinished."""
    carry: Carry | None = field(default=None, compare=False)
    segment_lengths: list[int] = field(default_factory=list)
    """Of an episode of several turns; otherwise all tokens were sampled in one."""


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens to be scored: those of the sampled segments; the others are only read."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    seed: int
    segment_lengths: tuple[int, ...] = ()
    """Without any, all output tokens are one sampled segment."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.segment_lengths or (len(self.output_tokens),)

    @property
    def sampled_count(self) -> int:
        return sampled_count(self.lengths)


@dataclass
class Scored:
    """Of each sampled token."""

    margins: Tensor  # [n] fp32, by how much each token lost; 0 for the winner
    logprobs: Tensor  # [n] fp32
    states: Tensor  # [n, D] bf16, the inputs of the LM head
    rivals: Tensor  # [n, 4] fp32, of the winner's two closest rivals the gaps of scores, then of logits / T


class Stream(Protocol):
    """Requests that enter while others run, all at one temperature. An engine has one open stream at a time."""

    @property
    def rows(self) -> int:
        """Requests that are sampled at once; others wait in the order in which they were submitted."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        ...

    @property
    def generated(self) -> int:
        """Tokens sampled so far, those of unfinished and cancelled requests included."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Takes all of them or, if one cannot be served, none; returns their numbers, which are never used again."""
        ...

    def step(self) -> list[tuple[int, Completion]]:
        """One more token for every running request; returns those that ended, by their numbers."""
        ...

    def cancel(self, numbers: Collection[int]) -> None:
        """Drops those of these requests that are unfinished."""
        ...

    def close(self) -> None:
        """Drops what is unfinished."""
        ...

    def __enter__(self) -> "Stream": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Engine(Protocol):
    numerics_class: str
    """Engine, compute dtype and device class, such as `torch/float32/cpu`, with an adapter `torch/float32/cpu+lora`: what a
    calibration is made for."""

    @property
    def vocab_size(self) -> int:
        """Token ids end below it."""
        ...

    def load(self, directory: Path) -> None:
        """Replace the weights in place by those of `directory`/model.safetensors; on refusal the old ones stay.

        Of an engine on a base it is an adapter: one that is still resident is only pointed at."""
        ...

    def open(self, *, temperature: float, max_tokens: int, rows: int | None = None) -> Stream:
        """A stream for requests of at most `max_tokens` positions, prompt and output; by default with as many rows as it can."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Sample every request; `on_progress` is called now and then with the tokens made so far."""
        ...

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        """Score given tokens with one prefill each."""
        ...


def generate_all(
    stream: Stream, requests: Sequence[GenerationRequest], on_progress: Callable[[int], None] | None
) -> list[Completion]:
    """The completions of a stream that has nothing else to do, in the order of the requests."""
    numbers = stream.submit(requests)
    ended: dict[int, Completion] = {}
    while stream.unfinished:
        ended.update(stream.step())
        if on_progress is not None:
            on_progress(stream.generated)
    return [ended[number] for number in numbers]


def positions_needed(requests: Sequence[GenerationRequest]) -> int:
    return max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)


def check_generation(requests: Sequence[GenerationRequest], *, vocab_size: int, max_tokens: int) -> None:
    for index, request in enumerate(requests):
        _check_tokens(f"Request {index}", request.prompt_tokens, vocab_size)
        _check_seed(index, request.seed)
        if request.max_new_tokens < 1:
            raise RequestError(f"Request {index} asks for {request.max_new_tokens} new tokens; at least 1 is needed.")
        _check_length(index, len(request.prompt_tokens) + request.max_new_tokens, max_tokens)


def check_carries(requests: Sequence[GenerationRequest], weights: int) -> None:
    for index, request in enumerate(requests):
        if request.carry is not None and request.carry.weights != weights:
            raise RequestError(f"Request {index} goes on with a sample that began with other weights.")


def check_scoring(requests: Sequence[ScoreRequest], *, vocab_size: int, max_tokens: int) -> None:
    for index, request in enumerate(requests):
        _check_tokens(f"Request {index}", request.prompt_tokens, vocab_size)
        _check_tokens(f"The output of request {index}", request.output_tokens, vocab_size)
        _check_seed(index, request.seed)
        _check_length(index, len(request.prompt_tokens) + len(request.output_tokens), max_tokens)
        if complaint := segment_complaint(request.lengths, len(request.output_tokens)):
            raise RequestError(f"Request {index} {complaint}.")


def check_ready(loaded: bool, temperature: float) -> None:
    """Refuse work before there are weights, and a temperature that nothing can be sampled at."""
    if not loaded:
        raise WeightsNotLoadedError("The engine has no weights yet.", hint="Call load() with a policy version first.")
    if not 0 < temperature < float("inf"):
        raise RequestError(f"Temperature {temperature} is not a positive number.")


def signed_seed(seed: int) -> int:
    """The two's complement of an unsigned 64-bit seed: torch has signed integers only."""
    return seed - SEED_LIMIT if seed >= SEED_LIMIT // 2 else seed


def _check_tokens(what: str, tokens: Sequence[int], vocab_size: int) -> None:
    if not tokens:
        raise RequestError(f"{what} has no tokens.")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(f"{what} has token {wrong}; the vocabulary ends at {vocab_size - 1}.")


def _check_seed(index: int, seed: int) -> None:
    if not 0 <= seed < SEED_LIMIT:
        raise RequestError(f"Request {index} has seed {seed}, which is not an unsigned 64-bit number.")


def _check_length(index: int, tokens: int, max_tokens: int) -> None:
    if tokens > max_tokens:
        raise RequestError(
            f"Request {index} needs {tokens} positions; the model has {max_tokens}.",
            hint="Shorten the prompt or lower max_new_tokens.",
        )
