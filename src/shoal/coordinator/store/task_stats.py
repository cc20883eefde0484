"""Statistics of the run's tasks: how often each was sampled, solved, and gave a useful group.

One row per task that was sampled, counted in the transaction of the verdict. The status shows the distribution: tasks never
or always solved cost samples, give no signal, and show that the band of the curated set should move.
"""

from dataclasses import dataclass

from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query
from shoal.protocol import api
from shoal.protocol.verdicts import SOLVED

NEVER, ALWAYS = "never", "always"
_BUCKET = "CASE WHEN solved=0 THEN -1 WHEN solved=samples THEN 10 ELSE (10*solved)/samples END"


@dataclass(frozen=True)
class _Bucket:
    bucket: int
    tasks: int
    groups: int
    samples: int
    solved: int
    useful: int


def count_group(connection: Connection, group: api.GroupVerdict) -> None:
    connection.execute(
        "INSERT INTO task_stats (task_id, groups, samples, solved, useful) VALUES (?,1,?,?,?)"
        " ON CONFLICT (task_id) DO UPDATE SET groups=task_stats.groups+1,"
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
    rows = query(
        connection,
        _Bucket,
        f"SELECT {_BUCKET} AS bucket, COUNT(*) AS tasks, SUM(groups) AS groups, SUM(samples) AS samples,"
        " SUM(solved) AS solved, SUM(useful) AS useful FROM task_stats GROUP BY bucket ORDER BY bucket",
    )
    return api.TaskStatistics(
        tasks=sum(row.tasks for row in rows),
        groups=sum(int(row.groups) for row in rows),
        samples=sum(int(row.samples) for row in rows),
        solved=sum(int(row.solved) for row in rows),
        useful=sum(int(row.useful) for row in rows),
        by_solve_rate={_label(row.bucket): row.tasks for row in rows},
    )


def _label(bucket: int) -> str:
    named = {-1: NEVER, 10: ALWAYS}
    return named.get(bucket, f"{10 * bucket}–{10 * bucket + 10} %")
