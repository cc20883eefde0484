"""Continuous batching: finished samples leave, waiting requests enter, none waits for the longest.

Requests with equal prompts that enter one after the other share one prefill, and one row of the cache until their tokens differ
(`samples`). Rows are numbered densely (attention reads the first n); what a sample has produced lies in a slot that it keeps until
it leaves. A step is a few large operations; Python touches only the samples that finish or fill a chunk of states. A request that
goes on with an earlier turn takes over its cache entries (`turns`), its unfinished chunk and its sampling index.

Shapes: S samples, R rows that they read, Z slots, N longest output, D hidden size, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from shoal.policy.batching import length_batches
from shoal.policy.embedded.family import RowCache, Runner
from shoal.policy.embedded.kv_cache import KeyValueCache
from shoal.policy.embedded.prompts import PrefilledPrompts
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.embedded.samples import Samples, arrange
from shoal.policy.embedded.turns import KeptRow, keep_row, resume_rows
from shoal.policy.engine import Carry, Completion, GenerationRequest, check_carries, check_generation
from shoal.proofs.commitments import CHUNK_TOKENS, build_proofs
from shoal.proofs.sampling import choose_tokens

# Chunks of states that wait for one batched proof computation; bounds the memory of states that are kept.
_PROOF_BATCH = 64
# A prefill costs a pass through the model however few prompts it has, so requests enter once 1/8 of the rows is free.
_ADMISSION_SHARE = 8


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
        """Samples in flight."""
        self._rows = 0
        """Rows of the cache that they read."""
        self._gone: list[int] = []
        """Places of samples that leave with the next arrangement."""
        device, rows = runner.device, self.rows
        self._samples = Samples(rows, device)
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
        self._live = self._rows = 0
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
        before = self._live
        self._admit()
        if self._live > before:
            self._arrange()
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
        slots = self._samples.slot[: self._live].tolist()
        self._gone = [place for place, slot in enumerate(slots) if self._number_of_slot[slot] in dropped]
        self._free_slots += [slots[place] for place in self._gone]
        if self._gone:
            self._arrange()

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
            states_RD = resume_rows(self.runner, self.cache, self._rows, [kept[number] for number in batch], prompts)
            self._begin(batch, range(len(batch)), states_RD)

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
        row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(self._prompt(number) for number in entering))}
        source_R = prompts.sources(list(row_of))
        self.cache.enter(self._rows, source_R, prompts)
        self._begin(entering, [row_of[self._prompt(number)] for number in entering], prompts.states_PD[source_R])

    def _begin(self, entering: Sequence[int], rows: Sequence[int], states_RD: Tensor) -> None:
        """The first token of samples whose prompts are in new rows of the cache; `rows` counts from the first new one."""
        slots = [self._take_slot(number) for number in entering]
        requests = [self._requests[number] for number in entering]
        self._samples.enter(self._live, requests, [self._rows + row for row in rows], slots)
        for request, slot in zip(requests, slots, strict=True):
            if request.carry is not None:
                self._chunks[slot, : request.carry.states.shape[0]] = request.carry.states
        entered = slice(self._live, self._live + len(entering))
        self._live += len(entering)
        self._sample(entered, states_RD, self._samples.row[entered] - self._rows)
        self._rows += states_RD.shape[0]

    def _take_slot(self, number: int) -> int:
        slot = self._free_slots.pop()
        self._number_of_slot[slot] = number
        return slot

    def _decode(self) -> None:
        """One token more for every sample."""
        live, samples = slice(0, self._live), self._samples
        positions_R = samples.position[: self._rows]
        tokens_R, longest = samples.token[: self._rows], int(positions_R.max()) + 1
        states_RD = self.runner.decode(tokens_R, positions_R, self.cache, longest)
        samples.position[live] += 1
        is_shared = self._live > self._rows
        self._sample(live, states_RD, samples.row[live] if is_shared else None)
        if self._gone or (is_shared and self._have_parted()):
            self._arrange()

    def _have_parted(self) -> bool:
        """Whether samples of one row have different tokens now."""
        token_S = self._samples.token[: self._live]
        return not torch.equal(token_S, token_S[self._samples.row[: self._live]])

    def _sample(self, samples: slice, states_RD: Tensor, rows_S: Tensor | None) -> None:
        """Tokens from the states of their rows; None: each sample has the one at its place."""
        table = self._samples
        counts_S, slots_S, seeds_S = table.count[samples], table.slot[samples], table.seed[samples]
        logits_RV = self.runner.logits(states_RD)
        tokens_S, logprobs_S = choose_tokens(logits_RV, seeds_S, counts_S, self.temperature, rows_R=rows_S)
        written_S = slots_S * self._tokens_ZN.shape[1] + counts_S
        self._tokens_ZN.view(-1).index_copy_(0, written_S, tokens_S)
        self._logprobs_ZN.view(-1).index_copy_(0, written_S, logprobs_S)
        chunk_places_S = slots_S * CHUNK_TOKENS + counts_S % CHUNK_TOKENS
        kept_RD = states_RD.to(torch.bfloat16)
        kept_SD = kept_RD if rows_S is None else kept_RD[rows_S]
        self._chunks.view(-1, kept_SD.shape[1]).index_copy_(0, chunk_places_S, kept_SD)
        table.token[samples] = tokens_S
        counts_S += 1
        self.generated += tokens_S.shape[0]
        stopped_S = torch.isin(tokens_S, self._eos)
        ended_S = stopped_S | (counts_S >= table.limit[samples])
        events_S = ended_S | (counts_S % CHUNK_TOKENS == 0)
        events = events_S.nonzero()[:, 0]
        if events.numel():
            self._handle(samples.start, events, ended_S, stopped_S)

    def _handle(self, first: int, events: Tensor, ended_S: Tensor, stopped_S: Tensor) -> None:
        places = events + first
        columns = [
            ended_S[events].long(),
            stopped_S[events].long(),
            places,
            self._samples.count[places],
            self._samples.slot[places],
        ]
        for ended, stopped, place, count, slot in torch.stack(columns).T.tolist():
            completion = self._completions[self._number_of_slot[slot]]
            self._unproven.append((completion, self._chunks[slot, : (count - 1) % CHUNK_TOKENS + 1].clone()))
            if ended:
                self._finish(place, slot, count, bool(stopped))
                self._gone.append(place)
        if len(self._unproven) >= _PROOF_BATCH:
            self._prove()

    def _finish(self, place: int, slot: int, count: int, stopped: bool) -> None:
        number = self._number_of_slot[slot]
        completion, request = self._completions[number], self._requests[number]
        completion.tokens = self._tokens_ZN[slot, request.first_index : count].tolist()
        completion.logprobs = self._logprobs_ZN[slot, request.first_index : count].tolist()
        completion.finish_reason = "stop" if stopped else "length"
        if request.keeps and stopped:
            kept = self._kept_row(place)
            completion.carry = Carry(count, self._chunks[slot, : count % CHUNK_TOKENS].clone(), self._weights, kept)
        self._free_slots.append(slot)
        del self._requests[number]
        self._ended.append(number)

    def _kept_row(self, place: int) -> KeptRow | None:
        """None where rows keep something else: the next turn then reads the whole sequence again."""
        if not isinstance(self.cache, KeyValueCache):
            return None
        return keep_row(self.cache, int(self._samples.row[place]), int(self._samples.position[place]))

    def _arrange(self) -> None:
        """Samples that are gone leave, and those that have parted get rows of their own."""
        tokens_S, rows_S, positions_S = self._samples.places(self._live)
        staying_S = np.delete(np.arange(self._live), self._gone)
        arrangement = arrange(tokens_S, rows_S, staying_S)
        self._gone.clear()
        self._live, self._rows = len(staying_S), arrangement.rows
        if arrangement.to_rows.size:
            longest = int(positions_S[np.isin(rows_S, arrangement.from_rows)].max())
            device = self.runner.device
            to_rows, from_rows = (
                torch.from_numpy(rows).to(device) for rows in (arrangement.to_rows, arrangement.from_rows)
            )
            self.cache.copy(to_rows, from_rows, longest)
        self._samples.reorder(arrangement)

    def _prove(self) -> None:
        proofs = build_proofs([chunk for _, chunk in self._unproven])
        for (completion, _), proof in zip(self._unproven, proofs, strict=True):
            completion.proofs.append(proof)
        self._unproven.clear()
