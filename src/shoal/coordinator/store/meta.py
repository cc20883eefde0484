"""Facts of which a run has one: its id, its start, what its owner wants, the trainer's oldest checkpoint."""

from typing import Literal

from shoal.coordinator.store.database import Connection

Name = Literal["run_id", "started_at", "run_state", "oldest_checkpoint"]


def read(connection: Connection, name: Name) -> str | None:
    row = connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
    return None if row is None else str(row["value"])


def write(connection: Connection, name: Name, value: str) -> None:
    connection.execute(
        "INSERT INTO meta (name, value) VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value=excluded.value",
        (name, value),
    )
