"""Rollouts as a person asks for them: from a run or from files, filtered, explained, and harmless to the terminal."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.cli.main import main
from shoal.errors import ConfigError, ShoalError
from shoal.inspection import Filter, InspectionError, Record, add_margins, open_recording, render_record, sort_records
from shoal.rundir import RunDirectory
from support.tiny_run import save_policy

from .recorded import CHEAT, HONEST, STEP, make_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(model, tmp_path_factory.mktemp("runs") / "run")


def records(run: RunDirectory) -> list[Record]:
    return list(open_recording([run.root]).records())


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def lines(run: RunDirectory, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed([str(run.root), "--json", *flags], capsys).splitlines()]


def test_a_run_tells_state_age_and_the_validators_reward(run: RunDirectory) -> None:
    first, second, *_ = records(run)
    assert (first.state, first.batch_step, first.age, first.worker_name) == ("consumed", STEP + 1, 2, "anna")
    assert (first.reward, first.task_reward, second.reward) == (0.5, 1.0, -0.25)
    waiting = next(record for record in records(run) if record.state == "no_signal")
    assert (waiting.batch_step, waiting.age) == (None, 1)
    refused = next(record for record in records(run) if record.header.worker_key == CHEAT)
    assert (refused.state, refused.verified, refused.reward) == ("rejected", False, 1.0)


def test_json_holds_text_reward_and_why(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(run, capsys, "--limit", "0")
    assert len(found) == 8
    honest = found[0]
    assert "Compute" in honest["prompt"]
    assert honest["why"]
    assert (honest["reward"], honest["reward_from"], honest["verdict"]) == (0.5, "validator", "accepted")
    assert (honest["submission_margin_max"], honest["submission_rounding_flips"]) == (0.125, 1)
    assert found[-1]["reward_from"] == "worker"
    assert found[-1]["reasons"] == ["reward"]


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (["--worker", "anna"], 4),
        (["--worker", CHEAT[:6]], 4),
        (["--state", "consumed"], 2),
        (["--state", "rejected", "--worker", "anna"], 0),
        (["--min-reward", "0.4"], 6),
        (["--max-reward", "0"], 2),
        (["--min-age", "2"], 2),
        (["--max-age", "1"], 6),
        (["--slot", "1", "--step", "2", "--version", "1"], 4),
        (["--step", "3"], 0),
        (["--grep", "no such text"], 0),
        (["--grep", "Compute [0-9]+"], 8),
        (["--limit", "3"], 3),
    ],
)
def test_filters_leave_what_matches(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], flags: list[str], count: int
) -> None:
    limit = [] if "--limit" in flags else ["--limit", "0"]
    assert len(lines(run, capsys, *flags, *limit)) == count


def test_cut_and_finished_completions_are_distinguished(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    cut = lines(run, capsys, "--limit", "0", "--truncated")
    finished = lines(run, capsys, "--limit", "0", "--finished")
    assert len(cut) + len(finished) == 8
    assert {row["finish_reason"] for row in cut} <= {"length"}
    assert {row["finish_reason"] for row in finished} <= {"stop"}


def test_sorting_is_by_the_figure_and_then_by_place(run: RunDirectory) -> None:
    by_reward = sort_records(records(run), "reward", reverse=True)
    assert [record.reward for record in by_reward] == [1.0] * 4 + [0.5] * 2 + [-0.25] * 2
    assert [record.rollout.sample for record in by_reward[:4]] == [0, 1, 0, 1]


def test_margins_vanish_under_the_true_policy_and_show_a_changed_token(run: RunDirectory, model: Path) -> None:
    recording = open_recording([run.root])
    workload = recording.workload()
    assert workload is not None
    honest = [record for record in recording.records() if record.header.worker_key == HONEST]
    rollout = honest[0].rollout
    other_token = (rollout.output_tokens[0] + 7) % 20
    forged = replace(honest[0], rollout=replace(rollout, output_tokens=[other_token, *rollout.output_tokens[1:]]))
    measured = add_margins([*honest, forged], model, workload, run)
    worst = [record.margins.worst for record in measured if record.margins]
    assert max(worst[:-1]) < 1e-3
    assert worst[-1] > 1e-3


def test_margins_without_the_runs_secret_are_refused(run: RunDirectory, model: Path) -> None:
    recording = open_recording([run.root])
    workload = recording.workload()
    assert workload is not None
    with pytest.raises(ConfigError, match="secret"):
        add_margins(list(recording.records()), model, workload, None)


def test_files_of_a_run_are_read_without_its_store(run: RunDirectory) -> None:
    recording = open_recording([run.submissions])
    assert {record.state for record in recording.records()} == {"recorded"}
    assert recording.workload() is not None


def test_files_of_nowhere_need_a_tokenizer(run: RunDirectory, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "lonely.parquet"
    shutil.copyfile(run.submissions / "honest-file.parquet", file)
    with pytest.raises(ConfigError, match="--tokenizer"):
        open_recording([file])
    recording = open_recording([file], tokenizer=model)
    assert len(list(recording.records())) == 4
    assert recording.workload() is None


def test_nothing_to_show_is_said(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match="no rollout files"):
        open_recording([tmp_path])
    with pytest.raises(InspectionError, match="There is no"):
        open_recording([tmp_path / "missing.parquet"])


def test_wrong_flags_are_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, word in ((["--sort", "beauty"], "reward, length"), (["--grep", "("], "regular expression")):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(run.root), *flags])
        assert ended.value.code != 0
        assert word in capsys.readouterr().err


def test_the_panel_shows_what_counts_and_the_summary_adds_up(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed([str(run.root), "--limit", "1"], capsys)
    assert "2/0/0 sample 0" in out
    assert "in the batch of step 3" in out
    assert "1 of 20 flipped in its submission's audit, worst 0.125" in out
    assert "1 shown of 8 that match, 8 rollouts in all" in out


def test_escape_sequences_never_reach_the_terminal(run: RunDirectory) -> None:
    record = replace(records(run)[0], text="\x1b[2J[red]x\x07", worker_name="\x1b]0;owned\x07")
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_record(record))
    text = console.export_text()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x" in text


def test_a_filter_wants_everything_by_default(run: RunDirectory) -> None:
    assert all(Filter().wants(record) for record in records(run))
    assert not any(Filter(pattern=re.compile("^$")).wants(record) for record in records(run))


def test_a_damaged_file_is_refused(run: RunDirectory, tmp_path: Path, model: Path) -> None:
    file = tmp_path / "rotten.parquet"
    file.write_bytes((run.submissions / "honest-file.parquet").read_bytes()[:-40])
    with pytest.raises(ShoalError):
        list(open_recording([file], tokenizer=model).records())


def test_the_terms_of_a_reward_are_distinguished(run: RunDirectory) -> None:
    first = records(run)[0]
    assert first.verdict is not None
    learned = replace(first, rollout=replace(first.rollout, length_penalty=0.75))
    assert "0.5 = 1 − 0.75 for its length + 0.25 from reward models" in shown(learned)
    plain = replace(first, rollout=replace(first.rollout, length_penalty=0.5))
    assert "0.5 = 1 − 0.5 for its length" in shown(plain)
    assert "reward models" not in shown(plain)


def shown(record: Record) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_record(record))
    return console.export_text()
