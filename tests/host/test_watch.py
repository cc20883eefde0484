"""What is shown while a run goes on, and how watching it ends."""

import pytest

from observe.runs import make_evaluation, make_history, make_status
from shoal.errors import UnavailableError
from shoal.host import watch as watching
from shoal.host.demo import demo_config
from shoal.host.supervisor import RoleEvent
from shoal.host.watch import Watch
from shoal.protocol.api import HistoryView, StatusView

STEPS = 8


class Roles:
    """A supervisor whose processes do as the test says."""

    def __init__(self) -> None:
        self.events: list[RoleEvent] = []
        self.alive: tuple[str, ...] = ("honest-1",)

    def poll(self) -> list[RoleEvent]:
        events, self.events = self.events, []
        return events


class View:
    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.waits: list[str] = []
        self.updates = 0

    def note(self, text: str, tone: str) -> None:
        self.notes.append((text, tone))

    def ended(self, worker: str, reason: str) -> None:
        self.notes.append((f"{worker} ended: {reason}", "bad"))

    def wait(self, notice: str) -> None:
        self.waits.append(notice)

    def update(self, status: StatusView, history: HistoryView) -> None:
        self.updates += 1


class Client:
    """Every look shows the next state of the run; the last one stays."""

    url = "http://127.0.0.1:7300"

    def __init__(self, *looks: tuple[StatusView, HistoryView] | Exception) -> None:
        self.looks = list(looks)

    def status(self) -> StatusView:
        look = self.looks[0]
        if isinstance(look, Exception):
            self.looks.pop(0)
            raise look
        return look[0]

    def history(self) -> HistoryView:
        look = self.looks[0] if len(self.looks) == 1 else self.looks.pop(0)
        assert not isinstance(look, Exception)
        return look[1]


class Host:
    """A run that plays itself."""

    def __init__(self, *looks: tuple[StatusView, HistoryView] | Exception) -> None:
        self.roles, self.view, self.client = Roles(), View(), Client(*looks)
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def watch(self, *workers: str, needs_workers: bool = False) -> Watch:
        return Watch(
            demo_config(steps=STEPS),
            supervisor=self.roles,  # type: ignore[arg-type]
            view=self.view,  # type: ignore[arg-type]
            client=self.client,  # type: ignore[arg-type]
            workers=workers,
            needs_workers=needs_workers,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def look(state: str, *measured: int) -> tuple[StatusView, HistoryView]:
    status = make_status().model_copy(update={"run_state": state})
    evaluations = [make_evaluation(version) for version in measured]
    return status, make_history().model_copy(update={"evaluations": evaluations})


def test_it_watches_until_the_last_version_is_measured() -> None:
    host = Host(UnavailableError("not yet"), look("running", 0), look("finished", 0, 4), look("finished", 0, 4, STEPS))
    status, history = host.watch("honest-1").run()
    assert status.run_state == "finished"
    assert history.evaluations[-1].version == STEPS
    assert host.view.waits[0] == "the coordinator is starting"
    assert "does not answer yet" in host.view.waits[1]
    assert host.view.updates == 3


def test_while_the_swarm_starts_it_says_what_is_being_waited_for() -> None:
    status, history = look("running")
    nobody = status.model_copy(update={"workers": []})
    unpublished = nobody.model_copy(update={"newest_version": -1})
    host = Host((unpublished, history), (nobody, history), look("finished", STEPS))
    host.watch("honest-1").run()
    assert host.view.waits[1:] == [
        "the trainer loads the policy and publishes version 0",
        "workers load the policy and measure this machine",
    ]


def test_restarts_are_counted_and_noted_and_quiet_endings_are_not() -> None:
    host = Host(look("finished", STEPS))
    host.roles.events = [
        RoleEvent(1.0, "trainer", "started", "pid 1"),
        RoleEvent(2.0, "trainer", "exited", "killed by SIGKILL", -9),
        RoleEvent(3.0, "trainer", "restarted", "pid 2"),
        RoleEvent(4.0, "honest-1", "exited", "exit code 0", 0),
        RoleEvent(5.0, "cheater-stale", "exited", "exit code 78", 78),
        RoleEvent(5.0, "cheater-stale", "failed", "exit code 78", 78, "This key is banned."),
    ]
    watch = host.watch()
    watch.run()
    assert watch.restarts == 1
    assert host.view.notes == [
        ("trainer exited: killed by SIGKILL", "warn"),
        ("trainer restarted: pid 2", "warn"),
        ("cheater-stale ended: This key is banned.", "bad"),
    ]


def test_a_swarm_without_honest_workers_ends_with_the_log_to_read() -> None:
    host = Host(look("running", 0))
    host.roles.alive = ("coordinator", "trainer")
    with pytest.raises(UnavailableError, match=r"No honest worker is left\. See .*honest-1\.log"):
        host.watch("honest-1", "honest-2", needs_workers=True).run()


def test_an_evaluator_that_never_comes_back_ends_the_wait() -> None:
    host = Host(look("finished", 0))
    with pytest.raises(UnavailableError, match=r"within 120 s\. See .*evaluator\.log"):
        host.watch().run()
    assert host.now == pytest.approx(120, abs=1)


def test_an_owner_waits_for_the_evaluation_of_a_large_model() -> None:
    host = Host(*[look("finished", 0)] * 1000, look("finished", 0, STEPS))
    watch = host.watch()
    watch.finish_deadline_s = None
    watch.run()
    assert host.now > 2 * watching.FINISH_DEADLINE_S


def test_a_worker_that_ended_for_good_is_shown_with_its_reason_and_not_waited_for() -> None:
    status, history = look("running")
    nobody = status.model_copy(update={"workers": []})
    host = Host((nobody, history), look("finished", STEPS))
    reason = "The owner's verifier my_checks runs its own code."
    host.roles.events = [RoleEvent(1.0, "local-1", "failed", "exit code 78", 78, reason)]
    host.watch("local-1").run()
    assert host.view.notes == [(f"local-1 ended: {reason}", "bad")]
    assert host.view.waits[1:] == ["no worker of this host is left"]


def test_a_role_without_a_last_word_is_shown_with_how_it_ended() -> None:
    host = Host(look("finished", STEPS))
    host.roles.events = [RoleEvent(1.0, "local-1", "failed", "killed by SIGSEGV, 5 times in a row", -11)]
    host.watch().run()
    assert host.view.notes == [("local-1 ended: killed by SIGSEGV, 5 times in a row", "bad")]


def seen(last_seen_s: float, name: str = "stranger", state: str = "active") -> tuple[StatusView, HistoryView]:
    status, history = look("finished", STEPS)
    worker = status.workers[0].model_copy(update={"name": name, "state": state, "last_seen_s": last_seen_s})
    return status.model_copy(update={"workers": [worker]}), history


def test_workers_of_other_hosts_have_time_to_hear_that_the_run_is_over() -> None:
    host = Host(seen(1.0))
    host.sleep = lambda seconds: host.client.looks.__setitem__(0, seen(60.0))  # type: ignore[method-assign]
    host.watch().wait_for_workers()
    assert host.client.looks[0][0].workers[0].last_seen_s == 60.0  # type: ignore[index]


def test_a_worker_that_is_too_busy_to_ask_is_not_waited_for_for_ever() -> None:
    host = Host(seen(0.1))
    host.watch().wait_for_workers()
    assert host.now == pytest.approx(watching.LEAVE_DEADLINE_S, abs=1)


@pytest.mark.parametrize("present", [seen(0.1, state="banned"), seen(0.1, name="honest-1"), seen(60.0)])
def test_nobody_is_waited_for_who_has_left_or_is_banned(present: tuple[StatusView, HistoryView]) -> None:
    host = Host(present)
    host.roles.alive = ("coordinator",)
    host.watch("honest-1").wait_for_workers()
    assert host.now == 0.0


def test_own_workers_are_waited_for_until_they_end() -> None:
    host = Host(seen(60.0))
    host.watch("honest-1").wait_for_workers()
    assert host.now >= watching.LEAVE_DEADLINE_S
