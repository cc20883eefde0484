"""A completion as a conversation, over one segment or several, with values of sampled tokens only."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.inspection import turns
from shoal.inspection.turns import Segment, TokenValues, conversation, segments, token_pieces
from shoal.protocol.page_views import OwnerTurn

EURO = "€".encode()


def decode(tokens: Sequence[int]) -> str:
    """Tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def spoken(shown: Sequence[OwnerTurn]) -> list[tuple[str, str]]:
    return [(turn.speaker, turn.text) for turn in shown]


def test_a_plain_completion_is_one_turn_of_the_policy() -> None:
    (part,) = segments(b"42", [2])
    shown = conversation(decode, b"6*7=", [part], TokenValues([-0.5, -0.25], [0.0, 0.125], [1.0, 2.0]))
    assert spoken(shown) == [("prompt", "6*7="), ("policy", "42")]
    assert shown[0].tokens == []
    assert [(one.text, one.logprob, one.margin, one.entropy) for one in shown[1].tokens] == [
        ("4", -0.5, 0.0, 1.0),
        ("2", -0.25, 0.125, 2.0),
    ]


def test_an_episode_alternates_between_policy_and_environment() -> None:
    parts = segments(b"go<wall>left<door>", [2, 6, 4, 6, 0])
    assert [part.role for part in parts] == ["sampled", "environment", "sampled", "environment", "sampled"]
    shown = conversation(decode, b"maze", parts[:3], TokenValues([-1, -2, -3, -4, -5, -6]))
    assert spoken(shown) == [("prompt", "maze"), ("policy", "go"), ("environment", "<wall>"), ("policy", "left")]
    assert [one.logprob for turn in shown for one in turn.tokens] == [-1, -2, -3, -4, -5, -6]
    assert shown[2].tokens == [], "nothing was sampled there"


def test_what_was_not_recorded_is_none() -> None:
    shown = conversation(decode, b"", [Segment("sampled", b"abc")], TokenValues([-1.0], [], [0.5, 0.5]))
    assert [(one.logprob, one.margin, one.entropy) for one in shown[1].tokens] == [
        (-1.0, None, 0.5),
        (None, None, 0.5),
        (None, None, None),
    ]


def test_more_values_than_tokens_are_left_out() -> None:
    shown = conversation(decode, b"", [Segment("sampled", b"a")], TokenValues([-1.0, -2.0, -3.0]))
    assert len(shown[1].tokens) == 1


def test_a_completion_without_a_token_is_shown_empty() -> None:
    assert spoken(conversation(decode, b"p", segments(b"", [0]), TokenValues())) == [("prompt", "p"), ("policy", "")]


def test_a_long_episode_is_cut_where_a_browser_would_suffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_TOKENS", 5)
    parts = segments(b"aaabbbbccccc", [3, 4, 5])
    shown = conversation(decode, b"", parts, TokenValues())
    assert spoken(shown)[1:] == [("policy", "aaa"), ("environment", "bb")]


def test_a_character_of_several_tokens_appears_with_its_last_one() -> None:
    assert token_pieces(decode, b"1" + EURO + b"2") == ["1", "", "", "€", "2"]
    assert token_pieces(decode, EURO[:2]) == ["", "\ufffd"], "a cut character is shown as it is"


@given(st.text(max_size=30))
def test_the_pieces_make_up_the_text(text: str) -> None:
    assert "".join(token_pieces(decode, text.encode())) == text


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_every_token_is_in_one_segment_and_every_value_with_its_token(lengths: list[int]) -> None:
    tokens = [65 + place % 26 for place in range(sum(lengths))]
    parts = segments(tokens, lengths)
    assert [token for part in parts for token in part.tokens] == tokens
    sampled = [token for part in parts if part.role == "sampled" for token in part.tokens]
    shown = conversation(decode, [], parts, TokenValues([float(token) for token in sampled]))
    assert [one.logprob for turn in shown for one in turn.tokens] == sampled
