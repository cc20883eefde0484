"""The page of a real small swarm while it lives, and on its directory after it was killed."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from end_to_end.commands import answer, eventually, shoal, status_of, wait_for_text
from end_to_end.swarm import free_ports
from support.browser import PATIENCE_MS, browser

pytestmark = pytest.mark.slow


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "demo.log"


@pytest.fixture
def run(tmp_path: Path, log: Path) -> Iterator[tuple[Path, str]]:
    """A demo with two cheaters, killed at the end."""
    coordinator = free_ports(4)
    broadcast = coordinator + 1
    directory, url = tmp_path / "run", f"http://127.0.0.1:{coordinator}"
    settings = ("--run.dir", directory, "--coordinator.port", coordinator, "--broadcast.port", broadcast)
    with shoal(log, "demo", "--steps", 40, "--workers", 1, *settings) as demo:
        eventually(
            lambda: True if (status := status_of(url)) and status.newest_version >= 2 else None,
            lambda: f"no version was trained:\n{log.read_text()[-2000:]}",
            deadline_s=600,
        )
        yield directory, url
        demo.send_signal(signal.SIGKILL)
        demo.wait()


def test_a_live_run_and_the_same_run_dead(run: tuple[Path, str], tmp_path: Path) -> None:
    directory, url = run
    link = answer("run", "link", directory).strip()
    with browser() as watched:
        page = watched.page
        page.goto(link)
        watched.wait_for("Running for")
        seen = page.inner_text("dl.facts")
        expect(page.locator("dl.facts")).not_to_have_text(seen, use_inner_text=True, timeout=PATIENCE_MS)
        page.get_by_role("link", name="Workers").click()
        page.get_by_role("link", name=re.compile("^cheater")).first.click()
        watched.wait_for("Banned after")
        page.get_by_role("link", name="Rollouts").click()
        page.get_by_role("link", name="0", exact=True).first.click()
        page.get_by_role("link", name="0/0/0").click()
        watched.wait_for("Sample 0")
        page.get_by_role("button", name="Log-probability").click()
        assert watched.errors == []
        assert watched.hosts == {url.removeprefix("http://")}
    copied = tmp_path / "view.log"
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (directory / "keys").iterdir())
    with shoal(copied, "view", directory, "--no-browser"):
        wait_for_text(copied, "/#owner=")
        found = re.search(r"http://\S+", copied.read_text())
        assert found is not None
        with browser() as watched:
            watched.page.goto(found[0])
            watched.wait_for("Running for")
            watched.page.get_by_role("link", name="Timeline").click()
            watched.wait_for("Versions, from publication to arrival")
            watched.page.get_by_role("link", name="Ledger").click()
            watched.wait_for("chain and signatures hold")
            assert watched.errors == []
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (directory / "keys").iterdir()) == before
