"""The state machines, and that nothing leaves them."""

from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.states import (
    DROPPED,
    FILLING,
    HOLDING,
    MACHINES,
    SLOT,
    UNDECIDED,
    BatchState,
    GroupState,
    LeaseState,
    Machine,
    SlotState,
    SubmissionState,
    TransitionError,
    mermaid,
    one_of,
)

PAGE = Path(__file__).parents[2] / "docs/design/coordinator.md"
KINDS: dict[str, type[StrEnum]] = {
    "slot": SlotState,
    "lease": LeaseState,
    "submission": SubmissionState,
    "group": GroupState,
    "batch": BatchState,
}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
class TestMachine:
    def test_every_state_is_reached_from_a_beginning(self, machine: Machine[Any]) -> None:
        reached = set(machine.initial)
        for _ in machine.states():
            reached |= {after for before, after in machine.transitions if before in reached}
        assert reached == machine.states() == set(KINDS[machine.name])

    def test_only_its_own_transitions_are_legal(self, machine: Machine[Any]) -> None:
        for before, after in product(KINDS[machine.name], repeat=2):
            if (before, after) in machine.transitions:
                machine.require(before, after)
            else:
                with pytest.raises(TransitionError, match=f"from {before} to {after}"):
                    machine.require(before, after)

    def test_a_row_begins_in_an_initial_state_only(self, machine: Machine[Any]) -> None:
        for state in KINDS[machine.name]:
            if state in machine.initial:
                machine.require_initial(state)
            else:
                with pytest.raises(TransitionError, match=f"begin as {state}"):
                    machine.require_initial(state)

    def test_no_state_leads_to_itself(self, machine: Machine[Any]) -> None:
        assert all(before != after for before, after in machine.transitions)

    def test_its_diagram_has_every_transition_and_no_other(self, machine: Machine[Any]) -> None:
        lines = mermaid(machine).splitlines()
        assert lines[0] == "stateDiagram-v2"
        arrows = [line.strip().split(": ")[0] for line in lines[1:]]
        assert sorted(arrows) == sorted(
            [
                *(f"[*] --> {state}" for state in machine.initial),
                *(f"{before} --> {after}" for before, after in machine.transitions),
                *(f"{state} --> [*]" for state in machine.final()),
            ]
        )

    def test_the_docs_show_this_diagram(self, machine: Machine[Any]) -> None:
        assert f"```mermaid\n{mermaid(machine)}\n```" in PAGE.read_text()


def test_a_consumed_group_and_a_closed_slot_stay_what_they_are() -> None:
    assert SLOT.final() == {SlotState.CLOSED, SlotState.VOID}
    with pytest.raises(TransitionError):
        SLOT.require(SlotState.CLOSED, SlotState.LEASED)


def test_named_sets_of_states_are_written_as_sql() -> None:
    assert one_of(*FILLING) == one_of(*HOLDING) == "('leased','submitted')"
    assert one_of(*DROPPED) == "('returned','expired','abandoned')"
    assert one_of(*UNDECIDED) == "('pending','claimed')"
