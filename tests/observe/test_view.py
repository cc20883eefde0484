"""The picture fits every terminal, says what matters and shows nobody's escape sequences."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from shoal.observe.view import Happening, ViewExtra, happenings, plan_rows, render, startup_notice
from shoal.protocol.api import LeaseTimingView

from .runs import STEPS, make_history, make_status, make_worker


def show(picture: RenderableType, columns: int = 100, rows: int = 40) -> list[str]:
    console = Console(width=columns, height=rows, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("columns", "rows"), [(100, 40), (80, 24), (200, 60), (60, 20), (40, 12), (80, 8)])
@pytest.mark.parametrize("step", [0, 1, STEPS])
@pytest.mark.parametrize("workers", [0, 5, 200])
def test_picture_fits_the_terminal(columns: int, rows: int, step: int, workers: int) -> None:
    status = make_status(step, workers=[make_worker(number, f"worker-{number}") for number in range(workers)])
    lines = show(render(status, make_history(step)), columns, rows)
    assert len(lines) < rows
    assert max(cell_len(line) for line in lines) <= columns


def test_everything_of_the_demo_is_visible_at_100_by_40() -> None:
    text = "\n".join(show(render(make_status(), make_history(), ViewExtra("shoal demo"))))
    expected = (
        "shoal demo", "step 40/40", "version 40", "100%", "reward 0.", "held-out accuracy 0.95", "3 active · 2 banned",
        "honest-3", "age of groups", "73.4 MB", "all relays", "279 accepted", "2 rejected",
        "0:44  cheater-stale banned: sampling", "0:52  cheater-reward banned: reward",
    )  # fmt: skip
    assert [words for words in expected if words not in text] == []


def test_same_facts_give_the_same_picture() -> None:
    status, history = make_status(12), make_history(12)
    assert show(render(status, history)) == show(render(status, history))


def test_hostile_names_and_reasons_are_shown_as_harmless_text() -> None:
    hostile = "\x1b[2J[bold red]x[/bold"
    worker = make_worker(1, hostile, state="banned", rejected=1, reason=hostile).model_copy(
        update={"activity": hostile}
    )
    history = make_history().model_copy(update={"bans": [worker]})
    text = "\n".join(show(render(make_status(workers=[worker]), history)))
    assert "\x1b[2J" not in text
    assert "\ufffd[2J[bold red]x[/bold banned" in text


def test_before_the_first_status_it_says_what_it_waits_for() -> None:
    extra = ViewExtra(
        "shoal demo", "waiting for the coordinator at http://127.0.0.1:7300", [Happening(0, "relay-1 started")]
    )
    text = "\n".join(show(render(None, None, extra)))
    assert "waiting for the coordinator at http://127.0.0.1:7300" in text
    assert "relay-1 started" in text


def test_a_notice_replaces_the_batch_line() -> None:
    lines = show(render(make_status(), make_history(), ViewExtra(notice="the coordinator does not answer")))
    assert lines[2].strip() == "the coordinator does not answer"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("measuring", "work leased at once (2 cycles measured)"),
        ("waits_for_version", "work waits for version 7 (filling 1.5 s, training 6.0 s)"),
        ("trainer_waits", "work leased at once (the trainer waits)"),
        ("swarm_too_slow", "work leased at once (filling 1.5 s, training 6.0 s)"),
    ],
)
def test_the_batch_line_says_when_work_is_leased(reason: str, words: str) -> None:
    facts = {"reason": reason, "step": 8, "newest_version": 6, "oldest_version": 7, "cycles": 2}
    timing = LeaseTimingView.model_validate(facts | {"slowest_fill_s": 1.5, "fastest_train_s": 6.0})
    status = make_status().model_copy(update={"lease_timing": timing})
    assert any(words in line for line in show(render(status, make_history()), columns=160))


def test_ban_hides_the_rejection_that_caused_it_and_notes_are_in_order() -> None:
    status, history = make_status(), make_history()
    events = happenings(status, history, ViewExtra(happenings=[Happening(48.0, "relay-1 restarted")]))
    assert [event.text.split(":")[0] for event in events] == [
        "cheater-stale banned",
        "relay-1 restarted",
        "cheater-reward banned",
    ]


def test_rejection_without_a_ban_is_an_event() -> None:
    history = make_history().model_copy(update={"bans": []})
    (event,) = happenings(make_status(), history, ViewExtra())
    assert (event.text, event.tone) == ("cheater-reward rejected at step 9: reward", "warn")


def test_plan_gives_small_terminals_the_essentials_first() -> None:
    assert plan_rows(39, 5).fact_rows > 0
    assert plan_rows(23, 5).fact_rows == 0
    assert plan_rows(23, 5).worker_rows == 5
    assert plan_rows(23, 500).total <= 23


def test_old_ages_share_the_last_bar() -> None:
    status = make_status().model_copy(update={"age_histogram": dict.fromkeys(range(9), 10), "async_level": 8})
    lines = show(render(status, make_history()))
    bars = [line.split()[1:3] for line in lines if "█" in line]
    assert bars == [["0", "10"], ["1", "10"], ["2", "10"], ["3+", "60"]]


def test_the_run_id_is_shown_once() -> None:
    status = make_status()
    for title in ("shoal", status.run_id):
        text = "\n".join(show(render(status, make_history(), ViewExtra(title))))
        assert text.count(status.run_id) == 1


@pytest.mark.parametrize("state", ["finished", "drained"])
def test_nobody_generates_in_a_run_that_is_over(state: str) -> None:
    running = make_status(12)
    assert "generating" in "\n".join(show(render(running, make_history(12))))
    over = running.model_copy(update={"run_state": state})
    assert "generating" not in "\n".join(show(render(over, make_history(12))))


def test_workers_that_ended_for_good_are_rows_with_their_reason() -> None:
    status = make_status(3, workers=[make_worker(0, "local-1"), make_worker(1, "local-2")])
    extra = ViewExtra(ended={"local-2": "no space left on device", "local-3": "\x1b[2Jthe key is banned"})
    lines = show(render(status, make_history(3), extra))
    rows = {line.split()[1]: line for line in lines if "local-" in line}
    assert "generating" in rows["local-1"]
    assert "ended" in rows["local-2"]
    assert "no space left on device" in rows["local-2"]
    assert "\ufffd[2Jthe key is banned" in rows["local-3"]
    assert any("1 active · 2 ended" in line for line in lines)


def test_ended_workers_never_outgrow_a_small_terminal() -> None:
    ended = {f"local-{number}": "why " * 40 for number in range(50)}
    lines = show(render(make_status(0, workers=[]), make_history(0), ViewExtra(ended=ended)), 60, 14)
    assert len(lines) < 14


@pytest.mark.parametrize(
    ("version", "workers", "here", "ended", "notice"),
    [
        (-1, 0, ["a"], [], "the trainer loads the policy and publishes version 0"),
        (0, 0, ["a", "b"], ["a"], "workers load the policy and measure this machine"),
        (0, 0, ["a", "b"], ["a", "b"], "no worker of this host is left"),
        (0, 0, [], [], "no worker has joined yet"),
        (0, 1, ["a"], ["a"], ""),
    ],
)
def test_the_notice_says_what_a_run_without_workers_waits_for(
    version: int, workers: int, here: list[str], ended: list[str], notice: str
) -> None:
    status = make_status(0, workers=[make_worker(number, "w") for number in range(workers)])
    assert startup_notice(status.model_copy(update={"newest_version": version}), here, ended) == notice
