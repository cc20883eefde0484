"""A swarm on one host: which roles start, what is watched, and how it ends."""

from pathlib import Path

import pytest

from observe.runs import make_evaluation, make_history, make_status
from shoal.config import ShoalConfig
from shoal.errors import ConfigError, UnavailableError
from shoal.host import demo
from shoal.host.supervisor import Role, RoleEvent
from shoal.locks import BusyError, hold
from shoal.protocol.api import HistoryView, StatusView
from shoal.rundir import RunDirectory

STEPS = 8


def test_the_demo_has_its_own_settings_and_flags_win_over_them() -> None:
    assert demo.demo_config().run.name == "demo"
    config = demo.demo_config(["--run.steps", "9", "--trust.key_share=0.7"], steps=STEPS, async_level=0, seed=3)
    assert (config.run.steps, config.training.async_level, config.run.seed) == (STEPS, 0, 3)
    assert config.trust.key_share == 0.7
    with pytest.raises(ConfigError, match="async_level"):
        demo.demo_config(async_level=99)


def test_the_swarm_is_complete_and_each_role_has_one_thread_and_its_own_log(tmp_path: Path) -> None:
    config = demo.demo_config(["--run.dir", str(tmp_path)])
    directory = RunDirectory(tmp_path)
    roles = list(demo.owner_roles(directory, config))
    roles += [demo.worker_role(directory, config, "honest-1"), demo.worker_role(directory, config, "cheater", "stale")]
    names = ["coordinator", "trainer", "relay-1", "relay-2", "validator", "evaluator", "honest-1", "cheater"]
    assert [role.name for role in roles] == names
    assert {role.log for role in roles} == {tmp_path / "logs" / f"{name}.log" for name in names}
    assert all(role.env["OMP_NUM_THREADS"] == "1" for role in roles)
    assert [role.name for role in roles if not role.essential] == ["relay-1", "relay-2", "honest-1", "cheater"]


def words_after(role: Role, flag: str) -> list[str]:
    words = role.command
    return [words[index + 1] for index, word in enumerate(words) if word == flag]


def test_each_relay_follows_the_origin_and_the_relays_before_it(tmp_path: Path) -> None:
    config = demo.demo_config(["--broadcast.port", "9000"])
    first, second = demo.relay_roles(RunDirectory(tmp_path), config)
    assert words_after(first, "--upstream") == ["http://127.0.0.1:9000"]
    assert words_after(second, "--upstream") == ["http://127.0.0.1:9001", "http://127.0.0.1:9000"]
    assert words_after(second, "--port") == ["9002"]


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    kept = {"my-notes.txt": b"important", "data/table.csv": b"1,2", "supervisor.lock": b""}
    written = {"run.toml": b"", "keys/run.key": b"", "relay-2/head.json": b"", "workers/honest-1/lock": b""}
    for name, data in (kept | written).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    demo.start_over(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)
    demo.start_over(tmp_path / "nowhere")


def test_two_demos_never_share_a_directory(tmp_path: Path) -> None:
    config = demo.demo_config(["--run.dir", str(tmp_path), "--coordinator.port", "0"])
    with hold(tmp_path / demo.LOCK_FILE, ""), pytest.raises(BusyError, match=r"already runs .* --run\.dir"):
        demo.run_demo(config, honest_workers=1, fresh=True)


def test_an_interrupt_is_answered_with_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: ShoalConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "check_ports", interrupt)
    assert demo.run_demo(demo.demo_config(["--run.dir", str(tmp_path)]), honest_workers=1, fresh=False) == 130
    assert "--fresh starts over" in capsys.readouterr().out


class Host:
    """A run that plays itself: every look shows the next state of it."""

    def __init__(self, *looks: tuple[StatusView, HistoryView] | Exception) -> None:
        self.looks = list(looks)
        self.events: list[RoleEvent] = []
        self.alive: tuple[str, ...] = ("honest-1",)
        self.notes: list[tuple[str, str]] = []
        self.waits: list[str] = []
        self.updates = 0
        self.now = 0.0

    def poll(self) -> list[RoleEvent]:
        events, self.events = self.events, []
        return events

    def status(self) -> StatusView:
        look = self.looks[0]
        if isinstance(look, Exception):
            raise self.looks.pop(0)  # type: ignore[misc]
        return look[0]

    def history(self) -> HistoryView:
        look = self.looks[0] if len(self.looks) == 1 else self.looks.pop(0)
        assert not isinstance(look, Exception)
        return look[1]

    def note(self, text: str, tone: str) -> None:
        self.notes.append((text, tone))

    def ended(self, worker: str, reason: str) -> None:
        self.notes.append((f"{worker} ended: {reason}", "bad"))

    def wait(self, notice: str) -> None:
        self.waits.append(notice)

    def update(self, status: StatusView, history: HistoryView) -> None:
        self.updates += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def watch(self, *workers: str) -> demo.Watch:
        config = demo.demo_config(steps=STEPS)
        return demo.Watch(
            config,
            supervisor=self,  # type: ignore[arg-type]
            view=self,  # type: ignore[arg-type]
            client=self,  # type: ignore[arg-type]
            workers=workers,
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
    assert host.waits[0] == "the coordinator is starting"
    assert "does not answer yet" in host.waits[1]
    assert host.updates == 3


def test_while_the_swarm_starts_it_says_what_is_being_waited_for() -> None:
    status, history = look("running")
    nobody = status.model_copy(update={"workers": []})
    unpublished = nobody.model_copy(update={"newest_version": -1})
    host = Host((unpublished, history), (nobody, history), look("finished", STEPS))
    watch = host.watch()
    watch.local_workers = ["local-1"]
    watch.run()
    assert host.waits[1:] == [
        "the trainer loads the policy and publishes version 0",
        "workers load the policy and measure this machine",
    ]


def test_a_worker_that_ended_for_good_is_shown_with_its_reason_and_not_waited_for(tmp_path: Path) -> None:
    status, history = look("running")
    nobody = status.model_copy(update={"workers": []})
    host = Host((nobody, history), look("finished", STEPS))
    host.events = [RoleEvent(1.0, "local-1", "given_up", "exit code 78", 78)]
    watch = host.watch()
    watch.local_workers = ["local-1"]
    watch.config = demo.demo_config(["--run.dir", str(tmp_path)], steps=STEPS)
    log = tmp_path / "logs" / "local-1.log"
    log.parent.mkdir()
    log.write_text("joining\nshoal: The owner's verifier my_checks runs its own code. Allow it with --allow-code.\n")
    watch.run()
    assert host.notes == [
        ("local-1 ended: The owner's verifier my_checks runs its own code. Allow it with --allow-code.", "bad")
    ]
    assert host.waits[1:] == ["no worker of this host is left"]


def test_restarts_are_counted_and_told_and_quiet_endings_are_not() -> None:
    host = Host(look("finished", STEPS))
    host.events = [
        RoleEvent(1.0, "trainer", "started", "pid 1"),
        RoleEvent(2.0, "trainer", "exited", "killed by SIGKILL", -9),
        RoleEvent(3.0, "trainer", "restarted", "pid 2"),
        RoleEvent(4.0, "honest-1", "exited", "exit code 0", 0),
        RoleEvent(5.0, "cheater-stale", "exited", "exit code 78", 78),
        RoleEvent(5.0, "cheater-stale", "given_up", "exit code 78", 78),
    ]
    watch = host.watch()
    watch.run()
    assert watch.restarts == 1
    assert host.notes == [
        ("trainer exited: killed by SIGKILL", "warn"),
        ("trainer restarted: pid 2", "warn"),
        ("cheater-stale ended: exit code 78", "bad"),
    ]


def test_a_swarm_without_honest_workers_ends_with_the_log_to_read() -> None:
    host = Host(look("running", 0))
    host.alive = ("coordinator", "trainer")
    with pytest.raises(UnavailableError, match=r"No honest worker is left\. See .*honest-1\.log"):
        host.watch("honest-1", "honest-2").run()


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
    assert host.now > 2 * demo.FINISH_DEADLINE_S
