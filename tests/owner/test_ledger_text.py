"""The ledger in words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import shoal.coordinator
from shoal.coordinator.ledger import Entry
from shoal.owner.ledger_text import SENTENCES, ledger_lines, sentence

ANN = "ab" * 32
STEP = {"epoch": 1, "step": 2, "attempt": 0}
APPEND = re.compile(r"append\(\s*connection,\s*run\.keypair,\s*[\w.()]+,\s*\"(\w+)\"")


def entry(kind: str, seq: int = 0, **body: Any) -> Entry:
    return Entry(seq, 1_700_000_000.0, kind, json.dumps(body), "", "", "")


def verdict(accepted: bool, audited: list[int]) -> dict[str, Any]:
    return {"worker": ANN, "step": 3, "slot": 5, "accepted": accepted, "groups": 4, "audit_drawn": audited}


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("run", {"run_id": "demo-1", "run_key": "k", "secret_commitment": "c"}, "run demo-1 begins"),
        ("registered", {"worker": ANN, "name": "ann", "numerics_class": "torch/bf16/cpu"}, "joins with torch/bf16/cpu"),
        ("verdict", verdict(True, [0, 3]), "ann (abababababab…) step 3 slot 5 is accepted, 2 of 4 groups audited"),
        ("verdict", verdict(False, []), "step 3 slot 5 is rejected (see its verdict), not audited"),
        ("credit", {"worker": ANN, "held": 20, "released": 30}, "credit for 50 tokens (20 held as stake, 30 released)"),
        ("slash", {"worker": ANN, "held": -20, "slashed": 20}, "loses its stake of 20 tokens"),
        ("ban", {"worker": ANN, "reason": "reward"}, "ann (abababababab…) is banned: reward"),
        ("unban", {"worker": ANN, "reason": "a mistake"}, "may work again: a mistake"),
        ("commitment", STEP | {"commitment": "cd" * 32}, "the secret of step 2 (epoch 1) is fixed: cdcdcdcdcdcd…"),
        ("recorded", {"step": 2, "groups": ["a", "b"], "step_secret": "00"}, "step 2 has its batch: 2 groups"),
        ("version", {"version": 4, "weights": "cd" * 32}, "version 4 is published, weights cdcdcdcdcdcd…"),
        ("run_state", {"state": "paused"}, "the owner sets the run to paused"),
        ("quarantine", {"submission": "ef" * 16, "why": "crashed"}, "submission efefefefefef is quarantined: crashed"),
        ("comet", {"worker": ANN, "tail": 3}, "ann (abababababab…) comet: tail 3"),
        ("version", {"number": 4}, "version: number 4"),
    ],
)
def test_every_kind_of_entry_is_a_sentence(kind: str, body: dict[str, Any], words: str) -> None:
    assert words in sentence(entry(kind, **body), {ANN: "ann"})


def test_names_come_from_registrations_and_cannot_fake_lines() -> None:
    entries = [
        entry("registered", 0, worker=ANN, name="ann\n     9  bob is banned", numerics_class="t"),
        entry("credit", 1, worker=ANN, held=5, released=0, submission="s"),
    ]
    lines = list(ledger_lines(entries))
    assert len(lines) == 4
    assert lines[0].startswith("     0  2023-11-14 22:13:20  ann")
    assert lines[2] == "balances, in tokens:"
    assert lines[3].endswith(": 5 held, 0 released, 0 slashed")
    assert all("\n" not in line for line in lines)


def test_there_is_a_sentence_for_everything_that_the_coordinator_records() -> None:
    source = "".join(path.read_text() for path in Path(shoal.coordinator.__file__).parent.rglob("*.py"))
    recorded = set(APPEND.findall(source))
    assert len(recorded) >= 8
    assert recorded <= set(SENTENCES)
