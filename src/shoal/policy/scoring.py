"""Judging given tokens by prefill: distinct prompts once, then the outputs of all their samples in batches of similar length.

In: score requests. Out, in their order: margins, log-probabilities and states. Memory is bounded by the token limit: cache entries
exist for one group of prompts at a time, and logits for one chunk of output positions.

Shapes: P prompts, B sequences, N output positions, D hidden size, V vocabulary.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.policy.engine import Scored, ScoreRequest, signed_seed
from shoal.policy.prompts import PrefilledPrompts, Prompt, continue_prompts, prefill_prompts
from shoal.policy.runner import ModelRunner
from shoal.proofs.sampling import token_margins

# What one more pass through a small model costs beside its tokens, in tokens: less padding than this is not worth a pass.
_PASS_TOKENS = 128
# Logits of one chunk, in values: large enough for big matrix products, small enough to forget.
_LOGITS_CHUNK = 1 << 22

Key = TypeVar("Key", bound=Hashable)


def score_requests(
    runner: ModelRunner, requests: Sequence[ScoreRequest], *, temperature: float, token_limit: int
) -> list[Scored]:
    scored: dict[int, Scored] = {}
    by_prompt: dict[Prompt, list[int]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(request.prompt_tokens, []).append(index)
    for group in length_batches({prompt: len(prompt) for prompt in by_prompt}, token_limit):
        prompts = prefill_prompts(runner, group)
        lengths = {index: len(requests[index].output_tokens) for prompt in group for index in by_prompt[prompt]}
        for batch in length_batches(lengths, token_limit):
            members = [requests[index] for index in batch]
            scored.update(zip(batch, _score_batch(runner, prompts, members, temperature), strict=True))
    return [scored[index] for index in range(len(requests))]


def length_batches(lengths: dict[Key, int], token_limit: int) -> Iterator[list[Key]]:
    """Keys of similar length; each batch is within the limit once padded and pads little, or has one member."""
    batch: list[Key] = []
    held = 0
    for key in sorted(lengths, key=lengths.__getitem__):
        padded, held = lengths[key] * (len(batch) + 1), held + lengths[key]
        if batch and (padded > token_limit or padded - held > _PASS_TOKENS):
            yield batch
            batch, held = [], lengths[key]
        batch.append(key)
    if batch:
        yield batch


def _score_batch(
    runner: ModelRunner, prompts: PrefilledPrompts, requests: Sequence[ScoreRequest], temperature: float
) -> list[Scored]:
    counts = [len(request.output_tokens) for request in requests]
    states_ND = _output_states(runner, prompts, requests, counts)
    seeds = torch.tensor([signed_seed(request.seed) for request in requests]).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(count) for count in counts])
    tokens = torch.tensor([token for request in requests for token in request.output_tokens])
    inputs_3N = torch.stack([seeds, positions, tokens]).to(states_ND.device)
    margins, logprobs = _judge(runner, states_ND, inputs_3N, temperature)
    parts = [part.split_with_sizes(counts) for part in (margins, logprobs, states_ND.to(torch.bfloat16))]
    return [Scored(margins=m, logprobs=p, states=s) for m, p, s in zip(*parts, strict=True)]


def _output_states(
    runner: ModelRunner, prompts: PrefilledPrompts, requests: Sequence[ScoreRequest], counts: Sequence[int]
) -> Tensor:
    """The states that produced the outputs, request after request. The last token is judged, never fed."""
    source_B = prompts.sources([request.prompt_tokens for request in requests])
    first_B1D = prompts.states_PD[source_B][:, None]
    if max(counts) == 1:
        return first_B1D[:, 0]
    fed = [request.output_tokens[:-1] for request in requests]
    states_BSD = torch.cat([first_B1D, continue_prompts(runner, prompts, source_B, fed)], dim=1)
    used_BS = torch.arange(max(counts))[None] < torch.tensor(counts)[:, None]
    return states_BSD[used_BS.to(states_BSD.device)]


def _judge(runner: ModelRunner, states_ND: Tensor, inputs_3N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    size = max(1, _LOGITS_CHUNK // runner.vocab_size)
    judged: list[tuple[Tensor, Tensor]] = []
    for start in range(0, states_ND.shape[0], size):
        logits = runner.logits(states_ND[start : start + size])
        seeds, positions, tokens = inputs_3N[:, start : start + size]
        judged.append(token_margins(logits, seeds, positions, tokens, temperature))
    margins, logprobs = zip(*judged, strict=True)
    return torch.cat(margins), torch.cat(logprobs)
