"""The contributor's loop: leases come in, samples pass through the engine, finished slots go out.

The engine is the only thing the loop waits for while it has work: leases are taken, slots scored and files uploaded in the
background. A lease names slot, seed and policy version, the descriptor everything else. One completion comes from exactly one
version: once a newer one is ready no lease of the old one is taken, the rows in flight end, and the weights are swapped. A
coordinator that is away is waited for while samples go on. Ctrl-C submits what is finished, gives the rest back and leaves.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from shoal.contributor import LimitWatch
from shoal.errors import RefusedError
from shoal.joined import JoinedRun, RelayReports
from shoal.metrics import EventLog, Report, silent
from shoal.policy.engine import Completion, Engine
from shoal.policy.episodes import EpisodeStream
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.evidence_store import KeptHeads, Receipts
from shoal.protocol.rollouts import Rollout
from shoal.tasks.environments.episodes import Episode
from shoal.tasks.workload import Reward, WorkItem
from shoal.worker.admission import EngineView, entry_order, leases_wanted
from shoal.worker.console import WorkerConsole, leaving_line
from shoal.worker.deliveries import Deliveries, Outbox
from shoal.worker.generation import Generation
from shoal.worker.heartbeat import Heartbeat
from shoal.worker.leases import LeaseTaker, News, Taken
from shoal.worker.loaded import LoadedPolicy
from shoal.worker.registration import Registration
from shoal.worker.slots import Slot, Version
from shoal.worker.submission import as_rollout, rollouts_of, submission_file
from shoal.worker.totals import WorkerTotals
from shoal.worker.weights import WeightFollower
from shoal.worker.wishes import Wishes

FIRST_WEIGHTS_S = 600.0
LEAVE_DEADLINE_S = 2.0
STOP_DEADLINE_S = 60.0
IDLE_S = 0.2
"""An idle worker looks this often for new weights."""


class Worker:
    def __init__(
        self,
        run: JoinedRun,
        client: CoordinatorClient,
        engine: Engine,
        *,
        name: str,
        outbox: Path | None = None,
        metrics: EventLog | None = None,
        report: Report = silent,
        evidence: Path | None = None,
        limits: LimitWatch | None = None,
    ) -> None:
        """`outbox` keeps finished files until they are submitted, `evidence` receipts and heads of the ledger;
        `limits` says when to rest and when to leave."""
        self.joined, self.client, self.engine, self.name = run, client, engine, name
        self.metrics = metrics or EventLog()
        self.report = report
        self.totals = WorkerTotals()
        self.weights = WeightFollower(
            run.weights, keep_versions=run.descriptor.async_level + 2, metrics=self.metrics, report=report
        )
        self.console = WorkerConsole(report)
        run_id, coordinator = run.descriptor.run_id, run.descriptor.coordinator_key
        heads = KeptHeads(evidence, run_id, coordinator) if evidence is not None else None
        reports = RelayReports(run.weights.reports)
        self.heartbeat = Heartbeat(client, run.relays, reports, self.totals, self.metrics, self.console, report, heads)
        self.registration = Registration(run, client, engine, name, report)
        self.loaded = LoadedPolicy(engine, self.weights, self.totals, self.metrics)
        self.wishes = Wishes(limits, self.weights, self.console, self.totals, run_id)
        self._inbox: SimpleQueue[News] = SimpleQueue()
        self._leases = LeaseTaker(
            client,
            self.weights,
            prepare=self.prepare,
            register=self.registration.register,
            inbox=self._inbox,
            report=report,
        )
        self._deliveries = Deliveries(
            client,
            score=self.rollouts,
            write=self._file,
            on_submitted=self._submitted,
            give_back=self._leases.give_back,
            outbox=Outbox(outbox) if outbox is not None else None,
            receipts=Receipts(evidence, run_id, coordinator, self._public_key) if evidence is not None else None,
            inbox=self._inbox,
            metrics=self.metrics,
            report=report,
        )
        self.generation = Generation(
            run.descriptor.rollouts.max_new_tokens,
            episode=lambda slot, at: self._episode(slot, at),  # a subclass may have its own
            report=report,
        )
        self._rows = 1
        self._environment_s = 0.0
        self._no_work = ""
        self._is_finished, self._is_refused = False, False
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends the loop when the slots that were begun have ended."""
        self._stopping.set()
        self.client.limit_waits(STOP_DEADLINE_S)

    def run(self) -> None:
        """Works until the run is finished, the key is refused, or `stop` is called."""
        self.weights.start()
        try:
            self._join()
            self._deliveries.upload_left()
            rollouts = self.joined.descriptor.rollouts
            longest = rollouts.max_prompt_tokens + rollouts.max_new_tokens
            opened = self.engine.open(temperature=rollouts.temperature, max_tokens=longest, rows=self.registration.rows)
            with EpisodeStream(opened) as stream:
                self._rows = min(self.registration.rows, stream.rows)
                self._work(stream)
            self._deliveries.finish()
            self._hear_all()
        except RefusedError:
            self._is_refused = True
            raise
        except (KeyboardInterrupt, SystemExit) as end:
            before = "\n" if isinstance(end, KeyboardInterrupt) else ""  # behind the terminal's own ^C
            self.report(before + leaving_line([str(slot) for slot in self.generation.slots], self._deliveries.pending))
            raise
        finally:
            self._leave()

    def _work(self, stream: EpisodeStream) -> None:
        while not self._is_over():
            self._obey(stream)
            self._hear_all()
            self._drop_expired(stream)
            self._drop_voided(stream)
            self._ask(stream)
            if not stream.unfinished:
                self._swap()
            self._feed(stream)
            if stream.unfinished:
                self._step(stream)
            else:
                self._idle()

    def _is_over(self) -> bool:
        if self._stopping.is_set():
            return not any(slot.is_begun for slot in self.generation.slots)
        return self._is_finished and not self.generation.slots

    def _obey(self, stream: EpisodeStream) -> None:
        """The contributor's limits: a resting worker begins nothing, and what has not ended within the grace goes back."""
        self.wishes.look()
        if self.wishes.is_finishing and not self._stopping.is_set():
            self.report("leaving, as you asked: what was begun is finished and submitted")
            self.stop()
        if self.wishes.is_resting:
            self._no_work = "resting"
            self._return_slots(stream, all_of_them=self.wishes.is_grace_over)
        self.wishes.tell()

    def _return_slots(self, stream: EpisodeStream, *, all_of_them: bool) -> None:
        for slot in [slot for slot in self.generation.slots if all_of_them or not slot.is_begun]:
            done = f", {len(slot.completions)} of {len(slot.items)} samples were done" if slot.is_begun else ""
            self.report(f"{slot} goes to another worker{done}")
            self.generation.forget(slot, stream)
            self._deliveries.give_back(slot.lease)

    def prepare(self, lease: api.Lease) -> Slot:
        """The slot of a lease, ready to begin: its weights are on disk."""
        items = self.joined.workload.items(bytes.fromhex(lease.slot_seed))
        left_s = max(1.0, lease.expires_at - self.client.server_time())
        path = self.policy_path((lease.policy_version, lease.manifest_digest), deadline_s=left_s)
        return Slot(lease, items, path, entry_order(items, self.generation.lengths))

    def policy_path(self, version: Version, *, deadline_s: float) -> Path:
        return self.weights.path(*version, deadline_s=deadline_s)

    def _hear_all(self) -> None:
        while not self._inbox.empty():
            self._hear(self._inbox.get())

    def _hear(self, news: News) -> None:
        if isinstance(news, Exception):
            raise news
        if isinstance(news, Taken):
            self.generation.slots.append(news.slot)
            self.generation.rates.leased(news.seconds)
            self._no_work = ""
        elif news.reason == "finished":
            self._is_finished = True
            self.report("the run is finished, thank you")
        elif news.reason:
            self._no_work = news.reason
            if not self.generation.slots:
                self.console.without_work(news.reason, news.wanted_version)

    def _ask(self, stream: EpisodeStream) -> None:
        if self._leases.is_asking or self._is_finished or self._stopping.is_set() or self.wishes.is_resting:
            return
        rollouts = self.joined.descriptor.rollouts
        view = EngineView(
            rows=self._rows,
            unfinished=stream.occupied,
            waiting=self.generation.waiting,
            slot_samples=rollouts.tasks_per_slot * rollouts.group_size,
            undelivered=self._deliveries.pending,
            has_newer_weights=self.loaded.newer() is not None,
            ends_per_s=self.generation.rates.ends_per_s,
            lease_s=self.generation.rates.lease_s,
        )
        if count := leases_wanted(view):
            idle = bool(self._no_work) and not self.generation.slots
            self._leases.ask(count, self.loaded.usable(any_will_do=idle))

    def _drop_expired(self, stream: EpisodeStream) -> None:
        now = self.client.server_time()
        for slot in [slot for slot in self.generation.slots if slot.lease.expires_at < now]:
            self.generation.forget(slot, stream)
            done = f"{len(slot.completions)} of {len(slot.items)} samples were done"
            self.report(f"{slot} took longer than its lease lasts; {done}")

    def _drop_voided(self, stream: EpisodeStream) -> None:
        for slot in [slot for slot in self.generation.slots if slot.lease.epoch < self.heartbeat.epoch]:
            self.generation.forget(slot, stream)
            self.report(f"{slot} is void: the owner returned the run to an earlier version")

    def _swap(self) -> None:
        """With nothing in the engine: the version of the next slot, or the newest one if no slot is there."""
        if self.wishes.is_resting or any(slot.version == self.loaded.version for slot in self.generation.slots):
            return
        if self.generation.slots:
            self._load(self.generation.slots[0].version, self.generation.slots[0].weights)
        elif (newer := self.loaded.newer()) is not None:
            self._load(newer, self.policy_path(newer, deadline_s=FIRST_WEIGHTS_S))

    def _load(self, version: Version, path: Path) -> None:
        self.loaded.load(version, path, stepped_at=self.generation.stepped_at)

    def _feed(self, stream: EpisodeStream) -> None:
        free = self._rows - stream.occupied
        may_begin = not (self._stopping.is_set() or self.wishes.is_resting)
        for slot in self.generation.entering(self.loaded.version, may_begin=may_begin) if free > 0 else ():
            if not slot.is_begun and not self.generation.can_end(slot, self.client.server_time()):
                self.generation.slots.remove(slot)
                self.report(f"{slot} cannot end before its lease does")
                self._deliveries.give_back(slot.lease)
                if not self.generation.running:
                    self.generation.rates.doubt_step()
                continue
            free -= self.generation.enter(slot, free, stream)
            version = slot.lease.policy_version
            self.console.working(f"generating step {slot.lease.step} slot {slot.lease.slot} with version {version}")
            if free <= 0:
                break

    def _episode(self, slot: Slot, at: int) -> Episode | None:
        if not slot.items[at].environment:
            return None
        slot.episodes[at] = self.joined.workload.episode(slot.items[at])
        return slot.episodes[at]

    def _step(self, stream: EpisodeStream) -> None:
        for slot in self.generation.step(stream):
            self._complete(slot, stream.generated)
            self._report_environments(slot, stream)

    def _report_environments(self, slot: Slot, stream: EpisodeStream) -> None:
        if slot.episodes:
            waited_s, self._environment_s = stream.environment_s - self._environment_s, stream.environment_s
            self.metrics.event("episodes", **slot.episode_counts(), environment_s=round(waited_s, 4))

    def _idle(self) -> None:
        if self._is_over():
            return
        started = time.monotonic()
        with suppress(Empty):
            self._hear(self._inbox.get(timeout=IDLE_S))
        if not self._leases.is_asking and self._deliveries.pending:
            self._no_work = "deliveries"
        seconds = round(time.monotonic() - started, 4)
        self.metrics.event("waited", reason=self._no_work or "lease", seconds=seconds)

    def _complete(self, slot: Slot, generated: int) -> None:
        self.totals.tokens += slot.tokens
        if self.registration.update_speed(generated, self.generation.busy_s):
            self._deliveries.run(self.registration.correct)
        self._deliveries.begin(slot)

    def rollouts(self, slot: Slot) -> list[Rollout]:
        """Every sample of a finished slot with its reward."""
        return rollouts_of(slot, self.joined.workload, self.rollout)

    def rollout(self, item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
        return as_rollout(item, completion, reward)

    def _file(self, slot: Slot, rollouts: Sequence[Rollout]) -> bytes:
        run_id, numerics_class = self.joined.descriptor.run_id, self.engine.numerics_class
        return submission_file(
            slot.lease, rollouts, run_id=run_id, worker_key=self._public_key, numerics_class=numerics_class
        )

    def _submitted(self, lease: api.Lease, samples: int, tokens: int) -> None:
        self.totals.submissions += 1
        self.console.submitted(lease, samples, tokens, self.registration.machine.recent_tokens_per_s)

    def _join(self) -> None:
        first = self.weights.wait_for_any(FIRST_WEIGHTS_S, listen=self.wishes.listen)
        version = (first.version, first.manifest_digest)
        self._load(version, first.path)
        self.report(f"has version {first.version} of the policy; measuring this machine")
        view = self.registration.measure_and_register(self.weights.link_bytes_per_s, self._stopping.wait)
        self.report(f"joined as {self.name} ({view.state}), key {view.key[:12]}…")
        self.heartbeat.start()
        self._leases.start()

    def _leave(self) -> None:
        self.client.limit_waits(LEAVE_DEADLINE_S)
        self.weights.stop()
        self._leases.stop(is_refused=self._is_refused)
        if not self._is_refused:  # else the coordinator takes the slots of this key back by itself
            self._give_back_all()
        self._deliveries.finish()
        self.heartbeat.stop()
        if self.totals.tokens:
            self.console.summary(self.totals.submissions, self.totals.tokens)
            self.report(self.totals.swap_line())

    def _give_back_all(self) -> None:
        while not self._inbox.empty():
            if isinstance(news := self._inbox.get(), Taken):
                self.generation.slots.append(news.slot)
        for slot in self.generation.slots:
            if not self._leases.give_back(slot.lease):
                break  # nobody is there

    @property
    def _public_key(self) -> str:
        assert self.client.keypair is not None
        return self.client.keypair.public
