"""The diagrams of docs/design/coordinator.md, drawn from the coordinator's state machines."""

from shoal.coordinator.states import MACHINES, mermaid


def diagrams() -> str:
    parts = [f"### {machine.name.capitalize()}\n\n```mermaid\n{mermaid(machine).strip()}\n```" for machine in MACHINES]
    return "\n" + "\n\n".join(parts) + "\n"
