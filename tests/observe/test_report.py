"""The report is one page that loads nothing, survives any data and escapes what came from outside."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from shoal.observe import render_report, summarise
from shoal.observe.report import PLOTS
from shoal.protocol.api import HistoryView, StatusView

from .runs import make_history, make_status, make_worker

VOID = {"meta", "link", "br", "use", "path"}


def page(status: StatusView, history: HistoryView, *, settings_toml: str = "") -> str:
    summary = summarise(status, history, ledger_ok=True)
    return render_report(summary, status, history, problems=["One sentence."], settings_toml=settings_toml)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def full_page() -> str:
    return page(make_status(), make_history(), settings_toml='[run]\nname = "demo"')


def test_page_has_every_plot_table_and_setting(full_page: str) -> None:
    assert full_page.count('<svg role="img"') == len(PLOTS)
    for words in (
        "cheater-stale",
        "14 of 32 tokens lost",
        "0:44",
        "One sentence.",
        "127.0.0.1:7311",
        "[run]",
        "2 of 2",
    ):
        assert words in full_page


def test_page_is_well_formed_and_loads_nothing(full_page: str) -> None:
    tags = Tags(full_page)
    assert tags.open == []
    assert {"script", "img", "iframe", "object", "image"}.isdisjoint(tag for tag, _ in tags.seen)
    links = [
        value or ""
        for _, attributes in tags.seen
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href")
    ]
    assert all(link.startswith("#") for link in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", full_page))


def test_plots_follow_the_colour_of_the_page(full_page: str) -> None:
    assert "currentColor" in full_page
    assert "#010203" not in full_page
    assert "prefers-color-scheme: dark" in full_page


def test_words_from_outside_are_escaped_and_no_formula() -> None:
    hostile = "<script>alert(1)</script> $\\frac{1$ \x1b[2J"
    worker = make_worker(1, hostile, state="banned", rejected=1, reason=hostile)
    history = make_history(0).model_copy(update={"bans": [worker]})
    text = page(make_status(workers=[worker]), history, settings_toml=hostile)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    Tags(text)


@pytest.mark.parametrize("steps", [0, 1])
def test_short_runs_have_a_page(steps: int) -> None:
    Tags(page(make_status(steps, workers=[]), make_history(steps).model_copy(update={"bans": []})))


def test_run_without_any_data_has_a_page() -> None:
    nothing = HistoryView(versions=[], evaluations=[], batches=[], bans=[])
    status = make_status(0, workers=[]).model_copy(update={"age_histogram": {}, "relays": []})
    text = page(status, nothing)
    assert "<svg" not in text
    assert "Nobody joined." in text


def test_the_page_is_complete_without_anything_to_show() -> None:
    status, history = make_status(0, workers=[]), make_history(0)
    assert page(status, history).rstrip().endswith("</html>")


def test_importing_the_package_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, shoal.observe, shoal.host.supervisor; print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "torch" not in ended.stdout
    assert "matplotlib" not in ended.stdout


def test_cheaters_are_a_metric_only_where_there_are_any() -> None:
    assert "Cheaters banned" in page(make_status(), make_history())
    honest = [make_worker(0, "ann")]
    assert "Cheaters banned" not in page(make_status(workers=honest), make_history())
