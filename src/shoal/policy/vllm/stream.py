"""The open stream of a vLLM engine: numbers requests, feeds vLLM's scheduler, and joins its tokens with what the worker recorded.

vLLM decides which of its requests run; more than its rows wait inside it. A request that is dropped is aborted in vLLM and
forgotten by the recorder, so that neither keeps anything of it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from shoal.policy.engine import Completion, GenerationRequest, check_generation, signed_seed
from shoal.policy.vllm.recorder import Collected


class VllmRequests:
    """Requests of one vLLM instance, by number."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._numbers = 0
        self.unfinished: set[int] = set()

    def add(self, tokens: Sequence[int], options: dict[str, Any], ours: dict[str, Any]) -> int:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        number = self._numbers
        self._numbers += 1
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"shoal": {**ours, "number": number}},
            **options,
        )
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._llm.llm_engine.add_request(str(number), tokens_input(list(tokens)), params)
        self.unfinished.add(number)
        return number

    def step(self) -> Iterator[tuple[int, Any]]:
        """Number and output of each request that ended with this step."""
        for output in self._llm.llm_engine.step():
            number = int(output.request_id)
            self.unfinished.discard(number)
            yield number, output.outputs[0]

    def collect(self, numbers: Sequence[int]) -> Collected:
        collected: Collected = self._llm.collective_rpc("shoal_collect", args=(list(numbers),))[0]
        return collected

    def drop(self, numbers: Collection[int]) -> None:
        dropped = sorted(self.unfinished.intersection(numbers))
        if dropped:
            self._llm.llm_engine.abort_request([str(number) for number in dropped])
            self.unfinished.difference_update(dropped)
            self.collect(dropped)

    @contextmanager
    def dropping_the_rest(self) -> Iterator[None]:
        """Drops what is unfinished when the block ends, as after an interrupt."""
        try:
            yield
        finally:
            self.drop(list(self.unfinished))


class VllmStream:
    def __init__(
        self,
        requests: VllmRequests,
        *,
        rows: int,
        temperature: float,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_tokens: int,
        on_close: Callable[[], None],
    ) -> None:
        self._requests, self.rows, self.generated = requests, rows, 0
        self._temperature, self._eos_token_ids = temperature, list(eos_token_ids)
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._on_close = on_close

    @property
    def unfinished(self) -> int:
        return len(self._requests.unfinished)

    def __enter__(self) -> "VllmStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.cancel(list(self._requests.unfinished))
        self._on_close()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        check_generation(requests, vocab_size=self._vocab_size, max_tokens=self._max_tokens)
        return [self._add(request) for request in requests]

    def _add(self, request: GenerationRequest) -> int:
        options = {"max_tokens": request.max_new_tokens, "stop_token_ids": self._eos_token_ids}
        ours = {"seed": signed_seed(request.seed), "temperature": self._temperature}
        return self._requests.add(request.prompt_tokens, options, ours)

    def step(self) -> list[tuple[int, Completion]]:
        if not self._requests.unfinished:
            return []
        ended = dict(self._requests.step())
        if not ended:
            return []
        recorded = self._requests.collect(list(ended)).recorded
        self.generated += sum(len(output.token_ids) for output in ended.values())
        return [
            (
                number,
                Completion(
                    tokens=list(output.token_ids),
                    logprobs=recorded[number].logprobs,
                    finish_reason=output.finish_reason,
                    proofs=recorded[number].proofs,
                ),
            )
            for number, output in ended.items()
        ]

    def cancel(self, numbers: Collection[int]) -> None:
        self._requests.drop(numbers)
