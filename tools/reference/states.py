"""The diagrams of docs/design/coordinator.md, drawn from the coordinator's state machines."""

from shoal.coordinator.states import GROUP, LEASE, SLOT, SUBMISSION, mermaid


def diagrams() -> str:
    drawn = {"Slot": mermaid(SLOT), "Lease": mermaid(LEASE), "Submission": mermaid(SUBMISSION), "Group": mermaid(GROUP)}
    parts = [f"### {name}\n\n```mermaid\n{text}\n```" for name, text in drawn.items()]
    return "\n" + "\n\n".join(parts) + "\n"
