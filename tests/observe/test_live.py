"""A picture for terminals, lines for logs."""

import io
from pathlib import Path

from rich.console import Console

from shoal.observe import Happening, LiveView, ViewExtra, draws_pictures, progress_line, write_picture

from .runs import make_history, make_status


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_view() -> tuple[LiveView, io.StringIO, Clock]:
    clock, file = Clock(), io.StringIO()
    return LiveView("shoal demo", console=Console(file=file, width=60), clock=clock), file, clock


def test_log_gets_one_line_per_change_and_every_few_seconds() -> None:
    view, file, clock = plain_view()
    with view:
        for seconds, step in ((0.0, 3), (1.0, 3), (2.0, 4), (3.0, 4), (12.5, 4)):
            clock.now = seconds
            view.update(make_status(step), make_history(step).model_copy(update={"bans": []}))
    progress = [line for line in file.getvalue().splitlines() if " step " in line and "version" in line]
    assert [line.split()[2] for line in progress] == ["3/40", "4/40", "4/40"]


def test_log_tells_each_ban_and_note_once() -> None:
    view, file, clock = plain_view()
    with view:
        view.note("relay-1 started")
        for _ in range(3):
            view.update(make_status(), make_history())
        clock.now = 2.0
        view.note("relay-1 restarted: killed by SIGKILL")
    text = file.getvalue()
    assert text.count("cheater-stale banned") == 1
    assert text.count("[0:00] relay-1 started") == 1
    assert text.count("[3:00] relay-1 restarted") == 1


def test_log_says_once_what_is_waited_for() -> None:
    view, file, _ = plain_view()
    with view:
        view.wait("waiting for the coordinator")
        view.wait("waiting for the coordinator")
    assert file.getvalue() == "waiting for the coordinator\n"


def test_log_is_plain_ascii_on_one_line() -> None:
    view, file, _ = plain_view()
    view.note("relay ≤ [red]\x1b[31m " + "word " * 40)
    assert file.getvalue().isascii()
    assert "\x1b" not in file.getvalue()
    assert len(file.getvalue().splitlines()) == 1


def test_progress_line_before_anything_happened() -> None:
    line = progress_line(make_status(0, workers=[]), make_history(0).model_copy(update={"evaluations": [], "bans": []}))
    assert "reward -  held-out -" in line


def test_workers_beyond_those_that_are_listed_are_counted() -> None:
    status = make_status().model_copy(
        update={"worker_counts": {"probation": 700, "trusted": 50, "gone": 9, "banned": 3}}
    )
    assert "workers 750  " in progress_line(status, make_history())


def test_terminal_gets_pictures_and_keeps_the_last() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=40, _environ={"TERM": "xterm"})
    with LiveView("shoal demo", console=console) as view:
        view.wait("starting")
        view.update(make_status(), make_history())
    assert "held-out accuracy" in file.getvalue()


def test_dumb_or_ascii_terminals_get_lines() -> None:
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"), force_terminal=True, _environ={"TERM": "xterm"})
    assert not draws_pictures(dumb)
    assert not draws_pictures(ascii_only)


def test_picture_file_loads_nothing(tmp_path: Path) -> None:
    extra = ViewExtra("shoal demo", happenings=[Happening(1.0, "relay-1 restarted")])
    write_picture(tmp_path / "view.svg", make_status(), make_history(), extra)
    text = (tmp_path / "view.svg").read_text()
    assert "url(" not in text.replace("url(#", "")
    assert "cheater-stale" in text
