"""The diagrams of the coordinator's state machines and of trust, drawn from the code that runs."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import product

from shoal.config import TrustConfig
from shoal.coordinator import states
from shoal.coordinator.rules import trust
from shoal.coordinator.rules.trust import TrustEvent, TrustRecord
from shoal.coordinator.states import mermaid
from tools.reference.text import wrapped


def diagrams() -> str:
    sections = [
        _section("Slot", states.SlotState, mermaid(states.SLOT)),
        _section("Lease", states.LeaseState, mermaid(states.LEASE)),
        _section("Submission", states.SubmissionState, mermaid(states.SUBMISSION)),
        _section("Group", states.GroupState, mermaid(states.GROUP)),
        _section("Batch", states.BatchState, mermaid(states.BATCH)),
    ]
    return "\n" + "\n\n".join(sections) + "\n"


def _section(title: str, kind: type[StrEnum], diagram: str) -> str:
    return f"### {title}\n\n{wrapped(kind.__doc__ or '')}\n\n```mermaid\n{diagram}\n```"


TRUST_CAUSES: dict[TrustEvent, str] = {
    "asked": "asks for its first lease",
    "clean_audit": "clean audits",
    "anomaly": "anomaly",
    "proof": "proof or drift",
    "unbanned": "unbanned by the owner",
}
"""Events of the diagram; silence and return are described beside it."""


def trust_diagram() -> str:
    """Every change of trust state that the rule makes, found by trying each event on each record."""
    found: dict[tuple[str, str], str] = {}
    for record, (event, cause) in product(_trust_records(), TRUST_CAUSES.items()):
        new = trust.after(record, event, TrustConfig())
        has_sent_work = record.state != "registered"
        if new.state != record.state and (has_sent_work or event == "asked"):
            found.setdefault((record.state, new.state), cause)
    lines = [f"    {before} --> {after}: {cause}" for (before, after), cause in found.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> registered", *lines, "```"])


def _trust_records() -> Iterator[TrustRecord]:
    """Records that can occur: the state is the one that the record has earned, or one that overrides it."""
    for anomalies, clean in product(range(5), range(TrustConfig().probation_audits + 1)):
        made = TrustRecord("probation", clean, anomalies)
        yield TrustRecord(trust.earned_state(made, TrustConfig()), clean, anomalies)
    yield from (TrustRecord("registered"), TrustRecord("banned"))
