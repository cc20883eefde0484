"""What the trainer consumes: groups of validated completions of one task.

Rewards come from the validator; advantages are computed here and never accepted from outside. Behaviour log-probabilities
are present only where a validator computed them; `None` means that they were never verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.errors import ShoalError
from shoal.protocol.segments import sampled_count, sampled_values, segment_complaint


class BatchError(ShoalError):
    """A batch that cannot be trained on."""

    code = "bad_batch"
    permanent = False


@dataclass
class Sample:
    """One completion. `output_tokens` ends with EOS unless `truncated`. Only tokens of sampled segments are trained."""

    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    reward: float
    task_reward: float
    behaviour_logprobs: Sequence[float] | None = None
    """Of sampled tokens."""
    policy_version: int = 0
    truncated: bool = False
    segment_lengths: Sequence[int] = ()
    """Without any, all output tokens are one sampled segment."""

    @property
    def lengths(self) -> Sequence[int]:
        return self.segment_lengths or (len(self.output_tokens),)

    @property
    def sampled_count(self) -> int:
        return sampled_count(self.lengths)

    @property
    def sampled_tokens(self) -> Sequence[int]:
        return sampled_values(self.output_tokens, self.lengths)


@dataclass
class Group:
    """All completions of one task in one slot; they are compared with each other."""

    group_id: str
    samples: list[Sample] = field(default_factory=list)


def check_groups(groups: Sequence[Group]) -> None:
    """Refuse what would silently train on nonsense."""
    if not groups:
        raise BatchError("The batch holds no groups.", hint="Wait for accepted rollouts before training.")
    for group in groups:
        for number, sample in enumerate(group.samples):
            where = f"Sample {number} of group {group.group_id}"
            if not sample.prompt_tokens or not sample.output_tokens:
                raise BatchError(f"{where} has an empty prompt or an empty completion.")
            if complaint := segment_complaint(sample.lengths, len(sample.output_tokens)):
                raise BatchError(f"{where} {complaint}.")
            logprobs = sample.behaviour_logprobs
            if logprobs is not None and len(logprobs) != sample.sampled_count:
                raise BatchError(f"{where} has {len(logprobs)} log-probabilities for {sample.sampled_count} tokens.")
