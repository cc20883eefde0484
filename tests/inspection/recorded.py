"""A run directory with one honest submission in a batch and one that was refused, as roles would have left it."""

from dataclasses import replace
from pathlib import Path

from shoal.config import build_config
from shoal.coordinator import Store
from shoal.coordinator.states import GroupState, SubmissionState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import insert, update
from shoal.coordinator.store.tables import GroupRow, SubmissionRow, WorkerRow
from shoal.files import digest_bytes
from shoal.owner.create import initialise
from shoal.policy import GenerationRequest, TorchEngine
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed
from shoal.protocol.rollouts import Rollout, RolloutHeader, write_rollouts
from shoal.protocol.steps import StepId, step_secret
from shoal.protocol.verdicts import Reason
from shoal.rundir import RunDirectory
from shoal.tasks import TextCodec, load_tasks
from shoal.tasks.workload import Workload
from shoal.worker.submission import as_rollout

STEP, VERSION = 2, 1
HONEST, CHEAT = "ab" * 32, "cd" * 32


def make_run(model: Path, root: Path) -> RunDirectory:
    tree = {
        "run": {"name": "tiny", "dir": root},
        "model": {"path": str(model)},
        "tasks": {"count": 20, "heldout": 4},
        "rollouts": {"group_size": 2, "tasks_per_slot": 2, "max_new_tokens": 6},
        "reward": {"target_lengths": [4], "length_alpha": 0.01},
        "validation": {"foreign_calibration": True},
    }
    directory = initialise(build_config(tree))
    workload = Workload(directory.descriptor(), TextCodec.from_directory(model), load_tasks(directory.config().tasks))
    honest = generate(directory, workload, model, slot=0)
    claimed = [replace(row, task_reward=1.0, reward=1.0) for row in generate(directory, workload, model, slot=1)]
    store = Store(directory.store)
    store.write(lambda connection: _record(connection, directory, honest, claimed))
    store.close()
    return directory


def generate(directory: RunDirectory, workload: Workload, model: Path, slot: int) -> list[Rollout]:
    items = workload.items(slot_seed(step_secret(directory.secret(), StepId(step=STEP)), slot))
    engine = TorchEngine(model, eos_token_ids=workload.codec.eos_token_ids)
    made = engine.generate([GenerationRequest(item.prompt_tokens, item.seed, 6) for item in items], temperature=1.0)
    return [
        as_rollout(item, completion, workload.reward(item.task, item.target_length, completion.tokens))
        for item, completion in zip(items, made, strict=True)
    ]


def _record(connection: Connection, directory: RunDirectory, honest: list[Rollout], claimed: list[Rollout]) -> None:
    for key, name in ((HONEST, "anna"), (CHEAT, "mallory")):
        insert(connection, WorkerRow(key, name, "torch/float32/cpu", 1.0, 0, 0.0, 0.0, "active"))
    groups = [
        api.GroupVerdict(
            group=number,
            task_id=honest[2 * number].task_id,
            useful=number == 0,
            tokens=8,
            rewards=[0.5, -0.25],
            task_rewards=[1.0, 0.0],
        )
        for number in range(2)
    ]
    metrics = api.AuditMetrics(tokens=20, margin_max=0.125, rounding_flips=1)
    accepted = api.VerdictBody(
        claim_id="claim-honest", submission_id="honest-file", accepted=True, reasons=[], audited_groups=[0, 1, 2, 3],
        groups=groups,
        metrics=metrics,
    )  # fmt: skip
    refused = api.VerdictBody(
        claim_id="claim-cheat", submission_id="cheat-file", accepted=False, reasons=[Reason.REWARD],
        detail="row 0 claims reward 1",
    )  # fmt: skip
    _add(connection, directory, HONEST, 0, honest, accepted)
    _add(connection, directory, CHEAT, 1, claimed, refused)
    consumed = replace(_group(0), state=GroupState.ACCEPTED)
    insert(connection, consumed, _group(1))
    proposed = update(connection, consumed, state=GroupState.PROPOSED, batch_step=STEP + 1, position=0)
    update(connection, proposed, state=GroupState.CONSUMED)


def _group(number: int) -> GroupRow:
    return GroupRow(
        group_id=f"{STEP}/0/{number}",
        submission_id="honest-file",
        worker=HONEST,
        step=STEP,
        slot=0,
        number=number,
        policy_version=VERSION,
        useful=True,
        tokens=8,
        rewards="[]",
        task_rewards="[]",
        logprobs_verified=True,
        state=GroupState.NO_SIGNAL,
    )


def _add(
    connection: Connection,
    directory: RunDirectory,
    key: str,
    slot: int,
    rows: list[Rollout],
    verdict: api.VerdictBody,
) -> None:
    header = RolloutHeader(
        run_id=directory.descriptor().run_id,
        step=STEP,
        slot=slot,
        lease_id=f"lease-{slot}",
        worker_key=key,
        policy_version=VERSION,
        manifest_digest="ef" * 32,
        numerics_class="torch/float32/cpu",
    )
    data = write_rollouts(header, rows)
    directory.submissions.mkdir(parents=True, exist_ok=True)
    (directory.submissions / f"{verdict.submission_id}.parquet").write_bytes(data)
    row = SubmissionRow(
        submission_id=verdict.submission_id,
        lease_id=header.lease_id,
        worker=key,
        digest=digest_bytes(data),
        size_bytes=len(data),
        signature="",
        received_at=float(slot),
        audit_groups="[0, 1, 2, 3]",
        audit_step=0,
        audit_rate=1.0,
        numerics_class=header.numerics_class,
    )
    insert(connection, row)
    claimed = update(connection, row, state=SubmissionState.CLAIMED)
    update(connection, claimed, state=SubmissionState.DECIDED, decided_at=1.0, verdict=verdict.model_dump_json())
