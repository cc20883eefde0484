import shutil
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.config import build_config, load_config, to_toml
from shoal.files import WEIGHTS_FILE
from shoal.owner.records import export_run, show_memory_plan
from shoal.policy import bundled_directory
from shoal.protocol.api import EvaluationView, HistoryView, VersionView
from shoal.rundir import RunDirectory, checkpoint_path
from shoal.training import ExportError, Trainer
from shoal.training.export import version_to_export
from support.samples import descriptor

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("run_file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_run_file_can_be_resolved_and_planned(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_file), "--dry-run"])
    assert ended.value.code == 0
    assert f'name = "{load_config(run_file).run.name}"' in capsys.readouterr().out
    lines: list[str] = []
    show_memory_plan(load_config(run_file), 8, lines.append, shapes=CONFIGS / "shapes")
    assert "on 8 ranks" in lines[0]
    assert "total per rank" in lines[1]


def view(version: int) -> VersionView:
    report = {"task_reward_mean": 0.1 * version}
    return VersionView.model_validate(
        {"version": version, "manifest_digest": "ab" * 32, "published_s": 0.0, "report": report}
    )


def evaluation(version: int, accuracy: float) -> EvaluationView:
    return EvaluationView(version=version, accuracy=accuracy, problems=8, samples=8, mean_tokens=1, seconds=1, at_s=0)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Three steps with checkpoints of versions 2 and 3, evaluated at 0, 2 and 3."""
    config = build_config({"run": {"dir": tmp_path / "run", "steps": 3}, "model": {"path": "bundled"}})
    directory = RunDirectory(tmp_path / "run")
    directory.root.mkdir()
    directory.run_file.write_text(to_toml(config))
    recorded = HistoryView(
        versions=[view(version) for version in range(4)],
        evaluations=[evaluation(0, 0.1), evaluation(2, 0.4), evaluation(3, 0.8)],
        batches=[],
        bans=[],
    )
    monkeypatch.setattr("shoal.owner.records._recorded", lambda directory: (recorded, "cd" * 32))
    monkeypatch.setattr(RunDirectory, "descriptor", lambda directory: descriptor())
    trainer = Trainer(config.training, bundled_directory(), work_dir=directory.trainer, temperature=1.0, seed=0)
    with trainer:
        for trainer.step in (2, 3):
            next(trainer.policy.parameters()).data.add_(1.0)
            trainer.save()
    return directory


def test_a_finished_run_exports_its_last_version(finished: RunDirectory, tmp_path: Path) -> None:
    said: list[str] = []
    export_run(finished, tmp_path / "out", said.append)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "wrote version 3, the last one" in said[0]
    assert "policy version 3" in card
    assert "Intermediate" not in card
    assert "0.100 → 0.800 (0 and 3)" in card


def test_another_version_is_called_intermediate_and_is_not_praised_for_what_came_later(
    finished: RunDirectory, tmp_path: Path
) -> None:
    said: list[str] = []
    export_run(finished, tmp_path / "two", said.append, version=2)
    export_run(finished, tmp_path / "three", said.append)
    card = (tmp_path / "two" / "README.md").read_text()
    assert "wrote version 2, an intermediate one: the run ends with version 3" in said[0]
    assert "**Intermediate**" in card
    assert "0.100 → 0.400 (0 and 2)" in card
    assert "0.800" not in card
    weights = [(tmp_path / name / WEIGHTS_FILE).read_bytes() for name in ("two", "three")]
    assert weights[0] != weights[1]


def test_a_version_without_a_checkpoint_is_named_with_those_that_have_one(
    finished: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=r"no checkpoint of step 1.* There are: 2, 3"):
        export_run(finished, tmp_path / "out", print, version=1)
    assert not (tmp_path / "out").exists()


def test_an_older_checkpoint_never_passes_for_the_last_version(finished: RunDirectory, tmp_path: Path) -> None:
    shutil.rmtree(checkpoint_path(finished.checkpoints, 3))
    with pytest.raises(ExportError, match=r"no checkpoint of step 3.* start it again"):
        export_run(finished, tmp_path / "out", print)


def test_a_run_that_goes_on_has_no_result_yet(finished: RunDirectory, tmp_path: Path) -> None:
    finished.run_file.write_text(finished.run_file.read_text().replace("steps = 3", "steps = 42"))
    with pytest.raises(ExportError, match=r"version 3 of 42.*--version 3"):
        export_run(finished, tmp_path / "out", print)
    export_run(finished, tmp_path / "out", print, version=3)
    assert "the run ends with version 42" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("wanted", "newest", "steps", "chosen"), [(None, 5, 5, 5), (None, 7, 5, 7), (0, 5, 9, 0)])
def test_which_version_is_exported(wanted: int | None, newest: int, steps: int, chosen: int) -> None:
    assert version_to_export(wanted, newest=newest, steps=steps) == chosen
