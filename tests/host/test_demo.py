"""The demo: its settings, its processes, and how it is stopped."""

from pathlib import Path

import pytest

from host.test_swarm import words_after
from shoal.errors import ConfigError
from shoal.host import demo
from shoal.host.swarm import Swarm
from shoal.locks import BusyError, hold
from shoal.rundir import RunDirectory
from shoal.worker import CHEATERS

STEPS = 8


def test_the_demo_has_its_own_settings_and_flags_win_over_them() -> None:
    assert demo.demo_config().run.name == "demo"
    config = demo.demo_config(["--run.steps", "9", "--trust.key_share=0.7"], steps=STEPS, async_level=0, seed=3)
    assert (config.run.steps, config.training.async_level, config.run.seed) == (STEPS, 0, 3)
    assert config.trust.key_share == 0.7
    with pytest.raises(ConfigError, match="async_level"):
        demo.demo_config(async_level=99)


def test_the_demo_gives_each_role_one_thread_and_starts_two_relays(tmp_path: Path) -> None:
    swarm = demo.demo_swarm(demo.demo_config(["--run.dir", str(tmp_path)]), honest_workers=3)
    roles = [*swarm.owner_roles(), *swarm.worker_roles()]
    assert [role.name for role in roles if role.name.startswith("relay")] == ["relay-1", "relay-2"]
    assert {words_after(role, "--threads")[0] for role in roles if "--threads" in role.command} == {"1"}
    computing = [role.name for role in roles if "--threads" in role.command]
    assert computing == ["trainer", "validator", "evaluator", "honest-1", "honest-2", "honest-3"]


def test_two_demos_never_share_a_directory(tmp_path: Path) -> None:
    config = demo.demo_config(["--run.dir", str(tmp_path), "--coordinator.port", "0"])
    with (
        hold(RunDirectory(tmp_path).supervisor_lock, ""),
        pytest.raises(BusyError, match=r"already runs .* --run\.dir"),
    ):
        demo.run_demo(config, honest_workers=1, fresh=True)


def test_an_interrupt_is_answered_with_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(swarm: Swarm) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Swarm, "check_ports", interrupt)
    assert demo.run_demo(demo.demo_config(["--run.dir", str(tmp_path)]), honest_workers=1, fresh=False) == 130
    assert "--fresh starts over" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "has_goal"), [(None, True), (4, False), (39, False), (40, True), (80, True)])
def test_a_shorter_demo_promises_no_accuracy(steps: int | None, has_goal: bool) -> None:
    assert (demo.accuracy_goal(demo.demo_config(steps=steps)) is not None) == has_goal


def test_the_tools_demo_has_a_calculator_and_cheaters_of_its_own() -> None:
    config = demo.demo_config(tools=True)
    assert demo.has_tools(config)
    assert config.tasks.environment == "calculator"
    assert not demo.has_tools(demo.demo_config())
    assert demo.accuracy_goal(config) == demo.TOOLS_END_AT_LEAST
    assert demo.accuracy_goal(demo.demo_config(tools=True, steps=2)) is None
    assert set(demo.TOOL_CHEATS) < set(CHEATERS)
