"""What workers and relays keep: compact, durable, and never silently contradicted."""

from itertools import pairwise
from pathlib import Path

import pytest

from shoal.protocol.evidence import HEADS_FILE, RECEIPTS_FILE, LedgerHead, Receipt, open_evidence, seal
from shoal.protocol.evidence_store import CONFLICTS_FILE, MAX_HEADS, KeptHeads, Receipts
from support.samples import keypair

COORDINATOR, ANN = keypair("coordinator"), keypair("ann")


def head(entries: int, digest: str = "", at: float = 0.0, by: str = "coordinator", run_id: str = "run-1") -> str:
    evidence = LedgerHead(run_id=run_id, at=at or 1000.0 + entries, entries=entries, head=digest or f"{entries:064x}")
    return seal(evidence, keypair(by))


def receipt(**changes: object) -> str:
    facts = {
        "run_id": "run-1", "at": 1.0, "entries": 3, "head": "ab" * 32, "worker": ANN.public, "lease": "lease",
        "epoch": 0, "step": 1, "attempt": 0, "slot": 2, "file": "cd" * 32,
    }  # fmt: skip
    return seal(Receipt.model_validate(facts | changes), COORDINATOR)


def heads_in(root: Path) -> KeptHeads:
    return KeptHeads(root, "run-1", COORDINATOR.public, clock=lambda: 0.0)


def test_heads_survive_a_restart_and_a_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    heads = heads_in(tmp_path)
    assert [heads.keep(head(1)), heads.keep(head(2))] == ["", ""]
    heads.save()
    with (tmp_path / HEADS_FILE).open("a") as file:
        file.write('{"kind": "led')
    again = heads_in(tmp_path)
    assert again.newest == head(2)
    assert again.keep(head(2)) == "", "nothing new"


def test_however_long_a_run_lasts_the_file_stays_small_and_spans_it(tmp_path: Path) -> None:
    heads = heads_in(tmp_path)
    for entries in range(1, 2000):
        assert heads.keep(head(entries)) == ""
    heads.save()
    lines = (tmp_path / HEADS_FILE).read_text().splitlines()
    kept = [open_evidence(LedgerHead, line, COORDINATOR.public).entries for line in lines]
    assert len(kept) <= MAX_HEADS
    assert (kept[0], kept[-1]) == (1, 1999)
    assert kept[-64:] == list(range(1936, 2000))
    assert max(later - earlier for earlier, later in pairwise(kept)) < 100


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (head(5, "ef" * 32, at=2000.0), "two different heads of 5 entries"),
        (head(4, at=2000.0), "became shorter: it had 5 entries and now has 4"),
    ],
)
def test_a_head_that_does_not_extend_the_last_one_is_reported_and_both_are_kept(
    tmp_path: Path, shown: str, words: str
) -> None:
    heads = heads_in(tmp_path)
    heads.keep(head(5))
    assert words in heads.keep(shown)
    assert (tmp_path / CONFLICTS_FILE).read_text().splitlines() == [head(5), shown]


def test_an_older_head_that_comes_late_accuses_nobody(tmp_path: Path) -> None:
    heads = heads_in(tmp_path)
    heads.keep(head(5))
    assert heads.keep(head(4)) == ""
    assert not (tmp_path / CONFLICTS_FILE).exists()


def test_heads_of_others_are_not_kept(tmp_path: Path) -> None:
    heads = heads_in(tmp_path)
    assert "not signed by the coordinator" in heads.keep(head(1, by="mallory"))
    assert "belongs to run run-2" in heads.keep(head(1, run_id="run-2"))
    assert "not signed" in heads.keep("nonsense")
    assert heads.newest == ""


def test_a_receipt_is_kept_only_if_it_is_for_this_file(tmp_path: Path) -> None:
    receipts = Receipts(tmp_path, "run-1", COORDINATOR.public, ANN.public)
    assert receipts.keep(receipt(), "lease", "cd" * 32) == ""
    assert receipts.keep("", "lease", "cd" * 32) == "the coordinator gave no receipt for the upload"
    assert "another file" in receipts.keep(receipt(file="ee" * 32), "lease", "cd" * 32)
    assert "another file" in receipts.keep(receipt(worker="ee" * 32), "lease", "cd" * 32)
    assert "not signed" in receipts.keep(receipt().replace(COORDINATOR.public, ANN.public), "lease", "cd" * 32)
    assert (tmp_path / RECEIPTS_FILE).read_text() == receipt() + "\n"


def test_a_receipt_after_a_kill_begins_a_new_line(tmp_path: Path) -> None:
    (tmp_path / RECEIPTS_FILE).write_text('{"cut": "o')
    Receipts(tmp_path, "run-1", COORDINATOR.public, ANN.public).keep(receipt(), "lease", "cd" * 32)
    assert (tmp_path / RECEIPTS_FILE).read_text().splitlines()[1] == receipt()
