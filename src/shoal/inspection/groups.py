"""The completions of one group for the owner's page: texts, tokens with their log-probabilities, and why a reward was given.

Tokenizer and tasks of the run are loaded at the first use. What is missing (a file that was removed, tasks that this release does
not have) is said in words; nothing here may stop the process that serves the page.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import zip_longest

from shoal.coordinator.page.rollouts import GroupText
from shoal.errors import RefusedError, ShoalError
from shoal.inspection.records import why_rewarded
from shoal.inspection.sources import Recording, codec_of_run
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.page_views import AuditTrace, OwnerCompletion, OwnerToken, OwnerTurn, TraceRow
from shoal.protocol.rollouts import Rollout, RolloutLimits, read_rollouts
from shoal.rundir import RunDirectory
from shoal.tasks import TextCodec
from shoal.tasks.workload import Workload

log = logging.getLogger(__name__)

INCOMPLETE = "\ufffd"
CLAIMED = "Log-probabilities are the worker's claims."
AUDITED = "Margins are those of the audit; entropies are recorded for the first audited group."
UNAUDITED = "This group was not audited, so margins and entropies are not known."
MOST_TOKENS = 20_000
"""Of one completion; a browser shows no more."""


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
        return read_rollouts(data, RolloutLimits.of(self._descriptor))[1]

    def _completion(self, row: Rollout, seen: TraceRow | None) -> OwnerCompletion:
        return OwnerCompletion(
            sample=row.sample,
            reward=row.reward,
            task_reward=row.task_reward,
            reward_from="worker",
            why=self._why(row),
            length=len(row.output_tokens),
            target_length=row.target_length,
            finish_reason=row.finish_reason,
            turns=[
                OwnerTurn(speaker="prompt", text=self._codec.decode(row.input_tokens), tokens=[]),
                OwnerTurn(speaker="policy", text=self._codec.decode(row.output_tokens), tokens=self._tokens(row, seen)),
            ],
        )

    def _tokens(self, row: Rollout, seen: TraceRow | None) -> list[OwnerToken]:
        pieces = token_pieces(self._codec.decode, row.output_tokens[:MOST_TOKENS])
        margins, entropies = (seen.margins, seen.entropies) if seen is not None else ([], [])
        return [
            OwnerToken(text=piece, logprob=logprob, margin=margin, entropy=entropy)
            for piece, logprob, margin, entropy in zip_longest(pieces, row.output_logprobs, margins, entropies)
            if piece is not None
        ]

    def _why(self, row: Rollout) -> str:
        try:
            return self._reason(row)
        except (ShoalError, OSError, ValueError) as error:
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


def token_pieces(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. A character of several tokens appears with the last of them."""
    pieces, context, shown = list[str](), 0, 0
    for end in range(1, len(tokens) + 1):
        before, text = decode(tokens[context:shown]), decode(tokens[context:end])
        is_whole = not text.endswith(INCOMPLETE) or end == len(tokens)
        if len(text) > len(before) and is_whole:
            pieces.append(text[len(before) :])
            context, shown = shown, end
        else:
            pieces.append("")
    return pieces
