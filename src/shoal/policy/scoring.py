"""Scores given tokens by prefill: distinct prompts once, then their distinct outputs in batches of similar length.

Of a completion of several segments only sampled tokens are scored; the others are read on the way.
Completions of a low-entropy policy are often the same token for token: duplicates share the pass, only their margins differ. Others
begin alike: short ones share the states and logits of their common prefixes.

In: score requests. Out, in their order: margins, log-probabilities and states. Memory is bounded by the token limit: cache entries
exist for one group of prompts at a time, and logits for one chunk of output positions.

Shapes: P prompts, B rows of a pass, O distinct outputs, N states that produced a sampled token, M requests, R sampled tokens of all
requests, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from shoal.policy.batching import length_batches
from shoal.policy.embedded.family import Runner
from shoal.policy.embedded.prompts import PrefilledPrompts, Prompt
from shoal.policy.engine import Scored, ScoreRequest, signed_seed
from shoal.policy.prefixes import PrefixTree, merged
from shoal.proofs.sampling import RIVALS, token_margins
from shoal.protocol.segments import sampled_places, sampled_values

# What one more pass through a small model costs beside its tokens, in tokens: less padding than this is not worth a pass.
_PASS_TOKENS = 128
# Logits of one chunk, in values: large enough for big matrix products, small enough to forget.
LOGITS_CHUNK = 1 << 22


@dataclass(frozen=True)
class _Row:
    """Outputs of one prompt that are read together."""

    tree: PrefixTree
    duplicates: list[list[int]]
    """Of each output the numbers of the requests that have it."""


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
        rows = [
            row for prompt in group for row in _rows(requests, [*by_prompt[prompt].values()], merges=runner.reads_trees)
        ]
        for batch in length_batches({at: len(row.tree.tokens) for at, row in enumerate(rows)}, **limits):
            chosen = [rows[at] for at in batch]
            indices = [index for row in chosen for same in row.duplicates for index in same]
            scored.update(zip(indices, _score_rows(runner, prompts, chosen, requests, temperature), strict=True))
    return [scored[index] for index in range(len(requests))]


def _rows(requests: Sequence[ScoreRequest], duplicates: Sequence[list[int]], *, merges: bool) -> list[_Row]:
    """The last token of an output is scored, never fed."""
    fed = [requests[same[0]].output_tokens[:-1] for same in duplicates]
    trees = merged(fed) if merges else [PrefixTree.path(tokens) for tokens in fed]
    left = iter(duplicates)
    return [_Row(tree, list(islice(left, len(tree.paths)))) for tree in trees]


def _score_rows(
    runner: Runner,
    prompts: PrefilledPrompts,
    rows: Sequence[_Row],
    requests: Sequence[ScoreRequest],
    temperature: float,
) -> list[Scored]:
    duplicates = [[requests[index] for index in same] for row in rows for same in row.duplicates]
    counts_O = [same[0].sampled_count for same in duplicates]
    states_ND, of_tokens = _sampled_states(runner, prompts, rows, duplicates)
    claims_4R = _claims(duplicates, counts_O, of_tokens)
    margins_R, logprobs_R, rivals_R4 = _margins(runner, states_ND, claims_4R, temperature)
    counts_M = [count for same, count in zip(duplicates, counts_O, strict=True) for _ in same]
    states = states_ND.to(torch.bfloat16)[of_tokens].split_with_sizes(counts_O)
    shared = [part for same, part in zip(duplicates, states, strict=True) for _ in same]
    margins_M, logprobs_M, rivals_M = (
        values.split_with_sizes(counts_M) for values in (margins_R, logprobs_R, rivals_R4)
    )
    return [Scored(*parts) for parts in zip(margins_M, logprobs_M, shared, rivals_M, strict=True)]


def _claims(duplicates: Sequence[Sequence[ScoreRequest]], counts_O: Sequence[int], of_tokens: Tensor) -> Tensor:
    """Of each sampled token of each request, as [4, R]: the row of its state, sampling seed, index and the token itself."""
    copies_O, ends_O = torch.tensor([len(same) for same in duplicates]), torch.tensor([*accumulate(counts_O)])
    counts_M = torch.tensor(counts_O).repeat_interleave(copies_O)
    before_M = counts_M.cumsum(0) - counts_M
    positions_R = torch.arange(int(counts_M.sum())) - before_M.repeat_interleave(counts_M)
    first_M = ends_O.repeat_interleave(copies_O) - counts_M
    places_R = first_M.repeat_interleave(counts_M) + positions_R
    seeds_M = torch.tensor([signed_seed(request.seed) for same in duplicates for request in same])
    tokens = [token for same in duplicates for token in sampled_values(same[0].output_tokens, same[0].lengths)]
    claims = of_tokens.cpu()[places_R], seeds_M.repeat_interleave(counts_M), positions_R, torch.tensor(tokens)[places_R]
    return torch.stack(claims).to(of_tokens.device)


def _sampled_states(
    runner: Runner, prompts: PrefilledPrompts, rows: Sequence[_Row], duplicates: Sequence[Sequence[ScoreRequest]]
) -> tuple[Tensor, Tensor]:
    """The states that produced sampled tokens, each once, and of every sampled token of every output the number of its state."""
    first = iter(duplicates)
    outputs = [[next(first)[0] for _ in row.duplicates] for row in rows]
    source_B = prompts.sources([own[0].prompt_tokens for own in outputs])
    states_BSD = prompts.states_PD[source_B][:, None]
    if any(row.tree.tokens for row in rows):
        continued = runner.continue_prompts(prompts, source_B, [row.tree for row in rows])
        states_BSD = torch.cat([states_BSD, continued], dim=1)
    places = [
        at * states_BSD.shape[1] + (1 + path[place - 1] if place else 0)
        for at, (row, own) in enumerate(zip(rows, outputs, strict=True))
        for request, path in zip(own, row.tree.paths, strict=True)
        for place in sampled_places(request.lengths)
    ]
    needed, of_tokens = torch.tensor(places, device=states_BSD.device).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return states_BSD.flatten(0, 1)[needed], of_tokens


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
