"""The trainer's process around a rewind: training begins again, by itself where the owner allowed it."""

from pathlib import Path

import pytest

from shoal.errors import RefusedError, ShoalError
from shoal.owner import rewinding
from shoal.protocol import api
from shoal.roles import trainer as role
from shoal.rundir import RunDirectory
from shoal.training import World
from shoal.training.publisher import RepeatedStepError
from support.tiny_run import Reports

REPEATED = "Version 5 is already published, and repeating its step gave other weights"


class Script:
    """What each start of the training ends with."""

    def __init__(self, *ends: ShoalError | None) -> None:
        self.ends, self.starts = list(ends), 0

    def __call__(self, *arguments: object) -> None:
        self.starts += 1
        if (error := self.ends.pop(0)) is not None:
            raise error


@pytest.fixture
def rewound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons of rewinds that were made."""
    reasons: list[str] = []

    def rewind_run(directory: RunDirectory, *, reason: str) -> api.RewindView:
        reasons.append(reason)
        return api.RewindView(epoch=1, version=4, newest_before=6, groups=8, audits=0, at=0.0, reason=reason)

    monkeypatch.setattr(rewinding, "rewind_run", rewind_run)
    return reasons


def train(monkeypatch: pytest.MonkeyPatch, root: Path, script: Script, *, auto_rewind: bool) -> Reports:
    monkeypatch.setattr(role, "_train", script)
    said, directory = Reports(), RunDirectory(root)
    while news := role._train_epoch(directory, World(), said, auto_rewind=auto_rewind):
        said(news)
    return said


def test_a_rewind_by_the_owner_begins_training_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rewound: list[str]
) -> None:
    script = Script(RefusedError("rewound", "The run was rewound: epoch 1 goes on, not 0."), None)
    said = train(monkeypatch, tmp_path, script, auto_rewind=False)
    assert (script.starts, rewound) == (2, [])
    assert said == ["The run was rewound: epoch 1 goes on, not 0."]


def test_a_repeated_step_with_other_weights_leads_to_a_rewind_if_the_owner_allowed_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rewound: list[str]
) -> None:
    script = Script(RepeatedStepError(REPEATED), None)
    said = train(monkeypatch, tmp_path, script, auto_rewind=True)
    assert script.starts == 2
    assert rewound == [f"by the trainer: {REPEATED}"]
    assert said.some("versions 5 to 6 are void and trained again")


def test_without_leave_it_ends_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rewound: list[str]
) -> None:
    with pytest.raises(RepeatedStepError):
        train(monkeypatch, tmp_path, Script(RepeatedStepError(REPEATED)), auto_rewind=False)
    assert rewound == []


def test_another_rank_leaves_the_rewind_to_the_main_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rewound: list[str]
) -> None:
    heard = RefusedError("repeated_step", REPEATED, permanent=True)
    assert train(monkeypatch, tmp_path, Script(heard, None), auto_rewind=True) == [REPEATED]
    assert rewound == []


def test_other_refusals_end_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RefusedError):
        train(monkeypatch, tmp_path, Script(RefusedError("role", "No.")), auto_rewind=True)
