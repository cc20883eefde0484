"""Completions of an episode's turns as one: tokens, log-probabilities and commitments in order.

Commitments cover chunks of sampled states over the whole episode, so the last one of a turn that ended inside a chunk is replaced
by the first one of the next turn.
"""

from collections.abc import Sequence

from shoal.policy.engine import Completion
from shoal.proofs.commitments import CHUNK_TOKENS


def join_turns(turns: Sequence[Completion]) -> Completion:
    """What was sampled in all turns; the last one says how it ended."""
    joined = Completion(finish_reason=turns[-1].finish_reason)
    for turn in turns:
        if len(joined.logprobs) % CHUNK_TOKENS:
            joined.proofs.pop()
        joined.tokens += turn.tokens
        joined.logprobs += turn.logprobs
        joined.proofs += turn.proofs
    return joined
