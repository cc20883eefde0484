"""The page in a real Chromium, on a made-up run whose contributors and rollouts try to be markup."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from coordinator.page.test_private import OBSERVATION, SECRET, TEXT, FakeReader
from shoal.coordinator.http.listener import server_config
from shoal.coordinator.server import bind
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.browser import Watched, browser
from support.samples import NUMERICS_CLASS, keypair
from support.swarm import Clock, Swarm, small_config

pytestmark = pytest.mark.slow
NAME = "<script>alert('name')</script>"
ACTIVITY = "<img src=x onerror=alert('activity')>"


class Served:
    """A swarm behind a real socket; its clients still reach it without one."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        listener = bind("127.0.0.1", 0, "port")
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(server_config(swarm.app))
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)

    def __enter__(self) -> "Served":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.swarm.app.service.stop_waiting()
        self.server.should_exit = True
        self._thread.join(30)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    swarm = Swarm(tmp_path, small_config(run={"steps": 50}), Clock(time.time()))
    swarm.app.service.rollouts = FakeReader()
    with swarm.http:
        swarm.publish(0)
        ann, eve = swarm.join("ann", "eve")
        ann.register(api.RegisterBody(name=NAME, numerics_class=NUMERICS_CLASS, tokens_per_s=100.0))
        swarm.produce(ann)
        swarm.work(eve)
        swarm.reject(Reason.SAMPLING)
        swarm.sweep()
        swarm.publish(1)
        swarm.produce(ann)
        ann.heartbeat(api.HeartbeatBody(activity=ACTIVITY))
    with Served(swarm) as served:
        yield served
    swarm.store.close()


@pytest.fixture
def watched(served: Served) -> Iterator[Watched]:
    with browser() as watched:
        yield watched
        assert watched.errors == []
        assert watched.hosts == {served.url.removeprefix("http://")}


def test_every_public_screen_opens_and_shows_nothing_of_the_owner(served: Served, watched: Watched) -> None:
    page = watched.page
    page.goto(served.url)
    watched.wait_for("Running for")
    assert page.get_by_role("link", name="Rollouts").count() == 0
    page.get_by_role("link", name="Workers").click()
    watched.wait_for(NAME)
    page.get_by_role("link", name="Relays").click()
    watched.wait_for("No relay has announced itself")
    page.get_by_role("link", name="Ledger").click()
    watched.wait_for("verified")
    for private in ("#/steps", "#/step/0", "#/group/0/0/0", "#/timeline"):
        page.goto(f"{served.url}/{private}")
        watched.wait_for("For the run's owner")
        assert TEXT not in watched.text()
    page.goto(f"{served.url}/worker/{keypair('ann').public}")
    watched.wait_for("What raises it")
    assert NAME in watched.text()
    assert ACTIVITY in watched.text()
    assert "shoal work" in watched.text()


def test_the_owner_goes_from_a_step_to_a_token_and_finds_why_a_cheater_was_banned(
    served: Served, watched: Watched
) -> None:
    page = watched.page
    page.goto(f"{served.url}/#owner={SECRET}")
    watched.wait_for("Running for")
    assert SECRET not in page.url
    assert SECRET not in page.evaluate("document.cookie")
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_role("link", name="0", exact=True).first.click()
    page.get_by_role("link", name="0/0/0").click()
    watched.wait_for(TEXT)
    page.get_by_role("link", name="Timeline").click()
    watched.wait_for("Versions, from publication to arrival")
    page.get_by_role("link", name="Workers").click()
    page.get_by_role("link", name="eve").click()
    watched.wait_for("Banned after")
    assert "sampling" in page.inner_text(".evidence")


def test_live_updates_arrive_without_a_reload(served: Served, watched: Watched) -> None:
    page = watched.page
    page.goto(served.url)
    page.locator("#live", has_text="live").wait_for()  # the stream is open; other texts hold the word too
    served.swarm.run.metrics.event("evaluation", version=1, accuracy=0.625, problems=8)
    watched.wait_for("held-out accuracy 0.625")
    served.swarm.run.metrics.event("alert", name="disk_low", seen=f"{NAME} free", advice="Make room.")
    watched.wait_for(f"alert disk low: {NAME} free")


def test_an_episode_is_a_conversation_and_its_tokens_are_read_by_keyboard(served: Served, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{served.url}/#owner={SECRET}")
    watched.wait_for("Running for")
    page.goto(f"{served.url}/#/group/0/0/0")
    watched.wait_for("policy, turn 2 of 2")
    turns = page.locator("article").nth(1).locator(".turn")
    titles = turns.locator("h3").all_inner_texts()
    assert titles == ["prompt", "policy, turn 1 of 2", "environment", "policy, turn 2 of 2"]
    assert turns.nth(2).locator(".text").inner_text() == OBSERVATION
    page.get_by_label("Tokens; arrow keys move").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    watched.wait_for('Sample 1, token 3 of 3, "<b>2</b>": log-probability -1')


def test_who_uses_the_keyboard_stays_where_they_are_while_the_page_is_drawn_again(
    served: Served, watched: Watched
) -> None:
    page = watched.page
    page.goto(f"{served.url}/#/workers")
    watched.wait_for(NAME)
    watched.wait_for("live")
    page.get_by_role("link", name="eve").focus()
    served.swarm.client("eve-2").register(
        api.RegisterBody(name="zoe", numerics_class=NUMERICS_CLASS, tokens_per_s=99.0)
    )
    watched.wait_for("zoe")
    assert page.evaluate("document.activeElement.textContent") == "eve"


def test_relays_show_how_well_they_serve(served: Served, watched: Watched) -> None:
    body = api.RelayBody(url="http://relay.example", newest_version=1, bytes_sent=5_000_000)
    served.swarm.client("relay").announce_relay(body)
    measured = api.RelayMeasurement(url=body.url, is_good=True, served=3, failed=1)
    served.swarm.client("validator").report_relays(api.RelayReportBody(relays=[measured]))
    watched.page.goto(f"{served.url}/#/relays")
    watched.wait_for("75.0 %")
    assert "5.0 MB" in watched.text()


def test_the_ledger_shows_entries_of_open_steps_to_the_owner_alone(served: Served, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{served.url}/#/ledger")
    watched.wait_for("of steps that are still open")
    page.goto(f"{served.url}/#owner={SECRET}")
    watched.wait_for("Running for")
    page.goto(f"{served.url}/#/ledger")
    watched.wait_for("verified")
    assert "still open" not in watched.text()


def test_a_ban_appears_while_the_page_is_open(served: Served, watched: Watched) -> None:
    page = watched.page
    page.goto(served.url)
    watched.wait_for("live")
    served.swarm.client("run").ban(api.BanBody(worker=keypair("ann").public, reason=f"{NAME}"))
    watched.wait_for(f"banned: by the owner: {NAME}")
    served.swarm.client("run").set_run_state(api.RunStateBody(state="paused"))
    watched.wait_for("the run is paused")


def test_the_page_is_usable_on_a_phone_and_by_keyboard(served: Served) -> None:
    with browser(width=390, height=800, is_dark=True) as watched:
        page = watched.page
        page.goto(served.url)
        watched.wait_for("Running for")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.get_by_role("link", name="Workers").focus()
        page.keyboard.press("Enter")
        watched.wait_for(NAME)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert watched.errors == []


def test_a_foreign_site_cannot_frame_the_page_or_read_it(served: Served, watched: Watched) -> None:
    answer = watched.page.goto(served.url)
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "access-control-allow-origin" not in answer.headers
