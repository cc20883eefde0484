"""The contributor's loop: lease → weights → generate → commit → submit.

The lease names slot, seed and policy version, the descriptor everything else. One completion
comes from exactly one version, so weights are swapped only between leases. A coordinator that is away is waited for: it may be
restarting, or this laptop was asleep. Ctrl-C gives the slot back and leaves.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import RefusedError, ShoalError, UnavailableError
from shoal.joined import JoinedRun
from shoal.metrics import EventLog, Report, silent
from shoal.policy.engine import Completion, Engine, GenerationRequest
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.rollouts import Rollout, RolloutHeader, write_rollouts
from shoal.tasks.workload import Reward, WorkItem
from shoal.worker.console import WorkerConsole
from shoal.worker.heartbeat import Heartbeat
from shoal.worker.machine import Machine, machine_memory
from shoal.worker.totals import WorkerTotals
from shoal.worker.weights import WeightFollower

FIRST_WEIGHTS_S = 600.0
PROBE_REQUESTS = 32
LEAVE_DEADLINE_S = 2.0
STOP_DEADLINE_S = 60.0
SUBMIT_AT_LEAST_S = 60.0
"""An upload is tried while its lease lasts, and so long if that is over: the coordinator says what becomes of it."""
LOST_WORK = {"lease_expired", "unknown_lease", "already_submitted"}
"""Refusals that cost one submission; any other ends the worker."""


@dataclass(frozen=True)
class Batch:
    """When the engine generated a batch, by the monotonic clock."""

    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


@dataclass(frozen=True)
class Generated:
    """The samples of one slot and the time they took."""

    rollouts: list[Rollout]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(rollout.output_tokens) for rollout in self.rollouts)


def as_rollout(item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
    return Rollout(
        task_id=item.task.problem_id,
        group=item.group,
        sample=item.sample,
        input_tokens=list(item.prompt_tokens),
        output_tokens=completion.tokens,
        output_logprobs=completion.logprobs,
        target_length=item.target_length,
        task_reward=reward.task_reward,
        length_penalty=reward.length_penalty,
        reward=reward.total,
        finish_reason=completion.finish_reason,
        proofs=completion.proofs,
    )


class Worker:
    def __init__(
        self,
        run: JoinedRun,
        client: CoordinatorClient,
        engine: Engine,
        *,
        name: str,
        metrics: EventLog | None = None,
        report: Report = silent,
    ) -> None:
        self.joined, self.client, self.engine, self.name = run, client, engine, name
        self.metrics = metrics or EventLog()
        self.report = report
        self.totals = WorkerTotals()
        self.weights = WeightFollower(
            run.weights, keep_versions=run.descriptor.async_level + 2, metrics=self.metrics, report=report
        )
        self.console = WorkerConsole(report)
        self.heartbeat = Heartbeat(client, run.relays, self.totals, self.metrics, self.console, report)
        self._loaded: tuple[int, str] | None = None
        self._last_batch = Batch(0.0, 0.0)
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._uploading: Future[None] | None = None
        self._stopping = threading.Event()
        self._machine = Machine(1.0)
        self._lease: api.Lease | None = None

    def stop(self) -> None:
        self._stopping.set()
        self.client.limit_waits(STOP_DEADLINE_S)

    def run(self) -> None:
        """Works until the run is finished, the key is refused, or `stop` is called."""
        self.weights.start()
        try:
            self._join()
            while not self._stopping.is_set() and (answer := self._next_lease()) is not None:
                if answer.lease is None:
                    self._wait(answer)
                else:
                    self._lease = answer.lease
                    self._submit(answer.lease, self.generate(answer.lease))
                    self._lease = None
            self._finish_upload()
        except RefusedError:
            self._lease = None  # a coordinator that refuses this key takes its slot back too
            raise
        except (KeyboardInterrupt, SystemExit) as end:
            self._report_leaving("\n" if isinstance(end, KeyboardInterrupt) else "")  # behind the terminal's own ^C
            raise
        finally:
            self._leave()

    def generate(self, lease: api.Lease) -> Generated:
        """All samples of the slot, with rewards and commitments."""
        items = self.joined.workload.items(bytes.fromhex(lease.slot_seed))
        self._swap(lease.policy_version, lease.manifest_digest, self.policy_path(lease))
        self.console.working(f"generating step {lease.step} slot {lease.slot} with version {lease.policy_version}")
        started = time.monotonic()
        completions = self._sample(items)
        self._last_batch = Batch(started, time.monotonic())
        rewards = self.joined.workload.rewards(
            [(item.task, item.target_length, done.tokens) for item, done in zip(items, completions, strict=True)]
        )
        rollouts = [self.rollout(*row) for row in zip(items, completions, rewards, strict=True)]
        generated = Generated(rollouts, self._last_batch.seconds)
        self.totals.tokens += generated.tokens
        return generated

    def policy_path(self, lease: api.Lease) -> Path:
        left_s = max(1.0, lease.expires_at - self.client.server_time())
        return self.weights.path(lease.policy_version, lease.manifest_digest, deadline_s=left_s)

    def rollout(self, item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
        return as_rollout(item, completion, reward)

    def _join(self) -> None:
        first = self.weights.wait_for_any(FIRST_WEIGHTS_S)
        self._swap(first.version, first.manifest_digest, first.path)
        self.report(f"has version {first.version} of the policy; measuring this machine")
        self._machine = Machine(self._measure_speed(), self.weights.link_bytes_per_s, machine_memory())
        self.report(f"this machine: {self._machine.line()}")
        view = self._register()
        self.report(f"joined as {self.name} ({view.state}), key {view.key[:12]}…")
        self.heartbeat.start()

    def _register(self) -> api.WorkerView:
        body = self._machine.registration(self.name, self.engine.numerics_class)
        return self.client.register(body)

    def _measure_speed(self) -> float:
        items = self.joined.workload.items(secrets.token_bytes(32))[:PROBE_REQUESTS]
        self._sample(items[:1])  # the first call pays for warm-up
        started = time.monotonic()
        completions = self._sample(items)
        return sum(len(completion.tokens) for completion in completions) / max(time.monotonic() - started, 1e-6)

    def _sample(self, items: Sequence[WorkItem]) -> list[Completion]:
        rollouts = self.joined.descriptor.rollouts
        requests = [GenerationRequest(item.prompt_tokens, item.seed, rollouts.max_new_tokens) for item in items]
        return self.engine.generate(requests, temperature=rollouts.temperature)

    def _next_lease(self) -> api.LeaseAnswer | None:
        body = api.LeaseBody(request_id=secrets.token_hex(16), held_versions=self.weights.held()[-16:])
        try:
            answer = self.client.lease(body)
        except RefusedError as refusal:
            if refusal.code != "unknown_worker":
                raise
            self.report("the coordinator does not know this worker any more, registering again")
            self._register()
            return self._next_lease()
        if answer.reason == "finished":
            self.report("the run is finished, thank you")
            return None
        return answer

    def _wait(self, answer: api.LeaseAnswer) -> None:
        activity = {
            "need_weights": f"fetching version {answer.wanted_version}",
            "waiting_for_trainer": "waiting for the trainer",
            "paused": "the run is paused",
            "draining": "the run is being drained, there is no new work",
            "disk_full": "the coordinator's disk is full, waiting for its owner",
        }.get(answer.reason, "waiting for work")
        self.console.waiting(activity)
        started = time.monotonic()
        if answer.reason == "need_weights":
            self.weights.wait_newer(self.weights.newest(), answer.retry_after_s)
        else:
            self._stopping.wait(answer.retry_after_s)
        self.metrics.event("waited", reason=answer.reason, seconds=round(time.monotonic() - started, 4))

    def _swap(self, version: int, digest: str, path: Path) -> None:
        if self._loaded == (version, digest):
            return
        self._loaded = None
        drain_s = self._drained_s(version)
        started = time.monotonic()
        self.engine.load(path)
        seconds = time.monotonic() - started
        self.totals.swap_s += seconds
        self.totals.drain_s += drain_s
        self.totals.swaps += 1
        self.metrics.event("weights_swapped", version=version, drain_s=round(drain_s, 4), swap_s=round(seconds, 4))
        self._loaded = (version, digest)

    def _drained_s(self, version: int) -> float:
        """How long the last batch went on with the old weights after the new ones were ready."""
        last, ready_at = self._last_batch, self.weights.ready_at(version)
        return max(0.0, last.ended_at - max(last.started_at, ready_at)) if ready_at is not None else 0.0

    def _submit(self, lease: api.Lease, generated: Generated) -> None:
        header = RolloutHeader(
            run_id=self.joined.descriptor.run_id,
            step=lease.step,
            slot=lease.slot,
            lease_id=lease.lease_id,
            worker_key=self._public_key,
            policy_version=lease.policy_version,
            manifest_digest=lease.manifest_digest,
            numerics_class=self.engine.numerics_class,
        )
        data = write_rollouts(header, generated.rollouts)
        if self._machine.update_speed(generated.tokens, generated.seconds):
            self._register()
        self._finish_upload()
        self._uploading = self._uploads.submit(self._upload, lease, generated, data)

    def _upload(self, lease: api.Lease, generated: Generated, data: bytes) -> None:
        try:
            left_s = max(SUBMIT_AT_LEAST_S, lease.expires_at - self.client.server_time())
            self.client.submit(lease.lease_id, data, by_bucket=lease.by_bucket, deadline_s=left_s)
        except RefusedError as refusal:
            if refusal.code not in LOST_WORK:
                raise
            self.report(f"step {lease.step} slot {lease.slot} came too late: {refusal}")
            return
        except UnavailableError as error:
            self.report(f"step {lease.step} slot {lease.slot} could not be submitted: {error}")
            return
        self.totals.submissions += 1
        self.console.submitted(lease, len(generated.rollouts), generated.tokens, generated.seconds)
        self.metrics.event("submitted", step=lease.step, slot=lease.slot, size_bytes=len(data))

    def _finish_upload(self) -> None:
        if self._uploading is not None:
            self._uploading.result()
            self._uploading = None

    def _report_leaving(self, before: str) -> None:
        lease = self._lease
        held = f"step {lease.step} slot {lease.slot} goes to another worker" if lease else "no slot is held"
        sending = ", the last upload is being finished" if self._uploading and not self._uploading.done() else ""
        self.report(f"{before}leaving: {held}{sending}")

    def _leave(self) -> None:
        self.client.limit_waits(LEAVE_DEADLINE_S)
        self._uploads.shutdown(wait=True)
        if self._lease is not None:
            self._give_back(self._lease)
        self.heartbeat.stop()
        self.weights.stop()
        if self.totals.tokens:
            self.console.summary(self.totals.submissions, self.totals.tokens)
            self.report(self.totals.swap_line())

    def _give_back(self, lease: api.Lease) -> None:
        try:
            self.client.give_back(lease.lease_id)
            self.report(f"gave step {lease.step} slot {lease.slot} back")
        except ShoalError as error:
            self.report(f"could not give the slot back, it will expire: {error}")

    @property
    def _public_key(self) -> str:
        assert self.client.keypair is not None
        return self.client.keypair.public
