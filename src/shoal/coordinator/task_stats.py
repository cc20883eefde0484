"""What the run learns about its tasks: how often each was drawn, solved, and taught something.

One row per task that was drawn, counted in the transaction of the verdict. What people see is the distribution: tasks never
or always solved cost samples, give no signal, and show that the band of the curated set should move.
"""

from shoal.coordinator.store.database import Connection
from shoal.protocol import api
from shoal.protocol.verdicts import SOLVED

NEVER, ALWAYS = "never", "always"
_BUCKET = "CASE WHEN solved=0 THEN -1 WHEN solved=samples THEN 10 ELSE (10*solved)/samples END"


def count_group(connection: Connection, group: api.GroupVerdict) -> None:
    connection.execute(
        "INSERT INTO task_stats VALUES (?,1,?,?,?) ON CONFLICT (task_id) DO UPDATE SET groups=task_stats.groups+1,"
        " samples=task_stats.samples+excluded.samples, solved=task_stats.solved+excluded.solved,"
        " useful=task_stats.useful+excluded.useful",
        (
            group.task_id,
            len(group.task_rewards),
            sum(reward >= SOLVED for reward in group.task_rewards),
            int(group.useful),
        ),
    )


def statistics(connection: Connection) -> api.TaskStatistics:
    rows = connection.execute(
        f"SELECT {_BUCKET} AS bucket, COUNT(*) AS tasks, SUM(groups) AS groups, SUM(samples) AS samples,"
        " SUM(solved) AS solved, SUM(useful) AS useful FROM task_stats GROUP BY bucket ORDER BY bucket"
    ).fetchall()
    totals = {name: sum(int(row[name]) for row in rows) for name in ("tasks", "groups", "samples", "solved", "useful")}
    return api.TaskStatistics(**totals, by_solve_rate={_label(int(row["bucket"])): int(row["tasks"]) for row in rows})


def _label(bucket: int) -> str:
    named = {-1: NEVER, 10: ALWAYS}
    return named.get(bucket, f"{10 * bucket}–{10 * bucket + 10} %")
