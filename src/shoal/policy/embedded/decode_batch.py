"""Continuous batching of one `generate` call: finished rows leave, waiting requests enter, none waits for the longest.

Requests with equal prompts wait next to each other and share one prefill. Rows are numbered densely (attention reads the first
n); what a row has produced lies in a slot that it keeps until it leaves, so closing a gap moves cache entries and the row's state.
A step is a few large operations; Python touches only the rows that finish or fill a chunk of states.

Shapes: R live rows, Z slots, N longest output, D hidden size, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.policy.embedded.kv_cache import KeyValueCache
from shoal.policy.embedded.prompts import PrefilledPrompts, prefill_prompts
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.engine import Completion, GenerationRequest, signed_seed
from shoal.proofs.commitments import CHUNK_TOKENS, build_proofs
from shoal.proofs.sampling import choose_tokens

# Chunks of states that wait for one batched proof computation; bounds the memory of states that are kept.
_PROOF_BATCH = 64
# A prefill costs a pass through the model however few prompts it has, so requests enter once 1/8 of the rows is free.
_ADMISSION_SHARE = 8


class Rows:
    """The state of each row: named views of one table, so that entering and moving are one operation each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.token, self.position, self.count, self.seed, self.limit, self.slot = self._table

    def enter(self, rows: slice, requests: Sequence[GenerationRequest], slots: Sequence[int]) -> None:
        """New requests, before their first token."""
        states = [
            [0, len(request.prompt_tokens), 0, signed_seed(request.seed), request.max_new_tokens, slot]
            for request, slot in zip(requests, slots, strict=True)
        ]
        self._table[:, rows] = torch.tensor(states, device=self._table.device).T

    def move(self, to_rows: Tensor, from_rows: Tensor) -> None:
        self._table[:, to_rows] = self._table[:, from_rows]


class DecodeBatch:
    def __init__(
        self,
        runner: ModelRunner,
        cache: KeyValueCache,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        eos_token_ids: Sequence[int],
        prefill_tokens: int,
    ) -> None:
        self.runner, self.cache, self.temperature = runner, cache, temperature
        self.prefill_tokens = prefill_tokens
        self.requests = requests
        self.completions = [Completion() for _ in requests]
        self.generated = 0
        by_prompt = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt_tokens), requests[i].prompt_tokens)
        )
        self._waiting = deque(reversed(by_prompt))  # long prompts first: neighbours pad little, and the tail is short
        self._shared: PrefilledPrompts | None = None
        self._live = 0
        device, rows = runner.device, cache.rows
        self._rows = Rows(rows, device)
        self._free_slots = list(range(rows))
        self._request_of_slot = [-1] * rows
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
        longest_output = max(request.max_new_tokens for request in requests)
        self._tokens_ZN = torch.zeros(rows, longest_output, dtype=torch.int64, device=device)
        self._logprobs_ZN = torch.zeros(rows, longest_output, dtype=torch.float32, device=device)
        self._chunks = torch.zeros(rows, CHUNK_TOKENS, runner.hidden_size, dtype=torch.bfloat16, device=device)
        self._unproven: list[tuple[int, Tensor]] = []

    def run(self, on_progress: Callable[[int], None] | None) -> list[Completion]:
        while self._waiting or self._live:
            self._admit()
            if self._live:
                self._decode()
            if on_progress is not None:
                on_progress(self.generated)
        self._prove()
        return self.completions

    def _admit(self) -> None:
        """Fill free rows; the prefill of a prompt that still has requests waiting is kept for them."""
        if (self.cache.rows - self._live) * _ADMISSION_SHARE < self.cache.rows:
            return
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.cache.rows - self._live))]
        while taken:
            prompts = self._next_prompts(taken)
            entering = [index for index in taken if self.requests[index].prompt_tokens in prompts.index]
            taken = taken[len(entering) :]
            last = self.requests[entering[-1]].prompt_tokens
            more = taken[0] if taken else self._waiting[0] if self._waiting else None
            self._shared = (
                prompts.only(last) if more is not None and self.requests[more].prompt_tokens == last else None
            )
            self._enter(prompts, entering)

    def _next_prompts(self, taken: Sequence[int]) -> PrefilledPrompts:
        first = self.requests[taken[0]].prompt_tokens
        if self._shared is not None and first in self._shared.index:
            return self._shared
        distinct = dict.fromkeys(self.requests[index].prompt_tokens for index in taken)
        fitting = max(1, self.prefill_tokens // len(first))  # the first is the longest
        return prefill_prompts(self.runner, list(distinct)[:fitting])

    def _enter(self, prompts: PrefilledPrompts, entering: Sequence[int]) -> None:
        source_R = prompts.sources([self.requests[index].prompt_tokens for index in entering])
        for plane, entries in enumerate(prompts.entries):
            self.cache.write_prompts(plane, self._live, source_R, entries)
        rows = slice(self._live, self._live + len(entering))
        slots = [self._take_slot(index) for index in entering]
        self._rows.enter(rows, [self.requests[index] for index in entering], slots)
        self._live += len(entering)
        self._sample(rows, prompts.states_PD[source_R])

    def _take_slot(self, index: int) -> int:
        slot = self._free_slots.pop()
        self._request_of_slot[slot] = index
        return slot

    def _decode(self) -> None:
        rows = slice(0, self._live)
        positions_R = self._rows.position[rows]
        states_RD = self.runner.decode(self._rows.token[rows], positions_R, self.cache, int(positions_R.max()) + 1)
        positions_R += 1
        self._sample(rows, states_RD)

    def _sample(self, rows: slice, states_RD: Tensor) -> None:
        counts_R, slots_R, seeds_R = self._rows.count[rows], self._rows.slot[rows], self._rows.seed[rows]
        tokens_R, logprobs_R = choose_tokens(self.runner.logits(states_RD), seeds_R, counts_R, self.temperature)
        written_R = slots_R * self._tokens_ZN.shape[1] + counts_R
        self._tokens_ZN.view(-1).index_copy_(0, written_R, tokens_R)
        self._logprobs_ZN.view(-1).index_copy_(0, written_R, logprobs_R)
        chunk_places_R = slots_R * CHUNK_TOKENS + counts_R % CHUNK_TOKENS
        self._chunks.view(-1, states_RD.shape[1]).index_copy_(0, chunk_places_R, states_RD.to(torch.bfloat16))
        self._rows.token[rows] = tokens_R
        counts_R += 1
        self.generated += tokens_R.shape[0]
        stopped_R = torch.isin(tokens_R, self._eos)
        ended_R = stopped_R | (counts_R >= self._rows.limit[rows])
        events_R = ended_R | (counts_R % CHUNK_TOKENS == 0)
        events = events_R.nonzero()[:, 0]
        if events.numel():
            self._handle(rows.start, events, ended_R, stopped_R)

    def _handle(self, first_row: int, events: Tensor, ended_R: Tensor, stopped_R: Tensor) -> None:
        rows = events + first_row
        columns = [
            ended_R[events].long(),
            stopped_R[events].long(),
            rows,
            self._rows.count[rows],
            self._rows.slot[rows],
        ]
        gone: list[int] = []
        for ended, stopped, row, count, slot in torch.stack(columns).T.tolist():
            self._unproven.append(
                (self._request_of_slot[slot], self._chunks[slot, : (count - 1) % CHUNK_TOKENS + 1].clone())
            )
            if ended:
                self._finish(slot, count, bool(stopped))
                gone.append(row)
        if len(self._unproven) >= _PROOF_BATCH:
            self._prove()
        if gone:
            self._close_gaps(gone)

    def _finish(self, slot: int, count: int, stopped: bool) -> None:
        completion = self.completions[self._request_of_slot[slot]]
        completion.tokens = self._tokens_ZN[slot, :count].tolist()
        completion.logprobs = self._logprobs_ZN[slot, :count].tolist()
        completion.finish_reason = "stop" if stopped else "length"
        self._free_slots.append(slot)

    def _close_gaps(self, gone: Sequence[int]) -> None:
        remaining = self._live - len(gone)
        left = set(gone)
        holes = [row for row in gone if row < remaining]
        movers = [row for row in range(remaining, self._live) if row not in left]
        self._live = remaining
        if holes:
            to_rows, from_rows = torch.tensor([holes, movers], device=self.runner.device)
            longest = int(self._rows.position[from_rows].max())
            self._rows.move(to_rows, from_rows)
            self.cache.move(to_rows, from_rows, longest)

    def _prove(self) -> None:
        proofs = build_proofs([chunk for _, chunk in self._unproven])
        for (index, _), proof in zip(self._unproven, proofs, strict=True):
            self.completions[index].proofs.append(proof)
        self._unproven.clear()
