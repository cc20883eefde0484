import json

import pytest

from shoal.policy import bundled_directory
from shoal.tasks import CODEC_FILES, PromptStyle, TextCodec
from shoal.tasks.bridge import BridgeError, build_bridge
from shoal.tasks.environments.registry import refer

FILES = {name: (bundled_directory() / name).read_bytes() for name in CODEC_FILES}
PLAIN = PromptStyle(thinking=False)
USER = refer("guess-number")
TOOL = refer("calculator")
CHATML = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|user|>\n<tool_response>\n{{ m.content }}\n</tool_response><|end|>\n"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def codec(template: str) -> TextCodec:
    return TextCodec.from_files(FILES | {"chat_template.jinja": template.encode()})


def test_a_bridge_writes_what_the_template_writes_between_turns() -> None:
    made = codec(CHATML)
    bridge = build_bridge(made, PLAIN, TOOL)
    assert made.decode_all(bridge.given("42")) == (
        "\n<|user|>\n<tool_response>\n42\n</tool_response><|end|>\n<|assistant|>\n"
    )
    assert made.decode_all(build_bridge(made, PLAIN, USER).given("42")) == "\n<|user|>\n42<|end|>\n<|assistant|>\n"


def test_thinking_is_opened_in_every_turn() -> None:
    made = codec(CHATML)
    assert made.decode_all(build_bridge(made, PromptStyle(), USER).given("a")).endswith("<|assistant|>\n<think>")


def test_tools_are_shown_to_the_template() -> None:
    made = codec(CHATML)
    assert '"calculate"' in made.render_turn([{"role": "user", "content": "x"}], PLAIN, TOOL.tools)


THINKING_DROPPED = CHATML.replace(
    "{{ m.content }}<|end|>", "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>"
)


@pytest.mark.parametrize(
    ("template", "style", "match"),
    [
        (THINKING_DROPPED, PromptStyle(), "drops earlier thinking"),
        (CHATML.replace("{{ m.content }}<|end|>", "{{ m.content | upper }}<|end|>"), PLAIN, "changes earlier turns"),
        (CHATML.replace("{{ m.content }}<|end|>", "{{ m.content }}<|pad|>"), PLAIN, "policy stops at '<|end|>'"),
        (
            CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            PLAIN,
            "'tool' once",
        ),
        (CHATML.replace("<tool_response>", "<tool_response>{{ loop.index }}"), PLAIN, "several turns otherwise"),
        (CHATML.replace("{% for m", "{{ messages | length }}{% for m"), PLAIN, "changes earlier turns"),
    ],
)
def test_a_template_that_cannot_be_bridged_is_refused_with_the_reason(
    template: str, style: PromptStyle, match: str
) -> None:
    with pytest.raises(BridgeError, match=match):
        build_bridge(codec(template), style, TOOL)


def test_observations_never_become_added_tokens() -> None:
    made = codec(CHATML)
    for text, token in made.added_tokens.items():
        assert token not in made.plain_tokens(f"a{text}b{text}")
        assert made.decode_all(made.plain_tokens(text)) == text
    assert json.loads(FILES["tokenizer.json"])["added_tokens"], "there are some"
