"""`shoal simulate` from the command line: a table, JSON and a figure; refusals in one sentence."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.simulation.swarm.trial import to_toml
from simulation.swarm.small import tree


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(to_toml(tree(run={"steps": 6})))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        main(["simulate", *arguments])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_scenario_gives_a_table_and_its_numbers(
    capsys: pytest.CaptureFixture[str], scenario: Path, tmp_path: Path
) -> None:
    numbers, figure = tmp_path / "new" / "result.json", tmp_path / "result.svg"
    code, out, _ = run(capsys, str(scenario), "--json", str(numbers), "--plot", str(figure))
    assert code == 0
    assert "To keep this trainer busy at lag 2" in out
    found = json.loads(numbers.read_text())
    assert found["steps"] == 6
    assert found["is_finished"]
    assert figure.read_text().startswith("<?xml")


def test_the_same_command_prints_the_same_twice(capsys: pytest.CaptureFixture[str], scenario: Path) -> None:
    first, second = run(capsys, str(scenario), "--seed", "3"), run(capsys, str(scenario), "--seed", "3")
    assert first[1] == second[1]
    assert first[1] != run(capsys, str(scenario), "--seed", "4")[1]


def test_another_process_with_another_hash_seed_prints_the_same(tmp_path: Path) -> None:
    mixed = tree(run={"steps": 5}, workers={"stays_s": 200.0, "away_s": 100.0, "speed_spread": 0.3})
    mixed["workers"].append({"name": "forger", "count": 2, "tokens_per_s": 200, "rows": 8, "conduct": "forge"})
    mixed["relays"] = [{"region": "north"}, {"region": "south"}]
    path = tmp_path / "mixed.toml"
    path.write_text(to_toml(mixed))
    command = [sys.executable, "-m", "shoal", "simulate", str(path), "--json"]
    found = []
    for seed in ("1", "2"):
        target = tmp_path / f"{seed}.json"
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([*command, str(target)], env=environment, check=True, capture_output=True, timeout=300)
        found.append(target.read_text())
    assert found[0] == found[1]
    assert json.loads(found[0])["steps"] == 5


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("step_s = ", "step_sec = ", "Unknown key trainer.step_sec. Did you mean trainer.step_s?"),
        (
            "\ntokens_per_s = 200",
            "\ntokens_per_s = -200",
            "workers.0.tokens_per_s = -200 is wrong: input should be greater",
        ),
        ("median_tokens = 100", "median_tokens = nan", "work.median_tokens = nan is wrong: input should be a finite"),
        ("groups_per_step", "group_per_step", "Did you mean training.groups_per_step?"),
        ("[[workers]]", "[[worker]]", "Unknown key worker. Did you mean workers?"),
    ],
)
def test_a_file_with_a_wrong_value_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], scenario: Path, line: str, instead: str, says: str
) -> None:
    text = scenario.read_text()
    assert line in text
    scenario.write_text(text.replace(line, instead))
    code, out, err = run(capsys, str(scenario))
    assert code == 78
    assert not out
    assert says in " ".join(err.split())


def test_an_empty_swarm_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str], scenario: Path) -> None:
    text = scenario.read_text()
    scenario.write_text("workers = []\n" + text[: text.index("[[workers]]")])
    code, _, err = run(capsys, str(scenario))
    assert code == 78
    assert "The swarm is empty. Add [[workers]]" in " ".join(err.split())


def test_a_swarm_that_cannot_end_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(to_toml(tree(run={"steps": 4}, workers={"tokens_per_s": 0.01})))
    code, out, _ = run(capsys, str(path))
    assert code == 0
    assert "Stopped at step 0" in out
    assert "raise coordinator.lease_s" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["home-swam"], "Did you mean home-swarm?"),
        (["home-swarm", "--plot", "x.txt"], "A figure is a .svg or .png file"),
        (["home-swarm", "--write", "x.toml"], "no run's directory"),
        (["home-swarm", "--steps", "1000000000"], "run.steps = 1000000000 is wrong"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 78
    assert not out
    assert err.startswith("shoal: ")
    assert says in err


def test_a_directory_without_a_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, str(tmp_path))
    assert code != 0
    assert "Traceback" not in err


def test_no_torch_is_needed(scenario: Path) -> None:
    script = (
        "import sys; from shoal.cli.main import main\n"
        f"main(['simulate', {str(scenario)!r}])\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules), 'too much is imported'"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
