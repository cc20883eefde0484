"""What an engine that samples elsewhere has to remember per request: log-probabilities and commitments to states.

Requests are collected by number when they have ended or were cancelled. Steps are handed over as they happen and worked off by one
background thread, so that proofs never delay the next token. A position may be recorded again (a prefill in parts samples more
than once); the last record counts. Only states of unfinished chunks are kept. A failure in the thread is raised by the next call.

Shapes: R rows of one step, D hidden size.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import UnavailableError
from shoal.proofs.commitments import CHUNK_TOKENS, build_proofs

# Steps that may wait for the thread; then the sampler waits for it, and memory stays bounded.
_WAITING_STEPS = 256
_PROOF_BATCH = 64


@dataclass
class Recorded:
    logprobs: list[float] = field(default_factory=list)
    proofs: list[bytes] = field(default_factory=list)
    tail: bytes = b""
    """States of the unfinished chunk, bf16, for the next turn of an episode."""


@dataclass(frozen=True)
class ScoredBytes:
    """Plain bytes, because tensors do not pass every process boundary of vLLM."""

    margins: bytes  # fp32
    logprobs: bytes  # fp32
    states: bytes  # bf16
    rivals: bytes  # fp32


@dataclass(frozen=True)
class Collected:
    """What a worker process hands back of requests that ended, by their numbers."""

    recorded: dict[int, Recorded]
    scored: dict[int, ScoredBytes]


@dataclass
class _Open:
    recorded: Recorded
    states: Tensor
    chunk: int = 0
    filled: int = 0
    first: int = 0
    """Tokens that earlier turns of the sample have."""


class Recorder:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-commitments")
        self._waiting: deque[Future[None]] = deque()
        self._open: dict[int, _Open] = {}
        self._unproven: list[tuple[Recorded, Tensor]] = []

    def begin(self, request: int, first: int, carried: bytes) -> None:
        """A later turn of a sample that has `first` tokens; `carried` are the states of its unfinished chunk."""
        self._waiting.append(self._thread.submit(self._resume, request, first, carried))

    def record(self, requests: Sequence[int], positions: Sequence[int], states_RD: Tensor, logprobs_R: Tensor) -> None:
        """One sampled position of each of several requests."""
        states = states_RD.to(device="cpu", dtype=torch.bfloat16, copy=True)
        self._waiting.append(self._thread.submit(self._take, requests, positions, states, logprobs_R.cpu()))
        while len(self._waiting) > _WAITING_STEPS or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()

    def collect(self, requests: Sequence[int], *, deadline_s: float = 120.0) -> dict[int, Recorded]:
        """These requests, of which nothing more will come, with all chunks closed."""
        self._waiting.append(self._thread.submit(self._close, requests))
        try:
            while self._waiting:
                self._waiting.popleft().result(timeout=deadline_s)
        except TimeoutError:
            raise UnavailableError(f"The commitment thread did not finish within {deadline_s:.0f} s.") from None
        return {request: self._open.pop(request).recorded for request in requests if request in self._open}

    def _take(self, requests: Sequence[int], positions: Sequence[int], states_RD: Tensor, logprobs_R: Tensor) -> None:
        for row, (request, position, logprob) in enumerate(zip(requests, positions, logprobs_R.tolist(), strict=True)):
            entry = self._open.get(request)
            if entry is None:
                entry = _Open(Recorded(), states_RD.new_zeros(CHUNK_TOKENS, states_RD.shape[1]))
                self._open[request] = entry
            if not entry.states.numel():
                entry.states = states_RD.new_zeros(CHUNK_TOKENS, states_RD.shape[1])
            if position // CHUNK_TOKENS > entry.chunk:
                self._close_chunk(entry)
            entry.states[position % CHUNK_TOKENS] = states_RD[row]
            entry.filled = position % CHUNK_TOKENS + 1
            entry.recorded.logprobs[position - entry.first :] = [logprob]

    def _resume(self, request: int, first: int, carried: bytes) -> None:
        if request in self._open:  # it was preempted and comes back
            return
        rest = first % CHUNK_TOKENS
        states = torch.frombuffer(bytearray(carried), dtype=torch.bfloat16).view(rest, -1) if rest else None
        chunk = _Open(Recorded(), torch.zeros(0), chunk=first // CHUNK_TOKENS, first=first)
        if states is not None:
            chunk.states = states.new_zeros(CHUNK_TOKENS, states.shape[1])
            chunk.states[:rest] = states
        self._open[request] = chunk

    def _close_chunk(self, entry: _Open) -> None:
        self._unproven.append((entry.recorded, entry.states[: entry.filled].clone()))
        entry.chunk += 1
        entry.filled = 0
        if len(self._unproven) >= _PROOF_BATCH:
            self._prove()

    def _close(self, requests: Sequence[int]) -> None:
        for request in requests:
            if (entry := self._open.get(request)) is not None and entry.filled:
                unfinished = entry.states[: entry.filled % CHUNK_TOKENS].contiguous()
                entry.recorded.tail = unfinished.view(torch.int16).numpy().tobytes()
                self._close_chunk(entry)
        self._prove()

    def _prove(self) -> None:
        proofs = build_proofs([states for _, states in self._unproven])
        for (recorded, _), proof in zip(self._unproven, proofs, strict=True):
            recorded.proofs.append(proof)
        self._unproven.clear()
