"""Margins of recorded tokens under a policy: what an audit would see, completion by completion.

The noise of each token follows from the slot's seed, which the owner derives from the run secret. Under the policy version that
a file names, honest margins are rounding noise; under another version they show how far the two policies lie apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.errors import ConfigError
from shoal.inspection.records import Margins, Record
from shoal.protocol.assignment import slot_seed
from shoal.protocol.steps import step_secret
from shoal.rundir import RunDirectory
from shoal.tasks.workload import WorkItem, Workload

NOISE = 1e-3
"""Margins below this are ties between honest machines."""


def add_margins(
    records: Sequence[Record], policy: Path, workload: Workload, directory: RunDirectory | None
) -> list[Record]:
    """Scores the records with the weights in `policy`, a directory of a model or of a PEFT adapter."""
    if directory is None:
        raise ConfigError("Margins need the run's secret.", hint="Inspect the run directory, on the owner's side.")
    from shoal.policy.engine import ScoreRequest
    from shoal.policy.engines import Numerics, policy_engine

    seeds = {_key(record): _seed(record, workload, directory) for record in records}
    engine = policy_engine("torch", policy, workload.codec.eos_token_ids, numerics=Numerics("cpu"))
    requests = [
        ScoreRequest(
            tuple(record.rollout.input_tokens),
            tuple(record.rollout.output_tokens),
            seeds[_key(record)],
            tuple(record.rollout.segment_lengths),
        )
        for record in records
    ]
    scored = engine.score(requests, temperature=workload.descriptor.rollouts.temperature)
    return [
        replace(
            record, margins=Margins(float(row.margins.max()), int((row.margins > NOISE).sum()), row.margins.numel())
        )
        for record, row in zip(records, scored, strict=True)
    ]


def _key(record: Record) -> tuple[int, int, int, int]:
    return record.header.step, record.header.slot, record.rollout.group, record.rollout.sample


def _seed(record: Record, workload: Workload, directory: RunDirectory) -> int:
    seed = slot_seed(step_secret(directory.secret(), record.header.step_id), record.header.slot)
    items: list[WorkItem] = workload.items(seed)
    wanted = (record.rollout.group, record.rollout.sample)
    found = next((item for item in items if (item.group, item.sample) == wanted), None)
    if found is None:
        raise ConfigError(f"The slot of {record.group_id} has no such group and sample.")
    return found.seed
