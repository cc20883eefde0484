"""From one turn to the next in tokens: what an environment's observation adds to a completion, without rendering it again.

Derived from the chat template by rendering probe messages, and proved on others before a run begins: a conversation of several
turns, rendered at once, must be exactly the turns one after the other. A template that drops earlier thinking, ends a turn with a
token at which the policy does not stop, or shows no observations is refused with that reason. Observations never become control
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.errors import ConfigError
from shoal.protocol.environments import EnvironmentReference, Role
from shoal.tasks.codec import PromptStyle, TextCodec
from shoal.tasks.verifiers.answers import THINK_CLOSE, THINK_OPEN

Message = dict[str, str]
PROBES = (("probe zero", "probe one"), ("4 apples", '{"pears": [1, 2.5], "plums": null}'), ("αβγ?", "line\nand line"))
"""Turn and observation; each conversation is a rotation of them."""


class BridgeError(ConfigError):
    """A chat template from which the next turn of an episode cannot be appended."""

    code = "bridge"


@dataclass(frozen=True)
class Bridge:
    codec: TextCodec
    opening: tuple[int, ...]
    """Tokens between the end token of a turn and an observation."""
    closing: tuple[int, ...]
    """Tokens between an observation and the policy's next turn."""
    observation_tokens: int

    def given(self, observation: str) -> list[int]:
        """What follows a turn of the policy, up to its next turn."""
        return [*self.opening, *self.codec.plain_tokens(observation)[: self.observation_tokens], *self.closing]


def build_bridge(codec: TextCodec, style: PromptStyle, reference: EnvironmentReference) -> Bridge:
    """The bridge of an environment, proved; BridgeError says why there is none."""
    for text, token in codec.added_tokens.items():
        if token in codec.plain_tokens(text):
            raise BridgeError(f"The tokenizer cannot write {text} as plain text, so an observation could forge it.")
    opening, closing = _pieces(codec, style, reference)
    for shift in range(len(PROBES)):
        _prove(codec, style, reference, [*PROBES[shift:], *PROBES[:shift]], opening, closing)
    tokens = tuple(codec.encode(opening)), tuple(codec.encode(closing))
    for piece, ids in zip((opening, closing), tokens, strict=True):
        if codec.decode_all(ids) != piece:
            raise BridgeError(f"The tokens of {piece!r}, which the chat template puts between turns, are other text.")
    return Bridge(codec, *tokens, reference.limits.observation_tokens)


def _pieces(codec: TextCodec, style: PromptStyle, reference: EnvironmentReference) -> tuple[str, str]:
    """What the template writes between a turn's end token and an observation, and between that and the next turn."""
    turn, observation = PROBES[0]
    begun, whole = _conversation(codec, style, reference, [PROBES[0]])
    said = begun + _said(style, turn)
    if not whole.startswith(said):
        dropped = style.thinking and THINK_CLOSE not in whole.removeprefix(begun)
        what = "drops earlier thinking" if dropped else "changes earlier turns when a new one is added"
        raise BridgeError(f"The chat template {what}, so an episode would not be what it renders.", hint=_HINT)
    rest = whole[len(said) :]
    ends = [codec.text_of(token) for token in codec.eos_token_ids]
    end = next((text for text in sorted(ends, key=len, reverse=True) if rest.startswith(text)), None)
    if end is None:
        raise BridgeError(
            f"The chat template ends a turn with {rest[:20]!r}, and the policy stops at {' or '.join(map(repr, ends))}.",
            hint="Name that token in eos_token_id of generation_config.json.",
        )
    before, found, after = rest[len(end) :].partition(observation)
    if not found or observation in after:
        raise BridgeError(f"The chat template does not show a message of role {reference.role!r} once.", hint=_HINT)
    return before, after


_HINT = "Use a template whose conversations only grow, or set `role` of the environment to `user`."


def _said(style: PromptStyle, turn: str) -> str:
    return f"hm{THINK_CLOSE}{turn}" if style.thinking else turn


def _conversation(
    codec: TextCodec, style: PromptStyle, reference: EnvironmentReference, turns: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """The prompt as the policy sees it, and the whole conversation up to the policy's next turn."""
    messages: list[Message] = [{"role": "user", "content": "probe"}]
    begun = codec.render_turn(messages, style, reference.tools)
    for turn, observation in turns:
        said = f"{THINK_OPEN}{_said(style, turn)}" if style.thinking else turn
        messages += [{"role": "assistant", "content": said}, _observed(reference.role, observation)]
    return begun, codec.render_turn(messages, style, reference.tools)


def _observed(role: Role, observation: str) -> Message:
    return {"role": role, "content": observation}


def _prove(
    codec: TextCodec,
    style: PromptStyle,
    reference: EnvironmentReference,
    turns: Sequence[tuple[str, str]],
    opening: str,
    closing: str,
) -> None:
    """Every prefix of a conversation, rendered at once, is the turns one after the other."""
    prefixes = [_conversation(codec, style, reference, turns[:count]) for count in range(1, len(turns) + 1)]
    text = prefixes[0][0]
    for (turn, observation), (_, whole) in zip(turns, prefixes, strict=True):
        ends = [codec.text_of(token) for token in codec.eos_token_ids]
        grown = [f"{text}{_said(style, turn)}{end}{opening}{observation}{closing}" for end in ends]
        if whole not in grown:
            raise BridgeError("The chat template renders several turns otherwise than one after the other.", hint=_HINT)
        text = whole
    assert all(longer.startswith(shorter) for (_, shorter), (_, longer) in pairwise(prefixes))
