import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.tasks.environments.host import EnvironmentHost, Session

MODULE = "tasks.environments.own_environments"


@pytest.fixture
def host() -> Iterator[type[EnvironmentHost]]:
    made: list[EnvironmentHost] = []

    class Tracked(EnvironmentHost):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            made.append(self)

    yield Tracked
    for one in made:
        one.close()


def begun(host: EnvironmentHost, step_s: int = 5) -> Session:
    session = host.open(step_s)
    assert not session.reset(7, {"answer": 3}).failed
    return session


def test_an_episode_is_a_conversation_with_a_process_of_its_own(host: type[EnvironmentHost]) -> None:
    echo = host(f"{MODULE}:Echo")
    first, second = begun(echo), begun(echo)
    said = [first.step("a"), second.step("b"), first.step("c"), first.step("d"), second.step("e")]
    assert [one.observation for one in said] == ["a", "b", "c", "d", "e"]
    assert [one.done for one in said] == [False, False, False, True, False], "one does not count the other's turns"
    assert {one.reward for one in said} == {0.25}
    assert first._pid != second._pid


@pytest.mark.parametrize(
    ("name", "failed", "limited"),
    [
        ("Raises", "raised ValueError", False),
        ("Large", "answered with more than 1048576 letters", False),
        ("NotANumber", "answered with a reward that is not finite", False),
        ("NoDone", "answered without `done`", False),
        ("Nothing", "answered with an object that has no fields", False),
        ("AnObject", "answered with an object that has no fields", False),
        ("ASet", "answered with an object that has no fields", False),
        ("Eats", "ran out of memory", True),
        ("EatsTheLastByte", "ran out of memory", True),
        ("Spins", "died", True),
        ("Leaves", "died", True),
        ("Writes", "raised OSError", False),
        ("Connects", "raised OSError", False),
        ("Forks", "raised OSError", False),
        ("Exits", "raised SystemExit", False),
        ("HalfSurrogate", "answered with text that is not Unicode", False),
        ("SaysAnotherField", "died", True),
        ("SaysNoObject", "died", True),
        ("SaysNotANumber", "died", True),
        ("SaysWrongKinds", "died", True),
        ("SaysHalfSurrogate", "died", True),
        ("SaysTooDeep", "died", True),
    ],
)
def test_what_an_environment_may_not_do_ends_its_episode_alone(
    host: type[EnvironmentHost], name: str, failed: str, limited: bool
) -> None:
    bad = host(f"{MODULE}:{name}")
    called = begun(bad, step_s=1 if name == "Spins" else 5).step("go")
    # On a busy machine the clock may decide before the limit of processor time does.
    assert called.failed == failed or (name == "Spins" and called.failed == "took too long")
    assert called.limited == limited
    assert begun(bad)._connection.fileno() != -1, "the next episode begins"


def test_an_environment_that_waits_for_ever_is_killed(
    host: type[EnvironmentHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.environments.host.WALL_SLACK", 0.3)
    session = begun(host(f"{MODULE}:Hangs"), step_s=1)
    called = session.step("go")
    assert (called.failed, called.limited) == ("took too long", True)


def test_an_environment_that_cannot_be_made_fails_at_its_first_call(host: type[EnvironmentHost]) -> None:
    called = host(f"{MODULE}:RaisesAtOnce").open(5).reset(7, {})
    assert (called.failed, called.limited) == ("raised ValueError", False)


def test_processes_of_the_host_cannot_be_signalled(
    host: type[EnvironmentHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        monkeypatch.setenv("SHOAL_TEST_VICTIM", str(victim.pid))
        called = begun(host(f"{MODULE}:Signals")).step("go")
        assert called.observation == "[-1]", "neither a signal was sent nor a file given an owner"
        victim.communicate(b"\n")
    assert victim.returncode == 0


def test_files_of_the_host_cannot_be_removed(
    host: type[EnvironmentHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("here")
    monkeypatch.setenv("SHOAL_TEST_VICTIM", str(victim))
    assert begun(host(f"{MODULE}:Removes")).step("go").failed == "raised OSError"
    assert victim.read_text() == "here"


def test_tools_run_in_the_order_of_the_text_and_errors_are_fixed_words(host: type[EnvironmentHost]) -> None:
    session = host(f"{MODULE}:TrlLike").open(5)
    assert session.reset(1, {"prompt": "x"}).observation == "Count to two."
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    text = "hm</think>" + call % ("count", "{}") + call % ("shout", '{"text": "x"}') + call % ("count", '{"to": 1}')
    observed = session.step(text).observation.split("\n")
    assert observed == ["1", "error: RuntimeError", "error: count does not take these arguments"]
    assert session.step("</think><tool_call>{").observation == "error: the tool call is not closed"
    assert session.step("</think>" + call % ("_count", "{}")).observation.startswith("error: there is no tool")
    assert session.step("</think>" + call % ("count", "{}")).observation == "2"
    last = session.step("</think>done")
    assert (last.done, last.reward) == (True, 1.0)


def test_a_host_whose_process_was_killed_starts_another(host: type[EnvironmentHost]) -> None:
    echo = host(f"{MODULE}:Echo")
    begun(echo)
    assert echo._process is not None
    os.kill(echo._process.pid, 9)
    echo._process.wait()
    assert begun(echo).step("a").observation == "a"
