"""`shoal logs`."""

from pathlib import Path

import pytest

from shoal.cli import logs
from shoal.errors import ConfigError
from shoal.rundir import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    found.logs.mkdir()
    found.log_file("trainer").write_text("".join(f"step {number}\n" for number in range(30)))
    found.log_file("relay-1").write_text("relay at http://127.0.0.1:7302\nhalf a li")
    return found


def printed(directory: RunDirectory, role: str = "", lines: int = 3) -> list[str]:
    shown: list[str] = []
    tails = [logs.Tail(path, lines) for path in logs.find_logs(directory, role)]
    logs.show(tails, 7 if len(tails) > 1 else 0, follow=False, echo=shown.append)
    return shown


def test_the_last_lines_of_one_role_are_shown(directory: RunDirectory) -> None:
    assert printed(directory, "trainer") == ["step 27", "step 28", "step 29"]
    assert printed(directory, "trainer", lines=0) == []
    assert len(printed(directory, "trainer", lines=100)) == 30


def test_all_roles_are_shown_with_their_names(directory: RunDirectory) -> None:
    assert printed(directory, lines=1) == ["relay-1  relay at http://127.0.0.1:7302", "trainer  step 29"]


def test_a_role_without_a_log_is_answered_with_those_that_have_one(directory: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no log of 'trainr' in .* There are relay-1, trainer"):
        logs.find_logs(directory, "trainr")
    with pytest.raises(ConfigError, match="has no logs"):
        logs.find_logs(RunDirectory(tmp_path / "elsewhere"), "")


def test_following_prints_whole_lines_as_they_come_and_survives_a_log_that_is_cut(directory: RunDirectory) -> None:
    log = directory.log_file("relay-1")
    contents = ["relay at http://127.0.0.1:7302\nhalf a line\nmore\n", "new\n"]
    shown: list[str] = []

    def sleep(seconds: float) -> None:
        if not contents:
            raise KeyboardInterrupt
        log.write_text(contents.pop(0))

    with pytest.raises(KeyboardInterrupt):
        logs.show([logs.Tail(log, 0)], 0, follow=True, echo=shown.append, sleep=sleep)
    assert shown == ["half a line", "more", "new"]
