"""Continuous batching: finished rows leave, waiting requests enter, none waits for the longest.

Requests with equal prompts that enter one after the other share one prefill. Rows are numbered densely (attention reads the first
n); what a row has produced lies in a slot that it keeps until it leaves, so closing a gap moves cache entries and the row's state.
A step is a few large operations; Python touches only the rows that finish or fill a chunk of states. A request that goes on with an
earlier turn takes over its cache entries (`turns`), its unfinished chunk and its sampling index.

Shapes: R live rows, Z slots, N longest output, D hidden size, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

import torch
from torch import Tensor

from shoal.policy.batching import length_batches
from shoal.policy.embedded.family import RowCache, Runner
from shoal.policy.embedded.kv_cache import KeyValueCache
from shoal.policy.embedded.prompts import PrefilledPrompts
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.embedded.turns import KeptRow, keep_row, resume_rows
from shoal.policy.engine import Carry, Completion, GenerationRequest, check_carries, check_generation, signed_seed
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
            [
                0,
                len(request.prompt_tokens),
                request.first_index,
                signed_seed(request.seed),
                request.first_index + request.max_new_tokens,
                slot,
            ]
            for request, slot in zip(requests, slots, strict=True)
        ]
        self._table[:, rows] = torch.tensor(states, device=self._table.device).T

    def move(self, to_rows: Tensor, from_rows: Tensor) -> None:
        self._table[:, to_rows] = self._table[:, from_rows]


class DecodeBatch:
    """The open stream of an embedded engine."""

    def __init__(
        self,
        runner: Runner,
        cache: RowCache,
        *,
        rows: int,
        temperature: float,
        eos_token_ids: Sequence[int],
        prefill_tokens: int,
        weights: int,
        on_close: Callable[[], None],
    ) -> None:
        self.runner, self.cache, self.temperature = runner, cache, temperature
        self.rows = min(rows, cache.rows)
        self.prefill_tokens, self._weights = prefill_tokens, weights
        self.generated = 0
        self._on_close = on_close
        self._requests: dict[int, GenerationRequest] = {}
        self._completions: dict[int, Completion] = {}
        self._ended: list[int] = []
        self._submitted = 0
        self._waiting: deque[int] = deque()
        self._last_prompt: PrefilledPrompts | None = None
        self._live = 0
        device, rows = runner.device, self.rows
        self._rows = Rows(rows, device)
        self._free_slots = list(range(rows))
        self._number_of_slot = [-1] * rows
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
        self._tokens_ZN = torch.zeros(rows, cache.capacity, dtype=torch.int64, device=device)
        self._logprobs_ZN = torch.zeros(rows, cache.capacity, dtype=torch.float32, device=device)
        self._chunks = torch.zeros(rows, CHUNK_TOKENS, runner.hidden_size, dtype=torch.bfloat16, device=device)
        self._unproven: list[tuple[Completion, Tensor]] = []

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def __enter__(self) -> "DecodeBatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._requests.clear()
        self._waiting.clear()
        self._live = 0
        self._on_close()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        longest = min(self.runner.max_tokens, self.cache.capacity)
        check_generation(requests, vocab_size=self.runner.vocab_size, max_tokens=longest)
        check_carries(requests, self._weights)
        numbers = [*range(self._submitted, self._submitted + len(requests))]
        self._submitted += len(requests)
        self._requests.update(zip(numbers, requests, strict=True))
        self._completions.update((number, Completion()) for number in numbers)
        self._waiting += numbers
        return numbers

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        self._admit()
        if self._live:
            self._decode()
        if self._ended:
            self._prove()
        ended, self._ended = self._ended, []
        return [(number, self._completions.pop(number)) for number in ended]

    @torch.inference_mode()
    def cancel(self, numbers: Collection[int]) -> None:
        dropped = {number for number in numbers if self._requests.pop(number, None) is not None}
        self._waiting = deque(number for number in self._waiting if number not in dropped)
        for number in dropped:
            del self._completions[number]
        slots = self._rows.slot[: self._live].tolist()
        gone = [row for row, slot in enumerate(slots) if self._number_of_slot[slot] in dropped]
        self._free_slots += [slots[row] for row in gone]
        if gone:
            self._close_gaps(gone)

    def weights_changed(self, weights: int) -> None:
        """Keys and values of the old weights are of no use to the new ones."""
        self._last_prompt, self._weights = None, weights

    def _prompt(self, number: int) -> tuple[int, ...]:
        return self._requests[number].prompt_tokens

    def _admit(self) -> None:
        """Fill free rows."""
        free = self.rows - self._live
        if free * _ADMISSION_SHARE < self.rows:
            return
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), free))]
        resumed = {number: kept for number in taken if (kept := self._kept(number)) is not None}
        self._resume(resumed)
        taken = [number for number in taken if number not in resumed]
        while taken:
            prompts = self._next_prompts(taken)
            entering = [number for number in taken if self._prompt(number) in prompts.index]
            taken = [number for number in taken if self._prompt(number) not in prompts.index]
            if prompts is not self._last_prompt:
                self._last_prompt = prompts.only(self._prompt(entering[-1]))
            self._enter(prompts, entering)

    def _kept(self, number: int) -> KeptRow | None:
        carry = self._requests[number].carry
        return carry.cache if carry is not None and isinstance(carry.cache, KeptRow) else None

    def _resume(self, kept: dict[int, KeptRow]) -> None:
        """Later turns, as many in one pass as fit."""
        for batch in length_batches(
            {number: len(self._prompt(number)) for number in kept}, token_limit=self.prefill_tokens
        ):
            prompts = [self._prompt(number) for number in batch]
            assert isinstance(self.runner, ModelRunner)
            assert isinstance(self.cache, KeyValueCache)
            states_RD = resume_rows(self.runner, self.cache, self._live, [kept[number] for number in batch], prompts)
            self._begin(batch, states_RD)

    def _next_prompts(self, taken: Sequence[int]) -> PrefilledPrompts:
        """The prompt that entered last serves those that have it too; others share a pass as far as they fit."""
        if self._last_prompt is not None and self._prompt(taken[0]) in self._last_prompt.index:
            return self._last_prompt
        chosen: list[tuple[int, ...]] = []
        longest = 0
        for prompt in dict.fromkeys(self._prompt(number) for number in taken):
            longest = max(longest, len(prompt))
            if chosen and longest * (len(chosen) + 1) > self.prefill_tokens:
                break
            chosen.append(prompt)
        return self.runner.read_prompts(chosen)

    def _enter(self, prompts: PrefilledPrompts, entering: Sequence[int]) -> None:
        source_R = prompts.sources([self._prompt(number) for number in entering])
        self.cache.enter(self._live, source_R, prompts)
        self._begin(entering, prompts.states_PD[source_R])

    def _begin(self, entering: Sequence[int], states_RD: Tensor) -> None:
        """The first token of rows whose prompts are in the cache."""
        rows = slice(self._live, self._live + len(entering))
        slots = [self._take_slot(number) for number in entering]
        self._rows.enter(rows, [self._requests[number] for number in entering], slots)
        for number, slot in zip(entering, slots, strict=True):
            if (carry := self._requests[number].carry) is not None:
                self._chunks[slot, : carry.states.shape[0]] = carry.states
        self._live += len(entering)
        self._sample(rows, states_RD)

    def _take_slot(self, number: int) -> int:
        slot = self._free_slots.pop()
        self._number_of_slot[slot] = number
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
            completion = self._completions[self._number_of_slot[slot]]
            self._unproven.append((completion, self._chunks[slot, : (count - 1) % CHUNK_TOKENS + 1].clone()))
            if ended:
                self._finish(row, slot, count, bool(stopped))
                gone.append(row)
        if len(self._unproven) >= _PROOF_BATCH:
            self._prove()
        if gone:
            self._close_gaps(gone)

    def _finish(self, row: int, slot: int, count: int, stopped: bool) -> None:
        number = self._number_of_slot[slot]
        completion, request = self._completions[number], self._requests[number]
        completion.tokens = self._tokens_ZN[slot, request.first_index : count].tolist()
        completion.logprobs = self._logprobs_ZN[slot, request.first_index : count].tolist()
        completion.finish_reason = "stop" if stopped else "length"
        if request.keeps and stopped:
            kept = self._kept_row(row)
            completion.carry = Carry(count, self._chunks[slot, : count % CHUNK_TOKENS].clone(), self._weights, kept)
        self._free_slots.append(slot)
        del self._requests[number]
        self._ended.append(number)

    def _kept_row(self, row: int) -> KeptRow | None:
        """None where rows keep something else: the next turn then reads the whole sequence again."""
        if not isinstance(self.cache, KeyValueCache):
            return None
        return keep_row(self.cache, row, int(self._rows.position[row]))

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
        for (completion, _), proof in zip(self._unproven, proofs, strict=True):
            completion.proofs.append(proof)
        self._unproven.clear()
