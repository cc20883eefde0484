"""Which version a rewind means, and a rewind of a run that nobody serves."""

import json
from pathlib import Path

import pytest

from shoal.config import build_config
from shoal.coordinator import Store
from shoal.coordinator.batching import steps
from shoal.coordinator.ledger.verification import verify_ledger
from shoal.coordinator.server import begin, build_run
from shoal.coordinator.states import BatchState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import insert, select, update
from shoal.coordinator.store.tables import BatchRow
from shoal.errors import ConfigError, RefusedError
from shoal.owner.control import OwnedRun, find_run
from shoal.owner.create import initialise
from shoal.owner.rewinding import chosen_version, rewind, rewound_sentence
from shoal.protocol import api
from shoal.rundir import RunDirectory, checkpoint_path


def line(newest: int = 9) -> api.LineAnswer:
    return api.LineAnswer(newest_version=newest)


@pytest.mark.parametrize(
    ("version", "checkpoints", "chosen"),
    [(None, [4, 8], 8), (4, [4, 8], 4), (0, [4, 8], 0), (0, [], 0), (None, [], 0), (None, [8, 12], 8)],
)
def test_the_newest_checkpoint_is_meant_unless_another_is_named(
    version: int | None, checkpoints: list[int], chosen: int
) -> None:
    assert chosen_version(version, checkpoints, line()) == chosen


@pytest.mark.parametrize("version", [5, 9, 12])
def test_a_version_without_a_checkpoint_is_refused_with_those_that_have_one(version: int) -> None:
    with pytest.raises(ConfigError, match=f"no checkpoint of version {version}") as refused:
        chosen_version(version, [4, 8, 12], line())
    assert refused.value.hint == "There are: 0, 4, 8."


def test_a_run_without_a_version_has_nothing_to_return_to() -> None:
    with pytest.raises(ConfigError, match="nothing yet"):
        chosen_version(None, [], line(-1))


@pytest.mark.parametrize(
    ("newest", "text"),
    [
        (7, "versions 5 to 7 are void and trained again"),
        (5, "version 5 is void and trained again"),
        (4, "no version is lost"),
    ],
)
def test_lost_steps_are_shown(newest: int, text: str) -> None:
    view = api.RewindView(epoch=1, version=4, newest_before=newest, groups=12, audits=3, at=0.0, reason="x")
    said = rewound_sentence(view)
    assert text in said
    assert "12 groups were withdrawn, their credit stays, 3 files are audited" in said


def publish(connection: Connection, directory: RunDirectory, version: int) -> None:
    run = build_run(directory)
    if version:
        insert(connection, BatchRow(version - 1, 0.0, 0, 0, "{}", "{}", epoch=steps.epoch(connection)))
        (row,) = select(connection, BatchRow, "WHERE step=?", (version - 1,))
        update(connection, row, state=BatchState.RECORDED)
    digest = f"{version:064x}"
    steps.publish(
        connection,
        run,
        api.VersionBody(
            epoch=steps.epoch(connection),
            version=version,
            manifest_digest=digest,
            weights_digest=digest,
            bytes_total=1,
            checkpoints=[0, 2],
        ),
    )


def checkpoint(directory: RunDirectory, step: int, epoch: int = 0) -> None:
    path = checkpoint_path(directory.checkpoints, step)
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"step": step, "epoch": epoch}))


@pytest.fixture
def stopped(tmp_path: Path) -> OwnedRun:
    """A run at version 5 that is not being served; its trainer had reported the checkpoints of steps 0 and 2."""
    tree = {
        "run": {"dir": tmp_path / "run", "seed": 1},
        "coordinator": {"port": 9},
        "tasks": {"count": 10, "heldout": 2},
    }
    directory = initialise(build_config(tree))
    run = build_run(directory)
    store = Store(directory.store)
    store.write(lambda connection: begin(connection, run))
    for version in range(6):
        store.write(lambda connection: publish(connection, directory, version))  # noqa: B023
    store.close()
    found = find_run(str(directory.root))
    return OwnedRun(found.url, directory, found.key_file, deadline_s=0.1)


def test_a_stopped_run_is_rewound_in_its_store(stopped: OwnedRun) -> None:
    assert stopped.directory is not None
    for step in (2, 4):
        checkpoint(stopped.directory, step)
    view = rewind(stopped, reason="a bad step")
    assert (view.epoch, view.version, view.newest_before) == (1, 4, 5)
    now = stopped.line()
    assert (now.epoch, now.newest_version, now.rewinds) == (1, 4, [view])
    descriptor = stopped.directory.descriptor()
    result = verify_ledger(stopped.ledger().splitlines(), descriptor.coordinator_key, run_key=descriptor.run_key)
    assert [found for found in result.findings if "rewind" in found.text or "rewound" in found.text] == []


def test_what_a_rewind_voided_is_not_chosen_by_the_next_one(stopped: OwnedRun) -> None:
    """The trainer has not started between the two, so its old checkpoints are still there."""
    assert stopped.directory is not None
    for step in (2, 4):
        checkpoint(stopped.directory, step)
    rewind(stopped, version=2, reason="first")
    store = Store(stopped.directory.store)
    for version in (3, 4, 5):
        store.write(lambda connection: publish(connection, stopped.directory, version))  # type: ignore[arg-type]  # noqa: B023
    store.close()
    with pytest.raises(ConfigError, match="no checkpoint of version 4"):
        rewind(stopped, version=4, reason="second")
    assert rewind(stopped, reason="second").version == 2


def test_without_the_trainers_disk_its_report_counts(stopped: OwnedRun) -> None:
    assert rewind(stopped, reason="from afar").version == 2


def test_a_command_that_is_given_again_says_that_nothing_is_left_to_do(stopped: OwnedRun) -> None:
    rewind(stopped, reason="once")
    with pytest.raises(RefusedError) as refused:
        rewind(stopped, reason="once more")
    assert refused.value.code == "nothing_to_rewind"
    assert stopped.line().epoch == 1
