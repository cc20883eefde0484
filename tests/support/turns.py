"""Samples of several turns that are given the same tokens between them, for any engine."""

from collections.abc import Sequence

from shoal.policy.engine import Completion, GenerationRequest, Stream

GIVEN = ((9, 8, 7), (3,) * 11, (6, 5))


class Turns:
    """One sample that is given `GIVEN` between its turns, whatever it says."""

    def __init__(self, prompt: tuple[int, ...], seed: int, turn_tokens: int, *, uses_cache: bool = True) -> None:
        self.prompt, self.seed, self.turn_tokens, self.uses_cache = prompt, seed, turn_tokens, uses_cache
        self.turns: list[Completion] = []
        self.output: list[int] = []
        self.lengths: list[int] = []

    def request(self) -> GenerationRequest:
        carry = self.turns[-1].carry if self.turns else None
        if carry is not None and not self.uses_cache:
            carry = type(carry)(carry.sampled, carry.states, carry.weights)
        return GenerationRequest((*self.prompt, *self.output), self.seed, self.turn_tokens, carry, keeps=True)

    def take(self, completion: Completion) -> bool:
        """Whether there is another turn."""
        self.turns.append(completion)
        self.output += completion.tokens
        self.lengths.append(len(completion.tokens))
        if len(self.turns) > len(GIVEN) or completion.carry is None:
            return False
        given = GIVEN[len(self.turns) - 1]
        self.output += given
        self.lengths.append(len(given))
        return True


def play(stream: Stream, samples: Sequence[Turns]) -> None:
    running = dict(zip(stream.submit([one.request() for one in samples]), samples, strict=True))
    while running:
        for number, completion in stream.step():
            one = running.pop(number)
            if one.take(completion):
                running[stream.submit([one.request()])[0]] = one
