"""What a model and its tasks need before a run can be made, checked in one pass.

An own model usually lacks several things at once: a chat template, a calibration, a prompt length that its tasks fit into. Every
check runs, whatever the others found, and one error names all of it in the order in which it is cured, each with its command.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import TASK_PART, RewardConfig, ShoalConfig, TasksConfig
from shoal.coordinator.rules.trust import LossRule
from shoal.errors import ConfigError, ShoalError
from shoal.files import TOKENIZER_FILE, digest_file
from shoal.metrics import Report
from shoal.protocol.environments import EnvironmentReference
from shoal.tasks import CODEC_FILES, PromptStyle, TaskSet, TaskSets, TextCodec, is_learned, load_tasks
from shoal.tasks.bridge import build_bridge
from shoal.tasks.codec import PLAIN_TEMPLATE, TEMPLATE_FILE, MissingTemplateError
from shoal.tasks.environments.registry import environment_names, environment_of, refer
from shoal.tasks.rewards import check_parts
from shoal.tasks.sources import is_local, pin_source
from shoal.tasks.verifiers.reward_models import check_named

LONGEST_PROMPTS = 256
"""Prompts that are measured: the longest ones by letters, of which one is nearly always the longest by tokens."""


class NotReadyError(ConfigError):
    """Several things keep a model from training; the message lists them with their cures."""

    code = "not_ready"
    permanent = True


@dataclass(frozen=True)
class Ready:
    """What the checks have loaded."""

    model_directory: Path
    tasks: TaskSets
    task_source: TasksConfig
    numerics_classes: tuple[str, ...]
    environments: tuple[EnvironmentReference, ...] = ()


@dataclass
class Problems:
    found: list[ShoalError] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        except ShoalError as error:
            self.found.append(error)

    def refuse(self) -> None:
        """Raises the only problem as it is, several as one list."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = [f"{number}. {error}" for number, error in enumerate(self.found, start=1)]
            raise NotReadyError(
                "\n".join([f"{len(lines)} things keep this run from being made.", *lines]),
                hint="\nCure them in this order and repeat the command.",
            )


def check_ready(config: ShoalConfig, report: Report) -> Ready:
    """Loads model files and tasks and checks that they fit each other; raises everything that is wrong at once."""
    from shoal.policy.directory import resolve_model  # imports torch; needed once per run
    from shoal.policy.lora.checks import check_lora

    problems, source = Problems(), config.tasks
    directory: Path | None = None
    tasks: TaskSets | None = None
    classes: tuple[str, ...] = ()
    environments: tuple[EnvironmentReference, ...] = ()
    with problems.collect():
        directory = resolve_model(config.model.path)
    if directory is not None:
        with problems.collect():
            check_lora(config.model, directory)
    with problems.collect():
        source = pin_source(config.tasks)
        tasks = load_tasks(config.tasks if is_local(config.tasks) else source)
        check_parts(tasks.train, config.reward.parts)
        environments = tuple(refer(name) for name in environment_names(tasks.train, config.tasks))
        _check_parts_of_episodes(environments, config.reward)
    if directory is not None:
        _check_text(config, directory, tasks, environments, problems)
        with problems.collect():
            classes = admitted_classes(config, directory, report)
        if tasks is not None:
            with problems.collect():
                _check_reward_models(tasks.train, config, directory)
    with problems.collect():
        LossRule.of(config).require()
    problems.refuse()
    assert directory is not None
    assert tasks is not None
    return Ready(directory, tasks, source, classes, environments)


def _check_parts_of_episodes(environments: Sequence[EnvironmentReference], reward: RewardConfig) -> None:
    others = [name for name in reward.parts if name != TASK_PART and not is_learned(name)]
    if environments and others:
        raise ConfigError(
            f"reward.parts names {others[0]}, a verifier of single completions; episodes are scored by {environments[0].name}.",
            hint=f"Episodes may have the parts {TASK_PART} and reward_model:NAME.",
        )


def _check_text(
    config: ShoalConfig,
    directory: Path,
    tasks: TaskSets | None,
    environments: Sequence[EnvironmentReference],
    problems: Problems,
) -> None:
    """Template, tokens and prompt lengths; without a template, lengths are measured with the plain one that is proposed."""
    codec = None
    try:
        codec = TextCodec.from_directory(directory)
    except MissingTemplateError as error:
        problems.found.append(MissingTemplateError(error.message, hint=_template_command(directory)))
        files = {name: (directory / name).read_bytes() for name in CODEC_FILES if (directory / name).is_file()}
        with problems.collect():
            codec = TextCodec.from_files(files | {TEMPLATE_FILE: PLAIN_TEMPLATE.encode()})
    except ShoalError as error:
        problems.found.append(error)
    if codec is not None:
        for reference in environments:
            with problems.collect():
                build_bridge(codec, PromptStyle.of(config.tasks), reference)
        with problems.collect():
            _check_tokens(config, directory, codec, tasks)


def _check_tokens(config: ShoalConfig, directory: Path, codec: TextCodec, tasks: TaskSets | None) -> None:
    from shoal.policy.directory import check_vocabulary, read_config

    text = read_config(directory).get_text_config()
    check_vocabulary(codec.eos_token_ids, text.vocab_size)
    if tasks is not None:
        positions = getattr(text, "max_position_embeddings", None)
        _check_prompts(tasks.train, codec, config, text.vocab_size, positions)


def _check_prompts(
    tasks: TaskSet, codec: TextCodec, config: ShoalConfig, vocab_size: int, positions: int | None
) -> None:
    from shoal.policy.directory import check_vocabulary

    target_length = max(config.reward.target_lengths, default=0)
    lengths: dict[str, int] = {}
    for task in tasks.longest(LONGEST_PROMPTS):
        name = environment_of(task, config.tasks.environment)
        reference = refer(name) if name else None
        tools = reference.tools if reference else ()
        tokens = codec.prompt_tokens(task, target_length, PromptStyle.of(config.tasks), tools)
        check_vocabulary(tokens, vocab_size)
        lengths[task.problem_id] = len(tokens) + (
            reference.limits.observation_tokens if reference and reference.opens else 0
        )
    name, longest = max(lengths.items(), key=lambda item: item[1], default=("", 0))
    allowed, new_tokens = config.rollouts.max_prompt_tokens, config.rollouts.max_new_tokens
    if longest > allowed:
        raise ConfigError(
            f"The prompt of {name} has {longest} tokens, rollouts.max_prompt_tokens allows {allowed}.",
            hint=f"Raise it to {longest} or more (`--rollouts.max_prompt_tokens {longest}`), or choose other tasks.",
        )
    if positions and longest + new_tokens > positions:
        raise ConfigError(
            f"The prompt of {name} with {new_tokens} new tokens needs {longest + new_tokens} positions, "
            f"the model has {positions}.",
            hint=f"Lower rollouts.max_new_tokens to {max(1, positions - longest)} or less, or choose other tasks.",
        )


def _check_reward_models(tasks: TaskSet, config: ShoalConfig, model_directory: Path) -> None:
    from shoal.policy.reward_model import find_reward_model

    check_named(config.reward.parts, tasks, config.validation.reward_models)
    for path in config.validation.reward_models.values():
        find_reward_model(path, digest_file(model_directory / TOKENIZER_FILE))


def admitted_classes(run: ShoalConfig, model_directory: Path, report: Report) -> tuple[str, ...]:
    """The classes that the run admits: those named, each coarse one with what it costs, or the finest of the calibration.

    A run that trains an adapter admits classes that were measured with one, and no other run does; their ending may be left out.
    """
    from shoal.policy.engine import LORA_CLASS
    from shoal.validation.calibration.limits import ModelIdentity, load_calibration

    config, adapted = run.validation, run.model.adapter is not None
    calibration = load_calibration(config.calibration)
    if not config.foreign_calibration:
        calibration.require_model(ModelIdentity.of(model_directory))
    calibration = calibration.of_kind(adapted=adapted)
    known = tuple(calibration.classes)
    named = tuple(
        f"{name.removesuffix(LORA_CLASS)}{LORA_CLASS}" if adapted else name for name in config.numerics_classes
    )
    unknown = [name for name in named if name not in known]
    if unknown or not known:
        kind = "engines with an adapter" if adapted else "engines without an adapter"
        raise ConfigError(
            f"The calibration {config.calibration} does not cover {unknown[0] if unknown else kind}.",
            hint=f"It covers {', '.join(known) or 'none of them'}; `shoal calibrate` measures others (`--extend` adds them).",
        )
    finest = calibration.finest()
    for name in named:
        if name not in finest:
            report(f"admits {name}: {calibration.cost(name)}")
    return named or finest


def _template_command(directory: Path) -> str:
    target = shlex.quote(str(directory / TEMPLATE_FILE))
    return (
        f"Put the template that the model was trained with beside its tokenizer, or, for a base model, a plain one: "
        f"printf %s {shlex.quote(PLAIN_TEMPLATE)} > {target}"
    )
