"""The site builds strictly, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADING = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}


class Loads(HTMLParser):
    """Addresses that a browser loads by itself, unlike links that a reader follows."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "link" and dict(attrs).get("rel") in ("canonical", "prev", "next"):
            return
        self.addresses += [value or "" for name, value in attrs if (tag, name) in LOADING]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    result = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return out


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    foreign = {}
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        foreign[page.name] = [address for address in loads.addresses if re.match(r"(https?:)?//", address)]
    assert {name: found for name, found in foreign.items() if found} == {}


def test_pages_with_diagrams_bring_their_own_renderer(site: Path) -> None:
    """Material loads it from another host only if no script of the site has defined it."""
    drawn = [page for page in site.rglob("*.html") if 'class="mermaid"' in page.read_text()]
    assert len(drawn) >= 4
    assert all("assets/mermaid.min.js" in page.read_text() for page in drawn)


def test_the_site_can_be_searched(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "Rounding flip" in index
    assert "training.async_level" in index
