import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import ConfigError
from shoal.tasks import CODEC_FILES, PromptStyle, Task, TextCodec, score

BUNDLED = Path(shoal.__file__).parent / "policy" / "bundled"
INSTRUCTION = "Think for {target} tokens before giving a response."
TASK = Task(
    problem_id="p",
    source="test",
    task_type="integer_answer",
    prompt="Compute 47+38-19.",
    verification_info={"answer": 66},
)


def bundled_files() -> dict[str, bytes]:
    return {name: (BUNDLED / name).read_bytes() for name in CODEC_FILES if (BUNDLED / name).is_file()}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_directory(BUNDLED)


def prompt_text(codec: TextCodec, target: int, *, system_prompt: str = "") -> str:
    tokens = codec.prompt_tokens(TASK, target, PromptStyle(system_prompt, INSTRUCTION))
    return str(codec._tokenizer.decode(tokens, skip_special_tokens=False))


def test_prompt_is_the_chat_with_the_think_tag_opened(codec: TextCodec) -> None:
    assert prompt_text(codec, 0) == "<|user|>Compute 47+38-19.<|end|><|assistant|><think>"


def test_target_length_is_asked_for_in_the_user_turn(codec: TextCodec) -> None:
    asked = f"Compute 47+38-19. {INSTRUCTION.replace('{target}', '21')}"
    assert prompt_text(codec, 21) == f"<|user|>{asked}<|end|><|assistant|><think>"


def test_system_prompt_comes_first(codec: TextCodec) -> None:
    assert prompt_text(codec, 0, system_prompt="Be kind.").startswith("<|system|>Be kind.<|end|><|user|>")


def test_exact_tokens_of_a_bundled_prompt(codec: TextCodec) -> None:
    tokens = codec.prompt_tokens(TASK, 21, PromptStyle(length_instruction=INSTRUCTION))
    spelled = [str(codec._tokenizer.id_to_token(token)).replace("Ġ", " ") for token in tokens]
    request = ["Compute ", *"47+38-19", ". Think for ", "2", "1", " tokens before giving a response."]
    assert spelled == ["<|user|>", *request, "<|end|>", "<|assistant|>", "<think>"]


def test_decode_keeps_think_tags_and_drops_the_end(codec: TextCodec) -> None:
    assert codec.decode(codec.encode("85 66</think>66<|end|>")) == "85 66</think>66"
    assert codec.eos_token_ids == tuple(codec.encode("<|end|>"))


def test_vocabulary_is_a_multiple_of_64(codec: TextCodec) -> None:
    assert codec.vocab_size % 64 == 0


@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text.replace("<|end|>", "")


def test_template_may_live_in_the_tokenizer_config() -> None:
    files = bundled_files()
    settings = json.loads(files["tokenizer_config.json"])
    settings["chat_template"] = files.pop("chat_template.jinja").decode()
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    assert prompt_text(TextCodec.from_files(files), 21) == prompt_text(TextCodec.from_directory(BUNDLED), 21)


def test_think_tag_is_opened_even_if_the_template_does_not() -> None:
    files = bundled_files() | {"chat_template.jinja": b"{{ messages[0].content }}:"}
    assert prompt_text(TextCodec.from_files(files), 0) == "Compute 47+38-19.:<think>"


def test_special_names_reach_the_template() -> None:
    files = bundled_files() | {"chat_template.jinja": b"{{ eos_token }}{{ messages[0].content }}<think>"}
    assert prompt_text(TextCodec.from_files(files), 0) == "<|end|>Compute 47+38-19.<think>"


def test_generation_config_may_add_end_tokens() -> None:
    files = bundled_files() | {"generation_config.json": b'{"eos_token_id": [1, 7]}'}
    assert TextCodec.from_files(files).eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.json": b"{}"}, "not a tokenizer"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"tokenizer_config.json": b"["}, "not JSON"),
        ({"tokenizer_config.json": b"[]"}, "not a JSON object"),
        ({"tokenizer_config.json": b"{}", "generation_config.json": None}, "no end-of-sequence token"),
        ({"chat_template.jinja": None}, "no chat template"),
        ({"chat_template.jinja": b"{% if %}"}, "malformed"),
    ],
)
def test_unusable_files_are_refused_in_one_sentence(change: dict[str, bytes | None], message: str) -> None:
    files = {name: data for name, data in {**bundled_files(), **change}.items() if data is not None}
    with pytest.raises(ConfigError, match=message):
        TextCodec.from_files(files)


@pytest.mark.parametrize(
    "template",
    [b"{{ raise_exception('no') }}", b"{{ messages.append(1) }}", b"{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)
def test_hostile_or_refusing_templates_end_in_a_config_error(template: bytes) -> None:
    codec = TextCodec.from_files(bundled_files() | {"chat_template.jinja": template})
    with pytest.raises(ConfigError, match="chat template"):
        codec.prompt_tokens(TASK, 0, PromptStyle(length_instruction=INSTRUCTION))


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""In the manner of SmolLM2 and Qwen: a system turn of its own, line breaks inside the marks."""


@pytest.mark.parametrize(
    ("system_prompt", "target", "expected"),
    [
        (
            "",
            0,
            "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nCompute 47+38-19.<|im_end|>\n"
            "<|im_start|>assistant\n<think>",
        ),
        (
            "Be kind.",
            2000,
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nCompute 47+38-19. Think for 2000 tokens before "
            "giving a response.<|im_end|>\n<|im_start|>assistant\n<think>",
        ),
    ],
)
def test_exact_tokens_of_a_chat_in_another_template(system_prompt: str, target: int, expected: str) -> None:
    codec = TextCodec.from_files(bundled_files() | {"chat_template.jinja": CHATML.encode()})
    tokens = codec.prompt_tokens(TASK, target, PromptStyle(system_prompt, INSTRUCTION))
    assert tokens == codec.encode(expected)
    assert codec.decode(tokens) == expected


def test_without_thinking_no_tag_is_opened_and_the_whole_completion_is_the_answer(codec: TextCodec) -> None:
    style = PromptStyle(thinking=False)
    files = bundled_files()
    plain = files["chat_template.jinja"].replace(b"<think>", b"")
    untagged = TextCodec.from_files({**files, "chat_template.jinja": plain})
    prompt = untagged.prompt_tokens(TASK, 0, style)
    assert untagged.encode("<|user|>Compute 47+38-19.<|end|><|assistant|>") == prompt
    assert untagged.prompt_tokens(TASK, 0, PromptStyle()) == [*prompt, *untagged.encode("<think>")]
    answer = codec.encode("66<|end|>")
    assert score(TASK, codec.answer_text(answer, style)).reward == 1.0
    assert score(TASK, codec.answer_text(answer, PromptStyle())).reward == 0.0
