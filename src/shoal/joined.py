"""Everything a role builds from the run descriptor: workload, model files on disk, and a client for the weights.

Nothing is taken on trust: files come from relays by digest, versions are verified, and the live list of relays is only a
list of places to look.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast import AdaptedBase, RelayReport, WeightClient, WeightClientSettings
from shoal.broadcast.download import ProgressLine
from shoal.broadcast.scores import RELIABLE_SUCCESS
from shoal.errors import ShoalError, UnavailableError
from shoal.files import TEMPORARY_PREFIX, WEIGHTS_FILE, digest_bytes, write_atomic
from shoal.metrics import EventLog, Report, silent
from shoal.metrics.units import size
from shoal.policy.engine import Engine
from shoal.policy.engines import Numerics, devices_here, make_engine
from shoal.policy.weights import stored_dtype
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.tasks import CODEC_FILES, TaskSet, TaskSets, check_requirements
from shoal.tasks.datasets.transfer import unpack
from shoal.tasks.environments.registry import check_environments
from shoal.tasks.workload import Workload

MAX_MODEL_FILE_BYTES = 64 << 20
FILE_DEADLINE_S = 60.0
ORIGIN_OUTAGE_S = 3600.0
"""How long a new worker waits for an origin that does not answer."""
PIECE_DEADLINE_S = 600.0
MOST_REPORTED = 32
REPORT_EVERY_S = 30.0


class RelayList:
    """The relays that the coordinator last named, and always those of the descriptor."""

    def __init__(self, descriptor: RunDescriptor) -> None:
        self._owners = descriptor.relay_urls
        self._live: Sequence[str] = ()

    def update(self, urls: Sequence[str]) -> None:
        self._live = tuple(urls)

    def __call__(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self._live, *self._owners)))


class RelayReports:
    """What a role measured of relays since it last reported: the coordinator's list is made of such reports."""

    def __init__(self, measured: Callable[[], Sequence[RelayReport]]) -> None:
        self._measured = measured
        self._reported: dict[str, tuple[int, int, int, int]] = {}

    def news(self) -> list[api.RelayMeasurement]:
        """Of relays that served or failed since the last call, those that did most first."""
        found: list[tuple[int, api.RelayMeasurement]] = []
        for relay in self._measured():
            totals = relay.bytes_received, relay.served, relay.failures, relay.lies
            before = self._reported.get(relay.url, (0, 0, 0, 0))
            self._reported[relay.url] = totals
            received, served, failures, lies = (now - then for now, then in zip(totals, before, strict=True))
            if received or failures or lies:
                is_good = received > 0 and not lies and relay.success >= RELIABLE_SUCCESS
                news = api.RelayMeasurement(url=relay.url[:220], is_good=is_good, served=served, failed=failures + lies)
                found.append((received, news))
        found.sort(key=lambda one: -one[0])
        return [measurement for _, measurement in found[:MOST_REPORTED]]


@dataclass(frozen=True)
class JoinedRun:
    descriptor: RunDescriptor
    workload: Workload
    weights: WeightClient
    relays: RelayList
    model_files: Path
    """config.json and tokenizer of the base model; its weights only where versions are adapters of them."""

    def make_engine(self, kind: str = "torch", numerics: Numerics | None = None) -> Engine:
        rollouts = self.descriptor.rollouts
        longest = rollouts.max_prompt_tokens + rollouts.max_new_tokens
        eos_token_ids = self.workload.codec.eos_token_ids
        terms = self.descriptor.adapter
        return make_engine(
            kind,
            self.model_files,
            eos_token_ids,
            numerics=numerics,
            max_tokens=longest,
            lora=terms.lora if terms is not None else None,
        )

    def make_scorer(self, kind: str = "torch") -> Engine:
        """An engine that scores in float32 with its weights as they are published, or as a frozen base is stored."""
        stored = "bfloat16" if self.descriptor.adapter is None else stored_dtype(self.model_files)
        return self.make_engine(kind, Numerics(devices_here()[0], stored=stored))


def follow_relays(run: JoinedRun, client: CoordinatorClient, stopping: threading.Event | None = None) -> None:
    """Keeps the list of relays of one of the owner's roles, and reports what the role measures of them, on a thread."""
    reports, ended = RelayReports(run.weights.reports), stopping or threading.Event()

    def follow() -> None:
        while not ended.wait(REPORT_EVERY_S):
            with contextlib.suppress(ShoalError):  # the role itself meets the same, reports it and waits
                answer = client.report_relays(api.RelayReportBody(relays=reports.news()))
                run.relays.update([view.url for view in answer.relays])

    threading.Thread(target=follow, name="relays", daemon=True).start()


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
    `heldout` also fetches what training never sees; `own_verifiers` are those, and the environments, that may be
    imported (None: any that the owner names). `clock` says when a head has expired.
    """
    relays = RelayList(descriptor)
    weights = WeightClient(
        descriptor.run_key,
        relays,
        cache_dir,
        WeightClientSettings(
            descriptor.run_id,
            keep_versions or descriptor.async_level + 2,
            owner_relays=descriptor.relay_urls,
            adapts=adapted_base(descriptor),
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
    check_environments(descriptor.environments, own_environments=own_verifiers)
    workload = Workload.build(descriptor, {name: files[name] for name in CODEC_FILES if name in files}, tasks)
    check_requirements(workload.tasks.train, descriptor.reward, own_verifiers=own_verifiers)
    model_files = cache_dir / "model" / descriptor.run_key[:16]
    for name, data in files.items():
        write_atomic(model_files / name, data)
    if descriptor.adapter is not None:
        report(f"fetching the base, {size(descriptor.adapter.base_bytes)}, unless it is here")
        base = weights.fetch_base(on_progress=ProgressLine(report))
        _link(model_files / WEIGHTS_FILE, base / WEIGHTS_FILE)
    return JoinedRun(descriptor, workload, weights, relays, model_files)


def adapted_base(descriptor: RunDescriptor) -> AdaptedBase | None:
    terms = descriptor.adapter
    if terms is None:
        return None
    return AdaptedBase(manifest_digest=terms.base_manifest, weights_digest=terms.base_weights)


def _link(link: Path, target: Path) -> None:
    """The base lies among the verified versions, once; an engine looks for it beside its config."""
    temporary = link.with_name(f"{TEMPORARY_PREFIX}{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.resolve())
    os.replace(temporary, link)


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
            if monotonic() - started_at > ORIGIN_OUTAGE_S:
                raise
            if not is_reported:
                report(f"{error.message} Waiting for it, for up to {ORIGIN_OUTAGE_S / 60:.0f} minutes.")
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
