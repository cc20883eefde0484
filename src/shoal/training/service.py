"""The trainer as a role: takes batches from the coordinator, trains, publishes versions through its origin.

The coordinator's batch records are the authority. A trainer that died resumes at its last checkpoint and repeats the recorded
batches bit for bit, so that it never publishes other bytes under a published number; origin and coordinator would refuse them.
Versions leave beside the training: while the publisher works on version s the trainer trains step s, and no checkpoint of step s
appears before version s is recorded.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.broadcast import Origin, Publication
from shoal.config import ShoalConfig
from shoal.errors import IntegrityError, ShoalError
from shoal.metrics import EventLog, Report, silent
from shoal.metrics.units import size
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.rollouts import TRUNCATED, Rollout, RolloutLimits, read_rollouts
from shoal.protocol.steps import Rewind, is_void
from shoal.training.asking import act_as_one, ask_as_one, fetch_for_node
from shoal.training.checkpoints import always
from shoal.training.packing.samples import Group, Sample
from shoal.training.publisher import Published, Publisher, Publishing, Version
from shoal.training.repetition import steps_repeat
from shoal.training.reports import StepReport
from shoal.training.screening import Screening, recall
from shoal.training.trackers import Trackers
from shoal.training.trainer import DivergedError, Trainer

BATCH_WAIT_S = 20.0


class DrainedError(ShoalError):
    """The owner has drained the run: nothing is left to train on."""

    code = "drained"
    permanent = False


@dataclass(frozen=True)
class StepRecord:
    """One trained step: the trainer's report, and what the batch and its files took."""

    report: StepReport
    batch: api.BatchRecord
    wait_batch_s: float
    fetch_s: float

    def metrics(self) -> dict[str, Any]:
        """As trackers and the coordinator take them; what was not measured is absent."""
        metrics = self.report.as_dict()
        generated = {
            "generated_reward_mean": self.batch.generated_reward_mean,
            "generated_task_reward_mean": self.batch.generated_task_reward_mean,
        }
        return metrics | {
            "time_wait_batch_s": self.wait_batch_s,
            "time_fetch_s": self.fetch_s,
            "time_old_logprobs_s": metrics.pop("old_logprobs_s"),
            "time_update_s": metrics.pop("update_s"),
            "generated_groups": self.batch.generated_groups,
            **{name: value for name, value in generated.items() if value is not None},
            "zero_signal_fraction": self.batch.dropped.get("no_signal", 0) / max(1, self.batch.generated_groups),
            **{f"dropped_{reason}": count for reason, count in self.batch.dropped.items()},
        }


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
        self.publisher: Publisher | None = None
        if origin is not None:
            self.publisher = Publisher(
                origin,
                client,
                checkpoints=trainer.checkpoint_steps,
                on_published=self._log,
                clock=clock,
            )
        self.metrics = metrics or EventLog()
        self.trackers = trackers
        self.report = report
        self._clock = clock
        self._batch: api.BatchRecord | None = None
        """What the current step trains on."""
        self._guard_is_off = False

    def run(self) -> bool:
        """Trains until the last version is published, or the owner has drained the run; the last checkpoint is then on disk.

        True if the run is finished.
        """
        try:
            with self.trainer, self.publisher or nullcontext():
                return self._train()
        except DivergedError as error:  # reported after the last good checkpoint is whole on disk
            self.metrics.event("diverged", step=self.trainer.step, reason=error.message)
            raise

    def take_up(self) -> None:
        """Goes on where the run is: what a rewind voided leaves the disk and the head before anything is resumed.

        Each part may be killed and done again; the coordinator's record of rewinds alone decides.
        """
        line = ask_as_one(self.trainer.world, api.LineAnswer, self.client.line)
        rewinds = [Rewind(one.epoch, one.version) for one in line.rewinds]
        lost = self.trainer.drop_void(rewinds)
        act_as_one(self.trainer.world, partial(self._take_up_head, line, rewinds, lost))
        self.trainer.epoch = line.epoch

    def _take_up_head(self, line: api.LineAnswer, rewinds: Sequence[Rewind], lost: list[int]) -> str:
        if self.publisher is not None:
            self.publisher.epoch = line.epoch
            is_off = partial(is_void, rewinds=rewinds)
            lost = lost + self.publisher.origin.take_up(line.epoch, is_off, ledger_head=line.ledger_head)
        if lost:
            last = line.rewinds[-1]
            self.report(
                f"the run was returned to version {last.version}: versions up to {last.newest_before} are void,"
                f" {last.lost_steps} steps are trained again ({last.reason})"
            )
        return ""

    def _train(self) -> bool:
        self.take_up()
        resumed = self.trainer.resume()
        self.report(f"resumed at step {self.trainer.step}" if resumed else "found no checkpoint, starting at step 0")
        self._test_repetition()
        record: StepRecord | None = None
        while True:
            publishing = self.publish(record)
            if self.finished:
                self._finish(publishing)
                return True
            if self.trainer.step % self.config.training.checkpoint_every == 0:
                self._save(publishing)
            try:
                record = self.step()
            except DrainedError:
                self._save(publishing)
                return False
            except DivergedError as error:
                self._return_to_checkpoint(error)
                record = None

    def _test_repetition(self) -> None:
        """Says at start what a crash may cost, not after it."""
        repeats = steps_repeat(self.trainer)
        self.metrics.event("self_test", steps_repeat=repeats)
        if not repeats:
            self.report(
                "steps do not repeat bit for bit on this machine: a trainer that dies between publishing a version and writing"
                " its checkpoint has to return the run to the last checkpoint; `shoal train --auto-rewind` does so by itself"
            )

    def _return_to_checkpoint(self, error: DivergedError) -> None:
        """Has the batch recalled and audited, and undoes it as a restart would; raises the error if no audit can help."""
        step, batch = self.trainer.step, self._batch
        self.report(f"step {step} diverges: {error.message}")
        if batch is None or not recall(self.client, self.trainer.world, batch, error.message):
            raise error
        self.metrics.event("recalled", step=step, attempt=batch.attempt, reason=error.message)
        if not self.trainer.resume():
            raise error
        self.report(
            f"returned to the checkpoint of step {self.trainer.step}; the batch of step {step} is being audited"
        )

    def _save(self, publishing: Publishing | None) -> None:
        """The checkpoint appears once the version of the same number is recorded."""
        self.trainer.save(publishing.is_recorded if publishing is not None else always)

    def _finish(self, publishing: Publishing | None) -> None:
        """The last version is on disk before it is announced, because the end of a run is when its processes are stopped."""
        self._save(publishing)
        self.trainer.close()
        if publishing is not None:
            publishing.release()
        act_as_one(self.trainer.world, self._wait_for_publisher)

    def step(self) -> StepRecord:
        """One training step, not yet published."""
        started = self._clock()
        batch = self.wait_for_batch(self.trainer.step)
        waited = self._clock()
        groups = list(self.fetch_groups(batch))
        fetched = self._clock()
        screening = Screening(self.client, self.trainer.world, batch, self.fetch_groups)
        try:
            report = self._train_on(groups, screening)
        finally:
            self._batch = screening.batch
        self.metrics.count("step")
        self._watch_guard(report)
        return StepRecord(report, screening.batch, wait_batch_s=waited - started, fetch_s=fetched - waited)

    def _watch_guard(self, report: StepReport) -> None:
        """Without an audited group nobody can tell how far the swarm lags behind: said when it begins and when it ends."""
        is_off = bool(report.samples) and report.kl_behaviour is None
        if is_off and not self._guard_is_off:
            self.report(
                f"step {report.step}: no group of the batch was audited, so training.kl_limit cannot guard against lag;"
                " raise trust.audit_floor if this stays so"
            )
            self.metrics.event("guard_off", step=report.step)
        elif self._guard_is_off and not is_off and report.samples:
            self.report(f"step {report.step}: audited groups are back, training.kl_limit guards against lag again")
        if report.samples:
            self._guard_is_off = is_off

    def _train_on(self, groups: list[Group], screening: Screening) -> StepReport:
        """The oversampling cap may be reached without a group that has a signal; then the version is published unchanged."""
        if groups:
            return self.trainer.train_step(groups, screening)
        screening([])
        return self.trainer.skip_step()

    def wait_for_batch(self, step: int) -> api.BatchRecord:
        """The durable batch of a step. Waits as long as the run lives; says every few seconds what is missing."""
        while True:
            answer = ask_as_one(self.trainer.world, api.BatchAnswer, lambda: self._ask_for_batch(step))
            if answer.batch is not None:
                return answer.batch
            if answer.run_state == "drained":
                raise DrainedError(f"The run is drained; step {step} gets no batch.")
            self.report(f"step {step} waits for {answer.waiting_for}")

    def _ask_for_batch(self, step: int) -> api.BatchAnswer:
        if self.publisher is not None:
            self.publisher.check()  # without the last version there may never be a batch
        return self.client.batch(step, BATCH_WAIT_S, self.trainer.epoch)

    def fetch_groups(self, batch: api.BatchRecord) -> Iterator[Group]:
        """The groups of a batch, from files whose bytes are hashed again, with the validator's rewards."""
        limits = RolloutLimits.of(self.descriptor)
        files: dict[str, list[Rollout]] = {}
        for record in batch.groups:
            if record.submission_id not in files:
                fetch = partial(self.client.submission_file, record.submission_id, record.digest)
                data = fetch_for_node(self.trainer.world, fetch)
                files[record.submission_id] = read_rollouts(data, limits)[1]
            rows = [rollout for rollout in files[record.submission_id] if rollout.group == record.group]
            if len(rows) != len(record.rewards):
                raise IntegrityError(
                    f"Group {record.group_id} has {len(rows)} samples, its verdict {len(record.rewards)}."
                )
            yield Group(record.group_id, [_sample(row, record, index) for index, row in enumerate(rows)])

    def publish(self, record: StepRecord | None = None) -> Publishing | None:
        """Hands a snapshot of the current weights to the publisher, which had to finish the version before.

        `record` is of the step that made the version. None where this rank publishes nothing.
        """
        started, version = self._clock(), self.trainer.step
        act_as_one(self.trainer.world, self._wait_for_publisher)
        is_wanted = self.publisher is not None and not self.publisher.has_passed(version)
        if not self.trainer.world.any(is_wanted):
            return None
        snapshot = self.trainer.snapshot()  # every rank takes part in gathering
        if self.publisher is None:
            return None
        metrics = record.metrics() if record else {}
        handed_over = Version(version, snapshot, metrics, self._clock() - started)
        return self.publisher.start(handed_over, held=self.finished)

    def _wait_for_publisher(self) -> str:
        if self.publisher is not None:
            self.publisher.wait()
        return ""

    @property
    def finished(self) -> bool:
        """Whether the weights are those of the last version."""
        return self.trainer.step >= self.config.run.steps

    def _log(self, published: Published) -> None:
        """To trackers, event log and operator; called by the publisher's thread."""
        publication, version = published.publication, published.version
        times = {
            "time_standstill_s": version.standstill_s,
            "time_stage_s": published.stage_s,
            "time_announce_s": published.announce_s,
        }
        if version.metrics and self.trackers is not None:
            sizes = {"weights_bytes": publication.weights_bytes}
            self.trackers.log(version.number - 1, {**version.metrics, **times, **sizes})
        self.metrics.event(
            "published",
            version=publication.version,
            kind=publication.kind,
            bytes_total=publication.follow_bytes,
            weights_bytes=publication.weights_bytes,
            files_collected=published.files_collected,
            **{name: round(seconds, 4) for name, seconds in times.items()},
        )
        self.report(_published_sentence(publication, version.metrics))


def _published_sentence(publication: Publication, metrics: Mapping[str, Any]) -> str:
    reward = metrics.get("task_reward_mean")
    detail = f", task reward {reward:.3f}" if reward is not None else ""
    sent = size(publication.follow_bytes)
    if publication.follow_bytes < publication.weights_bytes:
        sent += f" instead of {size(publication.weights_bytes)}, {publication.ratio:.0f}x less"
    return f"published version {publication.version} ({sent}){detail}"


def _sample(row: Rollout, record: api.BatchGroup, index: int) -> Sample:
    return Sample(
        prompt_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        reward=record.rewards[index],
        task_reward=record.task_rewards[index],
        behaviour_logprobs=row.output_logprobs if record.logprobs_verified else None,
        policy_version=record.policy_version,
        truncated=row.finish_reason in TRUNCATED,
        segment_lengths=row.segment_lengths,
    )
