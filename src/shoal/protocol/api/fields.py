"""Types that bodies share. Requests forbid unknown fields and bound every length; answers tolerate unknown fields."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.files import Digest

PublicKey = Digest
ClientId = Annotated[str, Field(pattern=r"^[0-9a-zA-Z_-]{8,64}$")]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
SAMPLE_DIGEST_CHARS = 16
SampleDigest = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{SAMPLE_DIGEST_CHARS}}}$")]
ShortText = Annotated[
    str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]*$")
]
"""Shown on terminals and pages, so it holds no control characters, and none that turn the direction of what follows."""
Metric = Annotated[float, Field(allow_inf_nan=True)] | int | str | None
"""A metric of a training step. JSON has no NaN: one that is not a number travels as null."""
WorkerState = Literal["registered", "probation", "active", "suspect", "quarantined", "gone", "banned"]
OwnerState = Literal["running", "paused", "draining"]
"""What the owner asks a run to be."""
RunState = Literal["running", "paused", "draining", "drained", "finished"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class Refusal(Answer):
    code: str
    message: str
    hint: str = ""
    permanent: bool = False
    """Whether the same request would be refused again."""
