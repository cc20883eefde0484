"""The trainer as a role: takes batches from the coordinator, trains, publishes versions through its origin.

The coordinator's batch records are the authority. A trainer that died resumes at its last checkpoint and repeats the recorded
batches bit for bit, so that it never publishes other bytes under a published number; origin and coordinator would refuse them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.broadcast import Origin, Publication
from shoal.config import ShoalConfig
from shoal.errors import IntegrityError, RefusedError, ShoalError
from shoal.metrics import EventLog, Report, silent
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.rollouts import Rollout, RolloutLimits, read_rollouts
from shoal.training.packing.samples import Group, Sample
from shoal.training.reports import StepReport
from shoal.training.trackers import Trackers
from shoal.training.trainer import DivergedError, Trainer

BATCH_WAIT_S = 20.0


class DrainedError(ShoalError):
    """The owner has drained the run: nothing is left to train on."""

    code = "drained"
    permanent = False


class RepeatedStepError(ShoalError):
    """A step that was trained again gave other weights than those that the swarm already has."""

    code = "repeated_step"
    permanent = True


def _other_weights(version: int, error: ShoalError) -> RepeatedStepError:
    return RepeatedStepError(
        f"Version {version} is already published, and repeating its step gave other weights ({error.message})",
        hint="A trainer that resumes repeats the steps since its last checkpoint, bit for bit. Undo what has changed "
        "since (settings in [training], torch, threads, device) until it has passed the newest published version, "
        "and change it then.",
    )


@dataclass(frozen=True)
class StepRecord:
    """One trained step: the trainer's report, and what the batch and its files took."""

    report: StepReport
    batch: api.BatchRecord
    wait_batch_s: float
    fetch_s: float

    def metrics(self) -> dict[str, Any]:
        """As trackers and the coordinator take them."""
        metrics = self.report.as_dict()
        return metrics | {
            "time_wait_batch_s": self.wait_batch_s,
            "time_fetch_s": self.fetch_s,
            "time_old_logprobs_s": metrics.pop("old_logprobs_s"),
            "time_update_s": metrics.pop("update_s"),
            "generated_groups": self.batch.generated_groups,
            "zero_signal_fraction": self.batch.dropped.get("no_signal", 0) / max(1, self.batch.generated_groups),
            **{f"dropped_{reason}": count for reason, count in self.batch.dropped.items()},
        }


@dataclass(frozen=True)
class PublishTimes:
    """How long training stood still for its weights, and how large they are."""

    time_stage_s: float
    time_announce_s: float
    weights_bytes: int


class TrainerService:
    def __init__(
        self,
        config: ShoalConfig,
        descriptor: RunDescriptor,
        trainer: Trainer,
        client: CoordinatorClient,
        origin: Origin | None,
        *,
        metrics: EventLog | None = None,
        trackers: Trackers | None = None,
        report: Report = silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`origin` is given on the main rank only."""
        self.config, self.descriptor, self.trainer, self.client = config, descriptor, trainer, client
        self.origin = origin
        self.metrics = metrics or EventLog()
        self.trackers = trackers
        self.report = report
        self._clock = clock

    def run(self) -> bool:
        """Trains until the last version is published, or the owner has drained the run; the last checkpoint is then on disk.

        True if the run is finished.
        """
        try:
            with self.trainer:
                return self._train()
        except DivergedError as error:  # reported after the last good checkpoint is whole on disk
            self.metrics.event("diverged", step=self.trainer.step, reason=error.message)
            raise

    def _train(self) -> bool:
        resumed = self.trainer.resume()
        self.report(f"resumed at step {self.trainer.step}" if resumed else "found no checkpoint, starting at step 0")
        record: StepRecord | None = None
        while True:
            self._log(record, self.publish(record))
            if self.finished:
                return True
            if self.trainer.step % self.config.training.checkpoint_every == 0:
                self.trainer.save()
            try:
                record = self.step()
            except DrainedError:
                self.trainer.save()
                return False

    def step(self) -> StepRecord:
        """One training step, not yet published."""
        started = self._clock()
        batch = self.wait_for_batch(self.trainer.step)
        waited = self._clock()
        groups = list(self.fetch_groups(batch))
        fetched = self._clock()
        # The oversampling cap may be reached without a group that has a signal; then the version is published unchanged.
        report = self.trainer.train_step(groups) if groups else self.trainer.skip_step()
        self.metrics.count("step")
        return StepRecord(report, batch, wait_batch_s=waited - started, fetch_s=fetched - waited)

    def _log(self, record: StepRecord | None, times: PublishTimes | None) -> None:
        if record is not None and self.trackers is not None:
            self.trackers.log(record.report.step, record.metrics() | (asdict(times) if times else {}))

    def wait_for_batch(self, step: int) -> api.BatchRecord:
        """The durable batch of a step. Waits as long as the run lives; says every few seconds what is missing.

        Every rank asks for itself, and the state may change between two answers: the run is drained if it is so for all ranks.
        """
        batch = self._ask_for_batch(step)
        if not self.trainer.world.any(batch is not None):
            raise DrainedError(f"The run is drained; step {step} gets no batch.")
        while batch is None:
            batch = self._ask_for_batch(step)
        return batch

    def _ask_for_batch(self, step: int) -> api.BatchRecord | None:
        """The batch, or None if the run is drained."""
        while True:
            answer = self.client.batch(step, BATCH_WAIT_S)
            if answer.batch is not None or answer.run_state == "drained":
                return answer.batch
            self.report(f"step {step} waits for {answer.waiting_for}")

    def fetch_groups(self, batch: api.BatchRecord) -> Iterator[Group]:
        """The groups of a batch, from files whose bytes are hashed again, with the validator's rewards."""
        limits = RolloutLimits.of(self.descriptor)
        files: dict[str, list[Rollout]] = {}
        for record in batch.groups:
            if record.submission_id not in files:
                data = self.client.submission_file(record.submission_id, record.digest)
                files[record.submission_id] = read_rollouts(data, limits)[1]
            rows = [rollout for rollout in files[record.submission_id] if rollout.group == record.group]
            if len(rows) != len(record.rewards):
                raise IntegrityError(
                    f"Group {record.group_id} has {len(rows)} samples, its verdict {len(record.rewards)}."
                )
            yield Group(record.group_id, [_sample(row, record, index) for index, row in enumerate(rows)])

    def publish(self, record: StepRecord | None = None) -> PublishTimes | None:
        """Stages the current weights, records the version with the coordinator, then announces it to the swarm.

        `record` is of the step that made the version. None where this rank publishes nothing.
        """
        started = self._clock()
        if self.origin is None or _is_history(self.origin, self.trainer.step):
            for _ in self.trainer.wire_tensors():
                pass  # every rank takes part in gathering
            self._keep_last_version()
            return None
        publication = self._stage(self.origin)
        staged = self._clock()
        metrics = record.metrics() if record else {}
        metrics |= {"time_stage_s": staged - started, "weights_bytes": publication.weights_bytes}
        ledger_head = self._record_version(publication, metrics)
        self._keep_last_version()
        self.origin.announce(ledger_head=ledger_head)
        self._report_version(publication, record, self.origin.files_collected)
        return PublishTimes(staged - started, self._clock() - staged, publication.weights_bytes)

    @property
    def finished(self) -> bool:
        """Whether the weights are those of the last version."""
        return self.trainer.step >= self.config.run.steps

    def _keep_last_version(self) -> None:
        """On disk before it is announced, because the end of a run is when its processes are stopped."""
        if self.finished:
            self.trainer.save()
            self.trainer.close()

    def _stage(self, origin: Origin) -> Publication:
        try:
            return origin.stage(self.trainer.step, self.trainer.wire_tensors())
        except IntegrityError as error:
            raise _other_weights(self.trainer.step, error) from error

    def _record_version(self, publication: Publication, metrics: Mapping[str, Any]) -> str:
        """Returns the head of the ledger."""
        body = api.VersionBody(
            version=publication.version,
            manifest_digest=publication.manifest_digest,
            weights_digest=publication.weights_digest,
            bytes_total=publication.follow_bytes,
            report={name: value for name, value in metrics.items() if isinstance(value, (int, float, str))},
            oldest_checkpoint=min(self.trainer.checkpoint_steps(), default=0),
        )
        try:
            return self.client.publish(body).ledger_head
        except RefusedError as error:
            if error.code != "version_conflict":
                raise
            raise _other_weights(publication.version, error) from error

    def _report_version(self, publication: Publication, record: StepRecord | None, files_collected: int) -> None:
        self.metrics.event(
            "published",
            version=publication.version,
            kind=publication.kind,
            bytes_total=publication.follow_bytes,
            weights_bytes=publication.weights_bytes,
            files_collected=files_collected,
        )
        detail = f", task reward {record.report.task_reward_mean:.3f}" if record else ""
        size = f"{publication.follow_bytes / 1e6:.1f} MB"
        if publication.follow_bytes < publication.weights_bytes:
            size += f" instead of {publication.weights_bytes / 1e6:.1f}, {publication.ratio:.0f}x less"
        self.report(f"published version {publication.version} ({size}){detail}")


def _sample(row: Rollout, record: api.BatchGroup, index: int) -> Sample:
    return Sample(
        prompt_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        reward=record.rewards[index],
        task_reward=record.task_rewards[index],
        behaviour_logprobs=row.output_logprobs if record.logprobs_verified else None,
        policy_version=record.policy_version,
        truncated=row.finish_reason == "length",
    )


def _is_history(origin: Origin, version: int) -> bool:
    """Whether a trainer that repeats steps from an old checkpoint is at a version that the origin no longer serves."""
    versions = origin.head.versions if origin.head is not None else ()
    return bool(versions) and version < versions[0].version
