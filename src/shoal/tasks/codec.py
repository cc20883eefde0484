"""Text to tokens and back, without torch: a Hugging Face tokenizer file and a sandboxed chat template.

The one place where chat template, system prompt, target-length instruction and think tag come together, so that worker,
validator and trainer see exactly the same prompt tokens. Built from bytes, as they come with a run descriptor.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shoal.config import TasksConfig
from shoal.errors import ConfigError
from shoal.files import TOKENIZER_FILE
from shoal.tasks.json_objects import parse_object
from shoal.tasks.task import Task
from shoal.tasks.verifiers.answers import THINK_CLOSE, THINK_OPEN

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
PLAIN_TEMPLATE = '{% for message in messages %}{{ message.content + "\\n" }}{% endfor %}'
"""For a base model, which knows no roles: the texts, one after the other."""
CODEC_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_CONFIG_FILE)


class MissingTemplateError(ConfigError):
    """A model that does not say how a chat becomes tokens."""

    code = "chat_template"
    permanent = True


@dataclass(frozen=True)
class PromptStyle:
    """How a task becomes a chat, and where in a completion its answer is looked for."""

    system_prompt: str = ""
    length_instruction: str = TasksConfig().length_instruction
    thinking: bool = True
    """Without it no think tag is opened, and the whole completion is the answer."""

    @classmethod
    def of(cls, tasks: TasksConfig) -> "PromptStyle":
        return cls(tasks.system_prompt, tasks.length_instruction, tasks.thinking)


class TextCodec:
    def __init__(
        self, tokenizer: Tokenizer, template: Template, names: Mapping[str, str], eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._names = names
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "TextCodec":
        """From the bytes of tokenizer.json, tokenizer_config.json and, if they exist, the template and generation config."""
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
            if name not in files:
                raise ConfigError(f"The model has no {name}.", hint="A fast Hugging Face tokenizer is needed.")
        tokenizer = _parse_tokenizer(files[TOKENIZER_FILE])
        settings = parse_object(files[TOKENIZER_CONFIG_FILE], TOKENIZER_CONFIG_FILE)
        generation = parse_object(files.get(GENERATION_CONFIG_FILE, b"{}"), GENERATION_CONFIG_FILE)
        names = _special_names(settings)
        return cls(tokenizer, _compile(_template_text(files, settings)), names, _eos_ids(tokenizer, names, generation))

    @classmethod
    def from_directory(cls, path: Path) -> "TextCodec":
        return cls.from_files({name: (path / name).read_bytes() for name in CODEC_FILES if (path / name).is_file()})

    def prompt_tokens(self, task: Task, target_length: int, style: PromptStyle) -> list[int]:
        """The chat up to where the completion begins; a target length of 0 leaves the instruction out."""
        text = self._render(self.messages(task, target_length, style))
        if style.thinking and not text.rstrip().endswith(THINK_OPEN):
            text += THINK_OPEN
        return self.encode(text)

    @staticmethod
    def messages(task: Task, target_length: int, style: PromptStyle) -> list[dict[str, str]]:
        """What the policy is asked, before the template makes one text of it."""
        request = task.prompt
        if target_length:
            request = f"{request} {style.length_instruction.replace('{target}', str(target_length))}"
        system = [{"role": "system", "content": style.system_prompt}] if style.system_prompt else []
        return [*system, {"role": "user", "content": request}]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that already holds its special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of output tokens: think tags stay visible, end-of-sequence tokens are dropped."""
        kept = [token for token in tokens if token not in self.eos_token_ids]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def answer_text(self, tokens: Sequence[int], style: PromptStyle) -> str:
        """What verifiers read; without thinking, a completion whose think part has already been closed."""
        return self.decode(tokens) if style.thinking else THINK_CLOSE + self.decode(tokens)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError as error:
            raise ConfigError(f"The chat template cannot render the prompt: {error}.") from None


def _parse_tokenizer(data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ConfigError(f"{TOKENIZER_FILE} is not a tokenizer: {error}.") from None


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as templates use them; older files nest the text in an object."""
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in names.items() if key.endswith("_token") and isinstance(value, str)}


def _template_text(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise MissingTemplateError(
            "The model has no chat template.", hint=f"Put a {TEMPLATE_FILE} beside its tokenizer."
        )
    return template


def _compile(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _fixed_date
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(f"The chat template is malformed: {error}.") from None


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _fixed_date(form: str) -> str:
    # Templates that print today's date would give worker and validator different prompts around midnight.
    return datetime(2025, 1, 1).strftime(form)


def _eos_ids(tokenizer: Tokenizer, names: Mapping[str, str], generation: Mapping[str, Any]) -> tuple[int, ...]:
    declared = generation.get("eos_token_id", [])
    ids = set(declared if isinstance(declared, list) else [declared])
    if "eos_token" in names:
        ids.add(tokenizer.token_to_id(names["eos_token"]))
    ids.discard(None)
    if not ids:
        raise ConfigError(
            "The model names no end-of-sequence token.", hint=f"Set eos_token in {TOKENIZER_CONFIG_FILE}."
        )
    return tuple(sorted(ids))
