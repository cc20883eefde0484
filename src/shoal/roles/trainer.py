"""The trainer as a process: trains, publishes through an origin of its own, and serves that to the swarm. Works under torchrun."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.broadcast import AdaptedBase, Origin, OriginServer, OriginSettings
from shoal.config import ShoalConfig
from shoal.errors import ConfigError, RefusedError, ShoalError, UnavailableError
from shoal.identity import Keypair
from shoal.locks import hold
from shoal.metrics import EventLog, Report, silent
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.descriptor import RunDescriptor
from shoal.roles.process import keep_what_is_loaded, use_threads
from shoal.rundir import RunDirectory

if TYPE_CHECKING:
    from shoal.training import Trainer
    from shoal.training.model.distributed import World

TRAINER_OUTAGE_S = 1500.0
"""Loading a large policy again costs more than waiting for a coordinator; less than the ranks wait for each other."""
LOOK_EVERY_S, LOOK_WITHIN_S = 10.0, 5.0
"""A finished run may still be rewound."""
TAKE_OVER_S = 5.0
"""A trainer whose predecessor was killed waits this long for the kernel to release its lock."""


def train(directory: RunDirectory, report: Report, *, threads: int, auto_rewind: bool = False) -> None:
    """Trains, publishes, and goes on serving the last versions until it is stopped.

    After a rewind training begins again at the version that the run returned to. With `auto_rewind` a step whose repetition gives
    other weights leads to one.
    """
    use_threads(threads)
    from shoal.training.model.distributed import World

    world = World.join(directory.config().training.device)
    busy = f"Another trainer uses {directory.trainer}."
    with hold(directory.trainer / "lock", busy, wait_s=TAKE_OVER_S) if world.rank == 0 else nullcontext():
        while news := _train_epoch(directory, world, report, auto_rewind=auto_rewind):
            report(news)


def _train_epoch(directory: RunDirectory, world: "World", report: Report, *, auto_rewind: bool) -> str:
    """Trains until the run ends or is rewound; why training begins again, empty if it does not."""
    from shoal.training.publisher import RepeatedStepError

    try:
        _train(directory, world, report)
    except RepeatedStepError as error:
        if not auto_rewind:
            raise
        return _rewind(directory, error)
    except RefusedError as error:
        if error.code == RepeatedStepError.code and auto_rewind:  # the main rank sees to it
            return error.message
        if error.code != "rewound":
            raise
        return error.message
    return ""


def _rewind(directory: RunDirectory, error: ShoalError) -> str:
    """Returns the run to its last checkpoint, as its owner allowed."""
    from shoal.owner.rewinding import rewind_run, rewound_sentence

    done = rewind_run(directory, reason=f"by the trainer: {error.message}"[:200])
    return f"{error.message}; {rewound_sentence(done)}"


def _train(directory: RunDirectory, world: "World", report: Report) -> None:
    from shoal.training import Trackers
    from shoal.training.machine import TrainingMachine
    from shoal.training.service import TrainerService

    config, descriptor = directory.config(), directory.descriptor()
    metrics = EventLog(directory.events / "trainer.jsonl")
    on_wait = report if world.rank == 0 else silent
    key = directory.existing_key("trainer")
    client = CoordinatorClient.for_run(
        descriptor, key, config.coordinator_url, deadline_s=TRAINER_OUTAGE_S, on_wait=on_wait
    )
    if world.rank != 0:
        service = TrainerService(config, descriptor, _build_trainer(directory, world), client, None)
        keep_what_is_loaded()
        service.run()
        return
    TrainingMachine.here(config.training.device, world.size).save(directory.trainer)
    settings = config.model_dump(mode="json")
    trackers = Trackers(directory.trainer, config.training.trackers, run_name=descriptor.run_id, settings=settings)
    with closing(trackers), _serving(directory, client, metrics) as origin:
        report(f"origin at {config.origin_url}")
        trainer = _build_trainer(directory, world)
        service = TrainerService(
            config, descriptor, trainer, client, origin, metrics=metrics, trackers=trackers, report=report
        )
        keep_what_is_loaded()
        if not service.run():
            report(f"the run is drained at version {trainer.step}; `shoal run resume` lets it go on")
            return
        report("training is finished; still serving weights, stop with Ctrl-C")
        _wait_for_rewind(directory, trainer.epoch)


def _wait_for_rewind(directory: RunDirectory, epoch: int) -> None:
    """A finished run may be returned to an earlier version, too."""
    config, descriptor = directory.config(), directory.descriptor()
    key = directory.existing_key("trainer")
    with CoordinatorClient.for_run(descriptor, key, config.coordinator_url, deadline_s=LOOK_WITHIN_S) as client:
        while True:
            threading.Event().wait(LOOK_EVERY_S)
            with suppress(UnavailableError):
                if (now := client.line().epoch) != epoch:
                    raise RefusedError("rewound", f"The run was rewound: epoch {now} goes on.")


def _build_trainer(directory: RunDirectory, world: "World") -> "Trainer":
    from shoal.policy import resolve_model
    from shoal.policy.lora.checks import check_base
    from shoal.training import build_trainer, model_shape
    from shoal.training.memory import check_training_memory

    config, terms = directory.config(), directory.descriptor().adapter
    if terms is not None:
        check_base(resolve_model(config.model.path), terms.base_weights, "this run began with")
    with suppress(ConfigError):  # a model that does not name its layers has no plan
        check_training_memory(config, model_shape(config.model.path, lora=config.model.adapter), world)
    return build_trainer(config, directory.trainer, world=world)


@contextmanager
def _serving(directory: RunDirectory, client: CoordinatorClient, metrics: EventLog) -> Iterator[Origin]:
    """The origin, served from the beginning: new workers fetch the model's files while the trainer loads its weights."""
    config, descriptor = directory.config(), directory.descriptor()
    origin = build_origin(config, descriptor, directory.origin, directory.existing_key("run"), client.server_time)
    register_files(origin, descriptor, directory.origin)
    _restore_base(origin, config, descriptor)
    server = serve(origin, config, metrics)
    try:
        yield origin
    finally:
        server.stop()


def _restore_base(origin: Origin, config: ShoalConfig, descriptor: RunDescriptor) -> None:
    """A run that was restored from a backup of its beginning lacks the base, which no version names yet."""
    terms = descriptor.adapter
    if terms is not None and not origin.store.recover("manifests", terms.base_manifest):
        from shoal.policy import resolve_model
        from shoal.policy.weights import stored_tensors

        origin.add_base(stored_tensors(resolve_model(config.model.path)))


def build_origin(
    config: ShoalConfig,
    descriptor: RunDescriptor,
    root: Path,
    run_key: Keypair,
    clock: Callable[[], float] = time.time,
) -> Origin:
    """`clock` says when a head expires; the coordinator's, so that everybody means the same time."""
    settings = OriginSettings(
        run_id=descriptor.run_id,
        shard_bytes=config.broadcast.shard_bytes,
        keep_versions=config.broadcast.keep_versions + config.training.async_level,
        **_adapter_settings(descriptor),
    )
    return Origin(root, run_key, settings, clock=clock)


def _adapter_settings(descriptor: RunDescriptor) -> dict[str, Any]:
    """Fp32 factors change everywhere in every step, so that a delta of them is no smaller than they are."""
    terms = descriptor.adapter
    if terms is None:
        return {}
    base = AdaptedBase(manifest_digest=terms.base_manifest, weights_digest=terms.base_weights)
    return {"adapts": base, "delta_from_bytes": None}


def serve(origin: Origin, config: ShoalConfig, metrics: EventLog) -> OriginServer:
    server = OriginServer(
        origin.store, config.broadcast.host, config.broadcast.port, metrics=metrics, refresh=origin.refresh
    )
    server.start()
    return server


def register_files(origin: Origin, descriptor: RunDescriptor, root: Path) -> None:
    """Keeps the base files among those that the origin serves and relays mirror."""
    for reference in (*descriptor.model_files.values(), *descriptor.task_files, *descriptor.heldout_files):
        origin.add_file((root / "shards" / reference.digest).read_bytes())
