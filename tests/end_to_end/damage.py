"""What must not happen to a swarm, done to the remains of one: each deed with words of the sentence that has to name it."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from end_to_end.chaos import HONEST

Deed = Callable[[Path], None]


@contextmanager
def _store(root: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(root / "run" / "coordinator" / "store.db")
    try:
        with connection:
            yield connection
    finally:
        connection.close()


def _sql(statement: str) -> Deed:
    def change(root: Path) -> None:
        with _store(root) as connection:
            assert connection.execute(statement).rowcount > 0, statement

    return change


def _first_submission(root: Path) -> Path:
    return min((root / "run" / "coordinator" / "submissions").iterdir())


def _leave_a_file(root: Path) -> None:
    (root / "run" / "relay-1" / ".tmp-1-left").touch()


def _change_an_upload(root: Path) -> None:
    path = _first_submission(root)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def _lose_an_upload(root: Path) -> None:
    _first_submission(root).unlink()


def _keep_a_stray_upload(root: Path) -> None:
    _first_submission(root).with_name("stray.parquet").write_bytes(b"?")


def _tell_of_work_that_is_not_there(root: Path) -> None:
    with (root / HONEST[0] / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "submitted", "step": 10_000, "slot": 0}) + "\n")


ONE = "(SELECT group_id FROM groups WHERE state='{}' LIMIT 1)"
DAMAGES: tuple[tuple[str, Deed], ...] = (
    ("a temporary file was left", _leave_a_file),
    ("are not those that were signed", _change_an_upload),
    ("are not those that were signed", _lose_an_upload),
    ("belongs to no submission", _keep_a_stray_upload),
    ("the store does not have it", _tell_of_work_that_is_not_there),
    ("the ledger does not verify", _sql("UPDATE ledger SET body=replace(body, '1', '2') WHERE seq=5")),
    ("the ledger does not verify", _sql("DELETE FROM ledger WHERE seq=7")),
    ("disagree about consumed", _sql(f"UPDATE groups SET state='accepted' WHERE group_id={ONE.format('consumed')}")),
    (
        "disagree about consumed",
        _sql(
            "UPDATE groups SET batch_step=0 WHERE group_id=(SELECT group_id FROM groups WHERE batch_step > 5 LIMIT 1)"
        ),
    ),
    ("of version", _sql(f"UPDATE groups SET policy_version=-9 WHERE group_id={ONE.format('consumed')}")),
    ("groups", _sql(f"DELETE FROM groups WHERE group_id={ONE.format('consumed')}")),
    (
        "although its worker is not banned",
        _sql(f"UPDATE groups SET state='withdrawn' WHERE group_id={ONE.format('consumed')}"),
    ),
    (
        "although it was young enough",
        _sql(f"UPDATE groups SET state='expired', policy_version=10000 WHERE group_id={ONE.format('consumed')}"),
    ),
    ("the verdicts of the store", _sql("UPDATE submissions SET verdict=verdict || ' ' WHERE state='decided'")),
    ("the ledger gives", _sql("UPDATE workers SET credit_held=credit_held + 1")),
    ("with 1 rejections", _sql(f"UPDATE workers SET rejected=1 WHERE name='{HONEST[0]}'")),
    ("counts", _sql("UPDATE tallies SET n=n + 1 WHERE name='resolved' AND step=0")),
    ("does not follow from the recorded batches", _sql("UPDATE versions SET weights_digest='0' WHERE version=0")),
)
