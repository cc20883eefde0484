"""What a run says of an environment that its episodes meet: its code, its runtime, its limits, and how it is replayed.

Signed with the descriptor, so that worker and validator run the same thing or refuse to.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.files import Digest

Replay = Literal["exact", "tolerant"]
Role = Literal["user", "tool"]


class EnvironmentLimits(BaseModel):
    model_config = ConfigDict(frozen=True)
    max_turns: Annotated[int, Field(ge=1, le=1024)] = 8
    """Segments that the policy samples in one episode, at most."""
    turn_tokens: Annotated[int, Field(ge=1)] = 1 << 20
    """Of one turn; what the completion has left is a limit too."""
    observation_tokens: Annotated[int, Field(ge=1)] = 256
    """What an observation has beyond them is cut."""
    step_s: Annotated[int, Field(ge=1, le=600)] = 5
    """Processor seconds of one call; a validator grants three times as much."""


class EnvironmentReference(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: Annotated[str, Field(max_length=200)]
    """A built-in one, or `module:Class` of the owner."""
    replay: Replay
    """`exact`: every honest machine sees the same; `tolerant`: limits may decide otherwise elsewhere."""
    role: Role
    """Whose turn an observation is in the chat template."""
    opens: bool
    """Whether the prompt ends with what `reset` says."""
    code_digest: Digest
    runtime: Annotated[str, Field(max_length=2000)]
    """Python and the packages that its results depend on."""
    limits: EnvironmentLimits
    tools: tuple[dict[str, Any], ...] = ()
    """As the chat template takes them."""


def longest_row(references: "tuple[EnvironmentReference, ...]") -> int:
    """Segments that a completion of the run has, at most."""
    return max((2 * reference.limits.max_turns - 1 for reference in references), default=1)
