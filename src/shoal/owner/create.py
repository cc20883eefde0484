"""Makes a run: keys, secret, base files and the signed descriptor, once and then never again.

`initialise` is idempotent: on a directory that already holds a run it only checks that the settings still mean the same run.
Settings that the schema marks as fixed stay as they are; addresses may change, and are then signed again; the rest may change
freely. Whatever can be refused is refused before the first file is written.
"""

from collections.abc import Sequence
from pathlib import Path

from shoal.broadcast import Origin, OriginSettings
from shoal.config import Change, ShoalConfig, TasksConfig, ValidationConfig, changes, to_toml
from shoal.errors import ConfigError
from shoal.files import CONFIG_FILE, TOKENIZER_FILE, digest_file, remove_leftovers, write_atomic
from shoal.locks import hold
from shoal.metrics import Report, silent
from shoal.owner.addresses import check_addresses, with_known_addresses
from shoal.protocol.assignment import secret_commitment
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.protocol.signing import PROTOCOL_VERSION
from shoal.rundir import ROLES, RunDirectory, located
from shoal.tasks import CODEC_FILES, PromptStyle, TaskSet, TaskSets, TextCodec, load_tasks
from shoal.tasks.datasets.transfer import pack
from shoal.tasks.rewards import check_parts
from shoal.tasks.sources import is_local, pin_source
from shoal.tasks.verifiers.reward_models import check_named

CREATE_DEADLINE_S = 60.0
LONGEST_PROMPTS = 256
"""Prompts that are measured: the longest ones by letters, of which one is nearly always the longest by tokens."""


def initialise(config: ShoalConfig, report: Report = silent) -> RunDirectory:
    """Makes the run, or checks that it is the same one; reports which settings have changed since its last start."""
    directory = RunDirectory(config.run.dir)
    if directory.is_initialised:
        config = with_known_addresses(config, directory.config())
    check_addresses(config)
    remove_leftovers(directory.root, directory.origin, directory.key_file("run").parent)
    if not directory.is_initialised:
        _create(directory, config, report)
    changed = changes(directory.config(), located(config, directory.root))
    _check_same_run(config, changed)
    _update_descriptor(directory, config, report)
    for change in changed:
        report(f"changed since the last start: {change}")
    write_atomic(directory.run_file, to_toml(located(config, directory.root)).encode())
    return directory


def _check_same_run(config: ShoalConfig, changed: Sequence[Change]) -> None:
    refused = [change for change in changed if change.setting.fixed]
    if refused:
        raise ConfigError(
            f"{config.run.dir} holds a run that keeps its settings: {'; '.join(map(str, refused))}.",
            hint="Choose another run.dir, or remove the old one (`shoal demo --fresh` does) to start over.",
        )


def _create(directory: RunDirectory, config: ShoalConfig, report: Report) -> None:
    # Imports torch; needed once per run.
    from shoal.policy.directory import check_vocabulary, read_config, resolve_model

    model_directory = resolve_model(config.model.path)
    codec = TextCodec.from_directory(model_directory)
    config_tasks = pin_source(config.tasks)
    tasks = load_tasks(config.tasks if is_local(config.tasks) else config_tasks)
    vocab_size: int = read_config(model_directory).get_text_config().vocab_size
    check_vocabulary(codec.eos_token_ids, vocab_size)
    _check_prompts(tasks.train, codec, config, vocab_size)
    check_parts(tasks.train, config.reward.parts)
    _check_reward_models(tasks.train, config, model_directory)
    numerics_classes = _numerics_classes(config.validation, model_directory, report)
    busy = f"Another process has been making the run in {directory.root} for {CREATE_DEADLINE_S:.0f} s."
    with hold(directory.create_lock, busy, wait_s=CREATE_DEADLINE_S):
        if not directory.is_initialised:
            _compile_proofs()
            _write(directory, config, model_directory, tasks, config_tasks, numerics_classes)


def _check_reward_models(tasks: TaskSet, config: ShoalConfig, model_directory: Path) -> None:
    from shoal.policy.reward_model import find_reward_model

    check_named(config.reward.parts, tasks, config.validation.reward_models)
    for path in config.validation.reward_models.values():
        find_reward_model(path, digest_file(model_directory / TOKENIZER_FILE))


def _numerics_classes(config: ValidationConfig, model_directory: Path, report: Report) -> tuple[str, ...]:
    """The classes that the run admits: those named, each coarse one with what it costs, or the finest of the calibration."""
    from shoal.validation.calibration.limits import ModelIdentity, load_calibration

    calibration = load_calibration(config.calibration)
    if not config.foreign_calibration:
        calibration.require_model(ModelIdentity.of(model_directory))
    known = tuple(calibration.classes)
    unknown = [name for name in config.numerics_classes if name not in known]
    if unknown:
        raise ConfigError(
            f"The calibration {config.calibration} does not cover {unknown[0]}.",
            hint=f"It covers {', '.join(known)}; `shoal calibrate` measures others.",
        )
    finest = calibration.finest()
    for name in config.numerics_classes:
        if name not in finest:
            report(f"admits {name}: {calibration.cost(name)}")
    return config.numerics_classes or finest


def _compile_proofs() -> None:
    """Fills the cache of compiled loops, or every worker and validator of this host would compile them at the same time."""
    import torch

    from shoal.proofs.commitments import build_proofs, compare_chunks

    states = torch.ones(1, 4)
    compare_chunks(build_proofs([states]), [states])


def _write(
    directory: RunDirectory,
    config: ShoalConfig,
    model_directory: Path,
    tasks: TaskSets,
    task_source: TasksConfig,
    numerics_classes: tuple[str, ...],
) -> None:
    """The descriptor comes last: a directory without one is made again, with the keys that are already there."""
    from shoal.proofs.commitments import CHUNK_TOKENS, TOP_K

    run_key = directory.key("run")
    run_id = f"{config.run.name}-{run_key.public[:12]}"
    for role in ROLES:
        directory.key(role)
    secret = directory.create_secret()
    origin = Origin(directory.origin, run_key, OriginSettings(run_id=run_id))
    descriptor = RunDescriptor(
        run_id=run_id,
        protocol=PROTOCOL_VERSION,
        run_key=run_key.public,
        coordinator_key=directory.key("coordinator").public,
        coordinator_url=config.coordinator_url,
        relay_urls=(config.origin_url,),
        model_files=_serve_files(origin, model_directory),
        tasks=task_source,
        task_set_digest=tasks.train.digest,
        task_count=len(tasks.train),
        task_files=_serve_tasks(origin, tasks.train) if is_local(config.tasks) else (),
        heldout_files=_serve_tasks(origin, tasks.heldout) if is_local(config.tasks) else (),
        rollouts=config.rollouts,
        reward=config.reward,
        async_level=config.training.async_level,
        chunk_tokens=CHUNK_TOKENS,
        top_k=TOP_K,
        numerics_classes=numerics_classes,
        secret_commitment=secret_commitment(secret),
    )
    write_atomic(directory.run_file, to_toml(located(config, directory.root)).encode())
    _publish_descriptor(directory, descriptor)


def _publish_descriptor(directory: RunDirectory, descriptor: RunDescriptor) -> None:
    sealed = descriptor.seal(directory.existing_key("run")).to_bytes()
    write_atomic(directory.origin / "descriptor.json", sealed)
    write_atomic(directory.descriptor_file, sealed)


def _update_descriptor(directory: RunDirectory, config: ShoalConfig, report: Report) -> None:
    """New workers take addresses and admitted classes from the descriptor: a run that moves or opens up signs it again."""
    old = directory.descriptor()
    addresses = {"coordinator_url": config.coordinator_url, "relay_urls": (config.origin_url,)}
    new = old.model_copy(update=addresses | {"numerics_classes": _admitted(directory, old, config, report)})
    if new != old:
        _publish_descriptor(directory, new)


def _admitted(directory: RunDirectory, old: RunDescriptor, config: ShoalConfig, report: Report) -> tuple[str, ...]:
    """A run may admit more classes, never fewer: files of an admitted class may be on their way."""
    if config.validation == directory.config().validation:
        return old.numerics_classes
    from shoal.policy.directory import resolve_model  # imports torch; needed when the owner changed the classes

    classes = _numerics_classes(config.validation, resolve_model(config.model.path), report)
    gone = [name for name in old.numerics_classes if name not in classes]
    if gone:
        raise ConfigError(
            f"{config.run.dir} holds a run that admits {gone[0]}, and work of that class may be on its way.",
            hint="Name it in validation.numerics_classes and keep it in the calibration.",
        )
    return classes


def _check_prompts(tasks: TaskSet, codec: TextCodec, config: ShoalConfig, vocab_size: int) -> None:
    from shoal.policy.directory import check_vocabulary

    target_length = max(config.reward.target_lengths, default=0)
    for task in tasks.longest(LONGEST_PROMPTS):
        tokens = codec.prompt_tokens(task, target_length, PromptStyle.of(config.tasks))
        check_vocabulary(tokens, vocab_size)
        if len(tokens) > config.rollouts.max_prompt_tokens:
            raise ConfigError(
                f"The prompt of {task.problem_id} has {len(tokens)} tokens, "
                f"rollouts.max_prompt_tokens allows {config.rollouts.max_prompt_tokens}.",
                hint=f"Raise it to {len(tokens)} or more, or choose other tasks.",
            )


def _serve_tasks(origin: Origin, tasks: TaskSet) -> tuple[FileReference, ...]:
    """Tasks of the owner's disk go to new workers like any other file."""
    return tuple(FileReference(digest=origin.add_file(piece), bytes=len(piece)) for piece in pack(tasks))


def _serve_files(origin: Origin, model_directory: Path) -> dict[str, FileReference]:
    references = {}
    for name in (CONFIG_FILE, *CODEC_FILES):
        path = model_directory / name
        if path.is_file():
            data = path.read_bytes()
            references[name] = FileReference(digest=origin.add_file(data), bytes=len(data))
    return references
