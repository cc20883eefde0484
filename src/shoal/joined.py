"""Everything a role builds from the run descriptor: workload, model files on disk, and a client for the weights.

Nothing is taken on trust: files come from relays by digest, versions are verified, and the live list of relays is only a
list of places to look.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast import WeightClient, WeightClientSettings
from shoal.errors import UnavailableError
from shoal.files import digest_bytes, write_atomic
from shoal.metrics import EventLog, Report, silent
from shoal.policy.engine import Engine
from shoal.policy.engines import Numerics, make_engine
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.tasks import CODEC_FILES, TaskSet, TaskSets, check_requirements
from shoal.tasks.datasets.transfer import unpack
from shoal.tasks.workload import Workload

MAX_MODEL_FILE_BYTES = 64 << 20
FILE_DEADLINE_S = 60.0
OUTAGE_S = 3600.0
"""How long a new worker waits for an origin that does not answer."""
PIECE_DEADLINE_S = 600.0


class RelayList:
    """The relays that the coordinator last named, and always those of the descriptor."""

    def __init__(self, descriptor: RunDescriptor) -> None:
        self._owners = descriptor.relay_urls
        self._live: Sequence[str] = ()

    def update(self, urls: Sequence[str]) -> None:
        self._live = tuple(urls)

    def __call__(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self._live, *self._owners)))


@dataclass(frozen=True)
class JoinedRun:
    descriptor: RunDescriptor
    workload: Workload
    weights: WeightClient
    relays: RelayList
    model_files: Path
    """config.json and tokenizer of the base model; no weights."""

    def make_engine(self, kind: str = "torch", numerics: Numerics | None = None) -> Engine:
        rollouts = self.descriptor.rollouts
        longest = rollouts.max_prompt_tokens + rollouts.max_new_tokens
        eos_token_ids = self.workload.codec.eos_token_ids
        return make_engine(kind, self.model_files, eos_token_ids, numerics=numerics, max_tokens=longest)


def join_run(
    descriptor: RunDescriptor,
    cache_dir: Path,
    *,
    keep_versions: int | None = None,
    metrics: EventLog | None = None,
    heldout: bool = False,
    own_verifiers: Collection[str] | None = None,
    clock: Callable[[], float] = time.time,
    report: Report = silent,
) -> JoinedRun:
    """Fetches what the descriptor names into the cache; a second join of the same run fetches nothing.

    An origin that does not serve yet is waited for. A machine that cannot score the run's tasks is refused here.
    `heldout` also fetches what training never sees; `own_verifiers` are those that may be imported (None: any that the
    owner names). `clock` says when a head has expired.
    """
    relays = RelayList(descriptor)
    weights = WeightClient(
        descriptor.run_key,
        relays,
        cache_dir,
        WeightClientSettings(
            descriptor.run_id, keep_versions or descriptor.async_level + 2, owner_relays=descriptor.relay_urls
        ),
        metrics=metrics,
        clock=clock,
    )
    report(f"fetching the model files of {descriptor.run_id} from {', '.join(relays())}")
    files = {
        name: wait_for_file(weights, reference, report, deadline_s=FILE_DEADLINE_S)
        for name, reference in descriptor.model_files.items()
    }
    tasks = _fetch_tasks(descriptor, weights, cache_dir / "tasks", report, heldout=heldout)
    workload = Workload.build(descriptor, {name: files[name] for name in CODEC_FILES if name in files}, tasks)
    check_requirements(workload.tasks.train, descriptor.reward, own_verifiers=own_verifiers)
    model_files = cache_dir / "model" / descriptor.run_key[:16]
    for name, data in files.items():
        write_atomic(model_files / name, data)
    return JoinedRun(descriptor, workload, weights, relays, model_files)


def wait_for_file(
    weights: WeightClient,
    file: FileReference,
    report: Report,
    *,
    deadline_s: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> bytes:
    """A file of the run. Its origin may be starting or restarting: that is reported once and waited for."""
    started_at, is_reported = monotonic(), False
    while True:
        try:
            return weights.fetch_file(
                file.digest, max_bytes=min(file.bytes, MAX_MODEL_FILE_BYTES), deadline_s=deadline_s
            )
        except UnavailableError as error:
            if monotonic() - started_at > OUTAGE_S:
                raise
            if not is_reported:
                report(f"{error.message} Waiting for it, for up to {OUTAGE_S / 60:.0f} minutes.")
                is_reported = True


def _fetch_tasks(
    descriptor: RunDescriptor, weights: WeightClient, folder: Path, report: Report, *, heldout: bool
) -> TaskSets | None:
    """The tasks that the owner serves; None if the descriptor says where everybody finds them."""
    if not descriptor.task_files:
        return None
    return TaskSets(
        train=_fetch_set(descriptor.task_files, weights, folder, report),
        heldout=_fetch_set(descriptor.heldout_files, weights, folder, report) if heldout else TaskSet(),
    )


def _fetch_set(files: Sequence[FileReference], weights: WeightClient, folder: Path, report: Report) -> TaskSet:
    path = folder / f"{digest_bytes(''.join(file.digest for file in files).encode())}.arrow"
    if path.exists():
        return TaskSet.open(path)
    pieces = (wait_for_file(weights, file, report, deadline_s=PIECE_DEADLINE_S) for file in files)
    return unpack(pieces, path)
