"""The environment of one's own in the guide: checked and played as the guide says, from the text of the guide."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policy import bundled_directory
from shoal.tasks import PromptStyle, Task, TextCodec
from shoal.tasks.environments.host import EnvironmentHost
from shoal.tasks.environments.meeting import Meeting

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guide/environments.md").read_text()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (code,) = re.findall(r"```python\n# warmer\.py\n(.*?)```", GUIDE, flags=re.S)
    assert len(code.splitlines()) <= 40
    (tmp_path / "warmer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("warmer", None)


def test_the_command_of_the_guide_passes_the_example_as_exact(example: Path) -> None:
    (words,) = re.findall(r"^PYTHONPATH=\. shoal (env check warmer:.*)$", GUIDE, flags=re.M)
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:.", "PATH": ""}
    command = [sys.executable, "-m", "shoal", *words.split()]
    done = subprocess.run(
        command, cwd=example, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warmer:Warmer passed as exact" in done.stdout
    assert "FAIL" not in done.stdout
    assert re.search(r"ok +a solution earns the most \(semantic.oracle_max\)", done.stdout)


def test_the_example_plays_an_episode_that_ends_when_the_coin_is_found(example: Path) -> None:
    codec = TextCodec.from_directory(bundled_directory())
    task = Task(
        problem_id="w",
        source="s",
        task_type="environment:warmer:Warmer",
        prompt="Find it.",
        verification_info={"size": 9},
    )
    prompt, world = Meeting(codec, PromptStyle(), 400, "").prompt(task, 0, seed=3)
    assert "A coin lies on one of the places 0 to 8." in codec.decode_all(prompt)
    assert world is not None
    host = EnvironmentHost("warmer:Warmer")
    episode = world.begin()
    episode.open_session = lambda: host.open(5)
    try:
        for guess in range(9):
            episode.take([*codec.encode(f"</think>{guess}"), codec.eos_token_ids[0]])
            if episode.is_over:
                break
    finally:
        host.close()
    assert episode.finish_reason in ("done", "turns")
    assert episode.reward == float(episode.finish_reason == "done")
    said = codec.decode_all(episode.tokens)
    assert "Warmer." in said or "Colder." in said
