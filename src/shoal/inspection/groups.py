"""The completions of one group for the owner's page: texts, tokens with their log-probabilities, and why a reward was given.

Tokenizer and tasks of the run are loaded at the first use. What is missing (a file that was removed or is no rollout file, tasks
that this release does not have) is said in words; nothing here may stop the process that serves the page.
"""

import logging
import threading
from collections.abc import Sequence
from functools import cached_property

from shoal.coordinator.page.rollouts import GroupText
from shoal.errors import IntegrityError, RefusedError, ShoalError
from shoal.inspection.records import why_rewarded
from shoal.inspection.sources import Recording, codec_of_run
from shoal.inspection.turns import Segment, TokenValues, conversation, segments
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.page_views import AuditTrace, OwnerCompletion, TraceRow
from shoal.protocol.rollouts import Rollout, RolloutLimits, read_rollouts
from shoal.rundir import RunDirectory
from shoal.tasks import TextCodec
from shoal.tasks.workload import Workload

log = logging.getLogger(__name__)

CLAIMED = "Log-probabilities are the worker's claims."
AUDITED = "Margins are those of the audit; entropies are recorded for the first audited group."
UNAUDITED = "This group was not audited, so margins and entropies are not known."


class GroupReader:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._lock = directory, threading.Lock()

    def read(self, submission_id: str, number: int) -> GroupText:
        path = self._directory.submissions / f"{submission_id}.parquet"
        try:
            data = path.read_bytes()
        except OSError:
            hint = "coordinator.keep_rollouts_s says how long files are kept; those in a bucket are not shown."
            raise RefusedError(
                "unknown_submission", "The rollout file is no longer here.", hint=hint, status=404
            ) from None
        with self._lock:  # verifiers and tokenizers are not made for two threads
            rows = [row for row in self._rollouts(data) if row.group == number]
            if not rows:
                raise RefusedError("unknown_group", "The file has no such group.", status=404)
            seen = self._traced(submission_id, number)
            overlay = f"{CLAIMED} {AUDITED if seen else UNAUDITED}"
            return GroupText(rows[0].task_id, [self._completion(row, seen.get(row.sample)) for row in rows], overlay)

    def _traced(self, submission_id: str, number: int) -> dict[int, TraceRow]:
        """What the audit of this group saw, by sample."""
        try:
            data = (self._directory.submissions / f"{submission_id}.trace").read_bytes()
            trace = AuditTrace.model_validate_json(data)
        except (OSError, ValueError):
            return {}
        return {row.sample: row for row in trace.rows if row.group == number}

    def _rollouts(self, data: bytes) -> list[Rollout]:
        try:
            return read_rollouts(data, RolloutLimits.of(self._descriptor))[1]
        except IntegrityError as error:  # a worker may upload anything
            raise RefusedError(
                "unknown_group", f"The file holds no rollouts of this run: {error}", status=404
            ) from None

    def _completion(self, row: Rollout, seen: TraceRow | None) -> OwnerCompletion:
        parts = segments_of(row)
        values = (
            TokenValues(row.output_logprobs, seen.margins, seen.entropies) if seen else TokenValues(row.output_logprobs)
        )
        return OwnerCompletion(
            sample=row.sample,
            reward=row.reward,
            task_reward=row.task_reward,
            reward_from="worker",
            why=self._why(row),
            length=sum(len(part.tokens) for part in parts if part.role == "sampled"),
            target_length=row.target_length,
            finish_reason=row.finish_reason,
            turns=conversation(self._decode, row.input_tokens, parts, values),
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._codec.decode([token for token in tokens if token >= 0])

    def _why(self, row: Rollout) -> str:
        try:
            return self._reason(row)
        except (ShoalError, OSError, ValueError, OverflowError) as error:
            log.info("no reason for %s: %s", row.task_id, error)
            return ""

    def _reason(self, row: Rollout) -> str:
        return why_rewarded(row, self._workload) if self._workload is not None else ""

    @cached_property
    def _descriptor(self) -> RunDescriptor:
        return self._directory.descriptor()

    @cached_property
    def _codec(self) -> TextCodec:
        return codec_of_run(self._directory.root, self._descriptor)

    @cached_property
    def _workload(self) -> Workload | None:
        return Recording([], self._codec, self._descriptor, self._directory, self._directory.root).workload()


def segments_of(row: Rollout) -> list[Segment]:
    """By the lengths that the row names."""
    return segments(row.output_tokens, row.segment_lengths)
