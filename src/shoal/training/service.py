"""The trainer as a role: takes batches from the coordinator, trains, publishes versions through its origin.

The coordinator's batch records are the authority. A trainer that died resumes at its last checkpoint and repeats the recorded
batches bit for bit, so that it never publishes other bytes under a published number; origin and coordinator would refuse them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from shoal.broadcast import Origin, Publication
from shoal.config import ShoalConfig
from shoal.errors import IntegrityError, RefusedError, ShoalError
from shoal.metrics import EventLog, Report, silent
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.patience import patiently
from shoal.protocol.rollouts import Rollout, RolloutLimits, read_rollouts
from shoal.training.packing.samples import Group, Sample
from shoal.training.trackers import Trackers
from shoal.training.trainer import DivergedError, Trainer

BATCH_WAIT_S = 20.0
OUTAGE_S = 1500.0
"""Loading a large policy again costs more than waiting for a coordinator; less than the ranks wait for each other."""
Answer = TypeVar("Answer")


class DrainedError(ShoalError):
    """The owner has drained the run: nothing is left to train on."""

    code = "drained"
    permanent = False


class RepeatedStepError(ShoalError):
    """A step that was trained again gave other weights than those that the swarm already has."""

    code = "repeated_step"
    permanent = True


@contextlib.contextmanager
def _explained(version: int) -> Iterator[None]:
    """Says why other weights under a published number can come about, and what to do."""
    try:
        yield
    except (IntegrityError, RefusedError) as error:
        if isinstance(error, RefusedError) and error.code != "version_conflict":
            raise
        raise RepeatedStepError(
            f"Version {version} is already published, and repeating its step gave other weights ({error.message})",
            hint="A trainer that resumes repeats the steps since its last checkpoint, bit for bit. Undo what has changed "
            "since (settings in [training], torch, threads, device) until it has passed the newest published version, "
            "and change it then.",
        ) from error


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
        figures: dict[str, Any] = {}
        while True:
            self.publish(figures)
            self._log(figures)
            if self.trainer.step % self.config.training.checkpoint_every == 0:
                self.trainer.save()
            if self.trainer.step >= self.config.run.steps:
                return True
            try:
                figures = self.step()
            except DrainedError:
                self.trainer.save()
                return False

    def step(self) -> dict[str, Any]:
        """One training step; returns its figures."""
        started = self._clock()
        batch = self.wait_for_batch(self.trainer.step)
        waited = self._clock()
        groups = list(self.fetch_groups(batch))
        fetched = self._clock()
        # The oversampling cap may be reached without a group that has a signal; then the version is published unchanged.
        report = self.trainer.train_step(groups) if groups else self.trainer.skip_step()
        figures = report.as_dict()
        figures |= {
            "time_wait_batch_s": waited - started,
            "time_fetch_s": fetched - waited,
            "time_old_logprobs_s": figures.pop("old_logprobs_s"),
            "time_update_s": figures.pop("update_s"),
            "generated_groups": batch.generated_groups,
            "zero_signal_fraction": batch.dropped.get("no_signal", 0) / max(1, batch.generated_groups),
            **{f"dropped_{reason}": count for reason, count in batch.dropped.items()},
        }
        self.metrics.count("step")
        return figures

    def _log(self, figures: dict[str, Any]) -> None:
        """After publishing, so that the record also says how long the trainer stood still for its weights."""
        if "step" in figures and self.trackers is not None:
            self.trackers.log(int(figures["step"]), figures)

    def wait_for_batch(self, step: int) -> api.BatchRecord:
        """The durable batch of a step. Waits as long as the run lives; says every few seconds what is missing.

        Every rank asks for itself, and the owner may change his mind between two answers: drained is what all were told.
        """
        batch = self._hear(step)
        if not self.trainer.world.any(batch is not None):
            raise DrainedError(f"The run is drained; step {step} gets no batch.")
        while batch is None:
            batch = self._hear(step)
        return batch

    def _hear(self, step: int) -> api.BatchRecord | None:
        """The batch, or None if the run is drained."""
        while True:
            answer = self._patiently(lambda: self.client.batch(step, BATCH_WAIT_S))
            if answer.batch is not None or answer.run_state == "drained":
                return answer.batch
            self.report(f"step {step} waits for {answer.waiting_for}")

    def fetch_groups(self, batch: api.BatchRecord) -> Iterator[Group]:
        """The groups of a batch, from files whose bytes are hashed again, with the validator's rewards."""
        limits = RolloutLimits.of(self.descriptor)
        files: dict[str, list[Rollout]] = {}
        for record in batch.groups:
            if record.submission_id not in files:
                data = self._patiently(partial(self.client.submission_file, record.submission_id, record.digest))
                files[record.submission_id] = read_rollouts(data, limits)[1]
            rows = [rollout for rollout in files[record.submission_id] if rollout.group == record.group]
            if len(rows) != len(record.rewards):
                raise IntegrityError(
                    f"Group {record.group_id} has {len(rows)} samples, its verdict {len(record.rewards)}."
                )
            yield Group(record.group_id, [_sample(row, record, index) for index, row in enumerate(rows)])

    def publish(self, figures: dict[str, Any]) -> None:
        """Stages the current weights, records the version with the coordinator, then shows it to the swarm.

        Adds to the figures of the step how long that took.
        """
        started = self._clock()
        if self.origin is None or _is_history(self.origin, self.trainer.step):
            for _ in self.trainer.wire_tensors():
                pass  # every rank takes part in gathering
            return
        with _explained(self.trainer.step):
            publication = self.origin.stage(self.trainer.step, self.trainer.wire_tensors())
            figures["time_stage_s"] = self._clock() - started
            figures["weights_bytes"] = publication.weights_bytes
            report: dict[str, api.Metric] = {
                name: value for name, value in figures.items() if isinstance(value, (int, float, str))
            }
            body = api.VersionBody(
                version=publication.version,
                manifest_digest=publication.manifest_digest,
                weights_digest=publication.weights_digest,
                bytes_total=publication.follow_bytes,
                report=report,
                oldest_checkpoint=min(self.trainer.checkpoint_steps(), default=0),
            )
            answer = self._patiently(lambda: self.client.publish(body))
        self.origin.announce(ledger_head=answer.ledger_head)
        figures["time_announce_s"] = self._clock() - started - figures["time_stage_s"]
        self._say(publication, figures)

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        return patiently(ask, self.report, outage_s=OUTAGE_S, clock=self._clock)

    def _say(self, publication: Publication, figures: dict[str, Any]) -> None:
        assert self.origin is not None
        self.metrics.event(
            "published",
            version=publication.version,
            kind=publication.kind,
            bytes_total=publication.follow_bytes,
            weights_bytes=publication.weights_bytes,
            files_collected=self.origin.files_collected,
        )
        reward = figures.get("task_reward_mean")
        detail = f", task reward {reward:.3f}" if isinstance(reward, float) else ""
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
    """Whether a trainer that repeats steps from an old checkpoint is at a version that nobody can fetch any more."""
    versions = origin.head.versions if origin.head is not None else ()
    return bool(versions) and version < versions[0].version
