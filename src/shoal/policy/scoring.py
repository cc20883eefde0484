"""Judging given tokens by prefill: distinct prompts once, then their distinct outputs in batches of similar length.

Samples of a sure policy are often the same token for token: they share the pass, only their draws are judged one by one.

In: score requests. Out, in their order: margins, log-probabilities and states. Memory is bounded by the token limit: cache entries
exist for one group of prompts at a time, and logits for one chunk of output positions.

Shapes: P prompts, B distinct outputs, N positions in them, M requests, R draws (one per output token), D hidden size.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from shoal.policy.embedded.prompts import PrefilledPrompts, Prompt, continue_prompts, prefill_prompts
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.engine import Scored, ScoreRequest, signed_seed
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
    by_prompt: dict[Prompt, dict[tuple[int, ...], list[int]]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(request.prompt_tokens, {}).setdefault(request.output_tokens, []).append(index)
    for group in length_batches({prompt: len(prompt) for prompt in by_prompt}, token_limit):
        prompts = prefill_prompts(runner, group)
        twins = {tuple(same): len(output) for prompt in group for output, same in by_prompt[prompt].items()}
        for batch in length_batches(twins, token_limit):
            members = [[requests[index] for index in same] for same in batch]
            indices = [index for same in batch for index in same]
            scored.update(zip(indices, _score_batch(runner, prompts, members, temperature), strict=True))
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
    runner: ModelRunner, prompts: PrefilledPrompts, twins: Sequence[Sequence[ScoreRequest]], temperature: float
) -> list[Scored]:
    """All requests, one list of twins (the same tokens, other seeds) after the other."""
    counts_B = [len(same[0].output_tokens) for same in twins]
    states_ND = _output_states(runner, prompts, [same[0] for same in twins], counts_B)
    margins, logprobs = _judge(runner, states_ND, _draws(twins, counts_B).to(states_ND.device), temperature)
    counts_M = [count for same, count in zip(twins, counts_B, strict=True) for _ in same]
    states = states_ND.to(torch.bfloat16).split_with_sizes(counts_B)
    shared = [part for same, part in zip(twins, states, strict=True) for _ in same]
    parts = (margins.split_with_sizes(counts_M), logprobs.split_with_sizes(counts_M), shared)
    return [Scored(margins=m, logprobs=p, states=s) for m, p, s in zip(*parts, strict=True)]


def _draws(twins: Sequence[Sequence[ScoreRequest]], counts_B: Sequence[int]) -> Tensor:
    """Of each output token of each request, as [4, R]: the row of its state, sampling seed, position and the token itself."""
    copies_B = torch.tensor([len(same) for same in twins])
    starts_B = torch.tensor([0, *accumulate(counts_B)][:-1])
    counts_M = torch.tensor(counts_B).repeat_interleave(copies_B)
    positions_R = torch.cat(
        [torch.arange(count).repeat(len(same)) for same, count in zip(twins, counts_B, strict=True)]
    )
    rows_R = starts_B.repeat_interleave(copies_B).repeat_interleave(counts_M) + positions_R
    seeds_M = torch.tensor([signed_seed(request.seed) for same in twins for request in same])
    tokens = [token for same in twins for token in same[0].output_tokens * len(same)]
    return torch.stack([rows_R, seeds_M.repeat_interleave(counts_M), positions_R, torch.tensor(tokens)])


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


def _judge(runner: ModelRunner, states_ND: Tensor, draws_4R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    size = max(1, _LOGITS_CHUNK // runner.vocab_size)
    margins_R = torch.empty(draws_4R.shape[1], dtype=torch.float32, device=draws_4R.device)
    logprobs_R = torch.empty_like(margins_R)
    for start in range(0, states_ND.shape[0], size):
        logits = runner.logits(states_ND[start : start + size])
        here_R = (draws_4R[0] >= start) & (draws_4R[0] < start + size)
        rows, seeds, positions, tokens = draws_4R[:, here_R]
        margins, logprobs = token_margins(logits, seeds, positions, tokens, temperature, rows_R=rows - start)
        margins_R[here_R], logprobs_R[here_R] = margins.to(margins_R.device), logprobs.to(margins_R.device)
    return margins_R, logprobs_R
