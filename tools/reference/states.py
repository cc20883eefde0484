"""The diagrams of docs/design/coordinator.md, drawn from the coordinator's state machines."""

from enum import StrEnum

from shoal.coordinator import states
from shoal.coordinator.states import mermaid
from tools.reference.text import wrapped


def diagrams() -> str:
    sections = [
        _section("Slot", states.SlotState, mermaid(states.SLOT)),
        _section("Lease", states.LeaseState, mermaid(states.LEASE)),
        _section("Submission", states.SubmissionState, mermaid(states.SUBMISSION)),
        _section("Group", states.GroupState, mermaid(states.GROUP)),
    ]
    return "\n" + "\n\n".join(sections) + "\n"


def _section(title: str, kind: type[StrEnum], diagram: str) -> str:
    return f"### {title}\n\n{wrapped(kind.__doc__ or '')}\n\n```mermaid\n{diagram}\n```"
