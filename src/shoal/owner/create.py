"""Makes a run: keys, secret, base files and the signed descriptor, once and then never again.

`initialise` is idempotent: on a directory that already holds a run it only checks that the settings still mean the same run.
Settings that the schema marks as fixed stay as they are; addresses may change, and are then signed again; the rest may change
freely. Whatever can be refused is refused before the first file is written.
"""

from collections.abc import Sequence
from pathlib import Path

from shoal.broadcast import Origin, OriginSettings
from shoal.config import Change, LoraConfig, ShoalConfig, changes, to_toml
from shoal.coordinator.rules.unaudited import cost_of_share
from shoal.errors import ConfigError
from shoal.files import CONFIG_FILE, remove_leftovers, write_atomic
from shoal.locks import hold
from shoal.metrics import Report, silent
from shoal.owner.addresses import check_addresses, with_known_addresses
from shoal.owner.readiness import Ready, admitted_classes, check_ready
from shoal.protocol.descriptor import AdapterTerms, FileReference, RunDescriptor
from shoal.protocol.signing import PROTOCOL_VERSION
from shoal.protocol.steps import secret_commitment
from shoal.rundir import ROLES, RunDirectory, located
from shoal.tasks import CODEC_FILES, TaskSet
from shoal.tasks.datasets.transfer import pack
from shoal.tasks.sources import is_local

CREATE_DEADLINE_S = 60.0
SCORING_SHARE = 1 / 6
"""Share of a claim that a worker may spend on scoring: three times as much, and one last answer, fit into the claim."""


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
    ready = check_ready(config, report)
    report(cost_of_share(config.training, config.trust))
    busy = f"Another process has been making the run in {directory.root} for {CREATE_DEADLINE_S:.0f} s."
    with hold(directory.create_lock, busy, wait_s=CREATE_DEADLINE_S):
        if not directory.is_initialised:
            _compile_proofs()
            _write(directory, config, ready)


def _compile_proofs() -> None:
    """Fills the cache of compiled loops, or every worker and validator of this host would compile them at the same time."""
    import torch

    from shoal.proofs.commitments import build_proofs, compare_chunks

    states = torch.ones(1, 4)
    compare_chunks(build_proofs([states]), [states])


def _write(directory: RunDirectory, config: ShoalConfig, ready: Ready) -> None:
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
        model_files=_serve_files(origin, ready.model_directory),
        adapter=_serve_base(origin, ready.model_directory, config.model.adapter),
        tasks=ready.task_source,
        task_set_digest=ready.tasks.train.digest,
        task_count=len(ready.tasks.train),
        task_files=_serve_tasks(origin, ready.tasks.train) if is_local(config.tasks) else (),
        heldout_files=_serve_tasks(origin, ready.tasks.heldout) if is_local(config.tasks) else (),
        environments=ready.environments,
        rollouts=config.rollouts,
        reward=config.reward,
        scoring_s=config.validation.claim_s * SCORING_SHARE,
        async_level=config.training.async_level,
        chunk_tokens=CHUNK_TOKENS,
        top_k=TOP_K,
        numerics_classes=ready.numerics_classes,
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

    classes = admitted_classes(config, resolve_model(config.model.path), report)
    gone = [name for name in old.numerics_classes if name not in classes]
    if gone:
        raise ConfigError(
            f"{config.run.dir} holds a run that admits {gone[0]}, and work of that class may be on its way.",
            hint="Name it in validation.numerics_classes and keep it in the calibration.",
        )
    return classes


def _serve_tasks(origin: Origin, tasks: TaskSet) -> tuple[FileReference, ...]:
    """Tasks of the owner's disk go to new workers like any other file."""
    return tuple(FileReference(digest=origin.add_file(piece), bytes=len(piece)) for piece in pack(tasks))


def _serve_base(origin: Origin, model_directory: Path, lora: LoraConfig | None) -> AdapterTerms | None:
    """The frozen weights of a run that trains an adapter are published now, for everybody to fetch once."""
    if lora is None:
        return None
    from shoal.policy.weights import stored_tensors

    tensors = stored_tensors(model_directory)
    base = origin.add_base(tensors)
    return AdapterTerms(
        lora=lora,
        base_manifest=base.manifest_digest,
        base_weights=base.weights_digest,
        base_bytes=sum(len(tensor.data) for tensor in tensors),
    )


def _serve_files(origin: Origin, model_directory: Path) -> dict[str, FileReference]:
    references = {}
    for name in (CONFIG_FILE, *CODEC_FILES):
        path = model_directory / name
        if path.is_file():
            data = path.read_bytes()
            references[name] = FileReference(digest=origin.add_file(data), bytes=len(data))
    return references
