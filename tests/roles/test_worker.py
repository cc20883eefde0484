"""A worker's start: one process per directory, no key without a run."""

from pathlib import Path
from typing import Any, get_args

import pytest

from roles.conftest import Fail
from shoal.cli.main import main
from shoal.config.schema import EngineKind
from shoal.errors import ConfigError, RefusedError, UnavailableError
from shoal.locks import BusyError, hold
from shoal.policy.engines import ENGINES
from shoal.protocol import api
from shoal.roles import worker
from support.tiny_run import Reports

URL = "http://coordinator:7300"


def work(root: Path, **options: Any) -> None:
    worker.work(
        URL, Reports(), **({"root": root, "key_file": None, "run_key": None, "name": "", "threads": 0} | options)
    )


def test_two_workers_never_share_a_directory(tmp_path: Path) -> None:
    with hold(tmp_path / "lock", ""), pytest.raises(BusyError, match=r"Another worker uses .* --dir"):
        work(tmp_path)


def test_a_home_that_cannot_be_written_is_refused_with_the_flag_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/\.shoal cannot be used: not a directory\. .* with --dir"):
        work(tmp_path / "file" / ".shoal")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="permission denied"):
        work(tmp_path / "read-only")


def test_a_user_without_a_home_learns_what_to_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    for words in (("work", URL), ("work", "status"), ("work", "pause"), ("key", "backup", "--plain", "copy")):
        with pytest.raises(SystemExit) as end:
            main(list(words))
        assert end.value.code == 78
        assert "this user has no home. Set HOME, or name a directory with --dir" in capsys.readouterr().err


def test_no_key_is_made_for_a_run_that_cannot_be_reached(fail: Fail, tmp_path: Path) -> None:
    fail(UnavailableError("Nobody there."))
    with pytest.raises(UnavailableError):
        work(tmp_path)
    assert not (tmp_path / "worker.key").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cheat": "bribes"}, "Known: stale, rewards"),
        ({"engine": "foo"}, "There is no engine 'foo'. Known: torch, vllm"),
        ({"name": "two\nlines"}, "A worker's name is one line"),
        ({"name": "x" * 300}, "A worker's name is one line"),
        ({"run_key": "0x12"}, "0x12 is no public key"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anybody_is_asked(
    fail: Fail, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    fail(AssertionError("the coordinator was asked"))
    with pytest.raises(ConfigError, match=reason):
        work(tmp_path, **options)


def test_an_engine_that_is_not_installed_is_refused_before_anybody_is_asked(
    fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(AssertionError("the coordinator was asked"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        work(tmp_path, engine="vllm")


def test_the_command_line_knows_every_engine() -> None:
    assert set(get_args(EngineKind)) == set(ENGINES)


class Banning:
    """A coordinator whose owner lifts a ban after some heartbeats."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)

    def heartbeat(self, body: api.HeartbeatBody) -> None:
        if (answer := self.answers.pop(0)) is not None:
            raise answer


def banned() -> RefusedError:
    return RefusedError("banned", "This key is banned.", status=403, permanent=True)


@pytest.mark.parametrize("lifted", [None, RefusedError("unknown_worker", "Register first.", status=403)])
def test_a_banned_worker_asks_less_and_less_often_until_the_ban_is_lifted(lifted: Exception | None) -> None:
    pauses: list[float] = []
    client = Banning(banned(), UnavailableError("Away."), *(banned() for _ in range(6)), lifted)
    reports = Reports()
    worker.wait_for_unban(client, reports, sleep=pauses.append)  # type: ignore[arg-type]
    assert pauses == [15, 30, 30, 60, 120, 240, 300, 300, 300]
    assert reports == ["the ban is lifted, joining again"]


class Life:
    """A worker that is refused, or ends."""

    def __init__(self, end: Exception | None) -> None:
        self.end, self.report = end, Reports()

    def run(self) -> None:
        if self.end is not None:
            raise self.end


def test_only_a_ban_is_waited_out() -> None:
    assert worker._is_banned(life := Life(banned()))  # type: ignore[arg-type]
    assert life.report.some("Waiting until the ban is lifted")
    assert not worker._is_banned(Life(None))  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="Too slow"):
        worker._is_banned(Life(RefusedError("too_slow", "Too slow.")))  # type: ignore[arg-type]
