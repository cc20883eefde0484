"""Makes a run: keys, secret, base files and the signed descriptor, once and then never again.

`initialise` is idempotent: on a directory that already holds a run it only checks that the settings still mean the same run.
What workers and validators build on (model, tasks, rollouts, reward) is fixed by the descriptor, the rest may change.
"""

from pathlib import Path

from shoal.broadcast import Origin
from shoal.config import ShoalConfig, to_toml
from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.protocol.assignment import secret_commitment
from shoal.protocol.descriptor import PROTOCOL_VERSION, FileReference, RunDescriptor
from shoal.rundir import ROLES, RunDirectory
from shoal.tasks import CODEC_FILES, TextCodec, load_tasks

CONFIG_FILE = "config.json"
FIXED_SETTINGS = ("model", "tasks", "rollouts", "reward")


def initialise(config: ShoalConfig) -> RunDirectory:
    directory = RunDirectory(config.run.dir)
    if directory.is_initialised:
        _check_same_run(directory.config(), config)
    else:
        _create(directory, config)
    write_atomic(directory.run_file, to_toml(config).encode())
    return directory


def _check_same_run(old: ShoalConfig, new: ShoalConfig) -> None:
    for section in FIXED_SETTINGS:
        if getattr(old, section) != getattr(new, section):
            raise ConfigError(
                f"{new.run.dir} holds a run with other settings in [{section}].",
                hint="Choose another run.dir, or remove the old one to start over.",
            )
    if old.training.async_level != new.training.async_level:
        raise ConfigError(
            f"{new.run.dir} holds a run with async_level {old.training.async_level}.",
            hint="Choose another run.dir, or remove the old one to start over.",
        )


def _create(directory: RunDirectory, config: ShoalConfig) -> None:
    from shoal.policy.models import resolve_model  # imports torch; needed once per run
    from shoal.proofs.commitments import CHUNK_TOKENS, TOP_K
    from shoal.validation.calibration import load_calibration

    model_directory = resolve_model(config.model.path)
    tasks = load_tasks(config.tasks)
    TextCodec.from_directory(model_directory)  # refuses a tokenizer that cannot serve before anything is written
    run_key = directory.key("run")
    run_id = f"{config.run.name}-{run_key.public[:12]}"
    for role in ROLES:
        directory.key(role)
    secret = directory.create_secret(config.run.seed)
    origin = Origin(directory.origin, run_key, run_id=run_id)
    descriptor = RunDescriptor(
        run_id=run_id,
        protocol=PROTOCOL_VERSION,
        run_key=run_key.public,
        coordinator_key=directory.key("coordinator").public,
        coordinator_url=config.coordinator_url,
        relay_urls=(config.origin_url,),
        model_files=_serve_files(origin, model_directory),
        tasks=config.tasks,
        task_set_digest=tasks.train.digest,
        task_count=len(tasks.train),
        rollouts=config.rollouts,
        reward=config.reward,
        async_level=config.training.async_level,
        chunk_tokens=CHUNK_TOKENS,
        top_k=TOP_K,
        numerics_classes=tuple(load_calibration(config.validation.calibration).classes),
        secret_commitment=secret_commitment(secret),
    )
    sealed = descriptor.seal(run_key).to_bytes()
    origin.write_descriptor(sealed)
    write_atomic(directory.descriptor_file, sealed)


def _serve_files(origin: Origin, model_directory: Path) -> dict[str, FileReference]:
    references = {}
    for name in (CONFIG_FILE, *CODEC_FILES):
        path = model_directory / name
        if path.is_file():
            data = path.read_bytes()
            references[name] = FileReference(digest=origin.add_file(data), bytes=len(data))
    return references


def register_files(origin: Origin, descriptor: RunDescriptor, root: Path) -> None:
    """Keeps the base files among those that the origin serves and relays mirror."""
    for reference in descriptor.model_files.values():
        origin.add_file((root / "shards" / reference.digest).read_bytes())
