"""A completion as a conversation: the prompt, what the policy sampled, what an environment answered, in order.

Defined over a list of segments, alternately sampled and given by an environment, the first one sampled; a plain completion has
one. Log-probabilities, margins and entropies are of sampled tokens only, in order over the whole row. Tokens and values are those
of a stranger's file: too many are cut, missing ones are none, ids that no tokenizer has give no text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from typing import Literal, NamedTuple

from shoal.protocol.page_views import OwnerToken, OwnerTurn

Role = Literal["sampled", "environment"]
Decode = Callable[[Sequence[int]], str]

INCOMPLETE = "\ufffd"
MOST_TOKENS = 20_000
"""Of one completion; a browser shows no more."""


class Segment(NamedTuple):
    role: Role
    tokens: Sequence[int]


@dataclass(frozen=True)
class TokenValues:
    """What is known of each sampled token; a list that ends early leaves the rest unknown."""

    logprobs: Sequence[float] = ()
    margins: Sequence[float] = ()
    entropies: Sequence[float] = ()

    def __iter__(self) -> Iterator[tuple[float | None, float | None, float | None]]:
        return zip(_endless(self.logprobs), _endless(self.margins), _endless(self.entropies), strict=True)


def segments(tokens: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    """The segments of an output by their lengths."""
    spans = pairwise([0, *accumulate(lengths)])
    return [
        Segment("environment" if number % 2 else "sampled", tokens[start:end])
        for number, (start, end) in enumerate(spans)
    ]


def conversation(
    decode: Decode, prompt: Sequence[int], parts: Iterable[Segment], values: TokenValues
) -> list[OwnerTurn]:
    """The prompt and one turn per segment, as far as a browser shows them."""
    turns, known, left = [_given("prompt", decode, prompt)], iter(values), MOST_TOKENS
    for part in parts:
        shown = part.tokens[:left]
        left -= len(shown)
        is_sampled = part.role == "sampled"
        turns.append(_sampled(decode, shown, known) if is_sampled else _given("environment", decode, shown))
        if not left:
            break
    return turns


def token_pieces(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. A character of several tokens appears with the last of them."""
    pieces, context, shown = list[str](), 0, 0
    for end in range(1, len(tokens) + 1):
        before, text = decode(tokens[context:shown]), decode(tokens[context:end])
        is_whole = not text.endswith(INCOMPLETE) or end == len(tokens)
        if len(text) > len(before) and is_whole:
            pieces.append(text[len(before) :])
            context, shown = shown, end
        else:
            pieces.append("")
    return pieces


def _given(speaker: str, decode: Decode, tokens: Sequence[int]) -> OwnerTurn:
    return OwnerTurn(speaker=speaker, text=decode(tokens), tokens=[])


def _sampled(
    decode: Decode, tokens: Sequence[int], values: Iterator[tuple[float | None, float | None, float | None]]
) -> OwnerTurn:
    shown = [
        OwnerToken(text=piece, logprob=logprob, margin=margin, entropy=entropy)
        for piece, (logprob, margin, entropy) in zip(token_pieces(decode, tokens), values, strict=False)
    ]
    return OwnerTurn(speaker="policy", text=decode(tokens), tokens=shown)


def _endless(values: Sequence[float]) -> Iterator[float | None]:
    return chain(values, repeat(None))
