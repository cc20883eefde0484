"""Scores given tokens by prefill: distinct prompts once, then their distinct outputs in batches of similar length.

Of a completion of several segments only sampled tokens are scored; the others are read on the way.
Completions of a low-entropy policy are often the same token for token: duplicates share the pass, only their margins differ.

In: score requests. Out, in their order: margins, log-probabilities and states. Memory is bounded by the token limit: cache entries
exist for one group of prompts at a time, and logits for one chunk of output positions.

Shapes: P prompts, B distinct outputs, N sampled positions in them, M requests, R sampled tokens of all requests, D hidden size.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shoal.policy.batching import length_batches
from shoal.policy.embedded.family import Runner
from shoal.policy.embedded.prompts import PrefilledPrompts, Prompt
from shoal.policy.engine import Scored, ScoreRequest, signed_seed
from shoal.proofs.sampling import RIVALS, token_margins
from shoal.protocol.segments import sampled_places, sampled_values

# What one more pass through a small model costs beside its tokens, in tokens: less padding than this is not worth a pass.
_PASS_TOKENS = 128
# Logits of one chunk, in values: large enough for big matrix products, small enough to forget.
LOGITS_CHUNK = 1 << 22


def score_requests(
    runner: Runner, requests: Sequence[ScoreRequest], *, temperature: float, token_limit: int
) -> list[Scored]:
    scored: dict[int, Scored] = {}
    by_prompt: dict[Prompt, dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]] = {}
    for index, request in enumerate(requests):
        tokens = request.output_tokens, request.lengths
        by_prompt.setdefault(request.prompt_tokens, {}).setdefault(tokens, []).append(index)
    limits = {"token_limit": token_limit, "padding_limit": _PASS_TOKENS}
    for group in length_batches({prompt: len(prompt) for prompt in by_prompt}, **limits):
        prompts = runner.read_prompts(group)
        duplicates = {tuple(same): len(output) for prompt in group for (output, _), same in by_prompt[prompt].items()}
        for batch in length_batches(duplicates, **limits):
            members = [[requests[index] for index in same] for same in batch]
            indices = [index for same in batch for index in same]
            scored.update(zip(indices, _score_batch(runner, prompts, members, temperature), strict=True))
    return [scored[index] for index in range(len(requests))]


def _score_batch(
    runner: Runner, prompts: PrefilledPrompts, duplicates: Sequence[Sequence[ScoreRequest]], temperature: float
) -> list[Scored]:
    """All requests; `duplicates` are lists of requests with the same tokens and other seeds."""
    counts_B = [same[0].sampled_count for same in duplicates]
    states_ND = _sampled_states(runner, prompts, [same[0] for same in duplicates])
    claims_4R = _claims(duplicates, counts_B).to(states_ND.device)
    margins_R, logprobs_R, rivals_R4 = _margins(runner, states_ND, claims_4R, temperature)
    counts_M = [count for same, count in zip(duplicates, counts_B, strict=True) for _ in same]
    states = states_ND.to(torch.bfloat16).split_with_sizes(counts_B)
    shared = [part for same, part in zip(duplicates, states, strict=True) for _ in same]
    margins_M, logprobs_M, rivals_M = (
        values.split_with_sizes(counts_M) for values in (margins_R, logprobs_R, rivals_R4)
    )
    return [Scored(*parts) for parts in zip(margins_M, logprobs_M, shared, rivals_M, strict=True)]


def _claims(duplicates: Sequence[Sequence[ScoreRequest]], counts_B: Sequence[int]) -> Tensor:
    """Of each sampled token of each request, as [4, R]: the row of its state, sampling seed, index and the token itself."""
    copies_B = torch.tensor([len(same) for same in duplicates])
    starts_B = torch.tensor([0, *accumulate(counts_B)][:-1])
    counts_M = torch.tensor(counts_B).repeat_interleave(copies_B)
    positions_R = torch.cat(
        [torch.arange(count).repeat(len(same)) for same, count in zip(duplicates, counts_B, strict=True)]
    )
    rows_R = starts_B.repeat_interleave(copies_B).repeat_interleave(counts_M) + positions_R
    seeds_M = torch.tensor([signed_seed(request.seed) for same in duplicates for request in same])
    sampled = [sampled_values(same[0].output_tokens, same[0].lengths) for same in duplicates]
    tokens = [token for same, own in zip(duplicates, sampled, strict=True) for token in own * len(same)]
    return torch.stack([rows_R, seeds_M.repeat_interleave(counts_M), positions_R, torch.tensor(tokens)])


def _sampled_states(runner: Runner, prompts: PrefilledPrompts, requests: Sequence[ScoreRequest]) -> Tensor:
    """The states that produced the sampled tokens, request after request. The last token is scored, never fed."""
    source_B = prompts.sources([request.prompt_tokens for request in requests])
    first_B1D = prompts.states_PD[source_B][:, None]
    longest = max(len(request.output_tokens) for request in requests)
    if longest == 1:
        return first_B1D[:, 0]
    fed = [request.output_tokens[:-1] for request in requests]
    states_BSD = torch.cat([first_B1D, runner.continue_prompts(prompts, source_B, fed)], dim=1)
    places = [at * longest + place for at, request in enumerate(requests) for place in sampled_places(request.lengths)]
    return states_BSD.flatten(0, 1)[torch.tensor(places, device=states_BSD.device)]


def _margins(runner: Runner, states_ND: Tensor, claims_4R: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    size = max(1, LOGITS_CHUNK // runner.vocab_size)
    margins_R = torch.empty(claims_4R.shape[1], dtype=torch.float32, device=claims_4R.device)
    logprobs_R, rivals_R4 = torch.empty_like(margins_R), margins_R.new_empty(margins_R.shape[0], 2 * RIVALS)
    for start in range(0, states_ND.shape[0], size):
        logits = runner.logits(states_ND[start : start + size])
        here_R = (claims_4R[0] >= start) & (claims_4R[0] < start + size)
        rows, seeds, positions, tokens = claims_4R[:, here_R]
        parts = token_margins(logits, seeds, positions, tokens, temperature, rows_R=rows - start)
        for values_R, part in zip((margins_R, logprobs_R, rivals_R4), parts, strict=True):
            values_R[here_R] = part.to(values_R.device)
    return margins_R, logprobs_R, rivals_R4
