"""A researcher brings tasks, a verifier, a model and a loss, and follows the guides from `shoal init` to the export."""

import json
import re
import subprocess
from pathlib import Path
from typing import TypedDict

import pytest

from end_to_end.commands import answer, shoal
from end_to_end.swarm import DEADLINE_S, free_ports
from support.tiny_run import save_policy

pytestmark = pytest.mark.slow
STEPS = 2
RULES = """
from shoal.tasks import Task, verifier
from shoal.training import TokenLoss


@verifier(exact=True)
def parity(task: Task, completion_text: str) -> tuple[float, str]:
    letters = len(completion_text)
    return float(letters % 2 == task.verification_info["rest"]), f"{letters} letters"


def reinforce(batch, config):
    return TokenLoss(-batch.advantages_N * batch.logprobs_N, batch.logprobs_N > 0)
"""
RUN_FILE = """
[run]
name = "own"
dir = "run"
steps = {steps}

[model]
path = "model"

[tasks]
source = "tasks.jsonl"
heldout = 4
thinking = false

[rollouts]
group_size = 4
tasks_per_slot = 2
max_prompt_tokens = 8
max_new_tokens = 16

[training]
groups_per_step = 2
minibatches = 1
learning_rate = 1e-3
loss = "my_rules:reinforce"
checkpoint_every = 100

[coordinator]
port = {port}

[broadcast]
port = {origin_port}

[trust]
probation_audits = 1
stake_tokens = 100
"""


class Own(TypedDict):
    """Where the researcher types, with the own module on the path, as the guide says."""

    here: Path
    PYTHONPATH: str


def write_own_files(home: Path) -> None:
    """Everything that the researcher has; the model lacks a chat template, as base models do."""
    (save_policy(home / "model", seed=0) / "chat_template.jinja").unlink()
    (home / "my_rules.py").write_text(RULES)
    tasks = [
        {"prompt": f"Write {n} letters", "task_type": "my_rules:parity", "verification_info": {"rest": n % 2}}
        for n in range(60)
    ]
    (home / "tasks.jsonl").write_text(
        "".join(f"{json.dumps({'problem_id': str(n)} | task)}\n" for n, task in enumerate(tasks))
    )
    port = free_ports(4)
    (home / "run.toml").write_text(RUN_FILE.format(steps=STEPS, port=port, origin_port=port + 1))


def cure(home: Path, refusal: str) -> list[str]:
    """Does what `shoal init` says, in its order; the settings that it asks for are flags of the following commands."""
    template = re.search(r"printf %s .*chat_template\.jinja", refusal)
    length = re.search(r"`(--rollouts\.max_prompt_tokens) (\d+)`", refusal)
    stake = re.search(r"Raise (trust\.stake_tokens) to (\d+)", refusal)
    assert template is not None, refusal
    assert length is not None, refusal
    assert stake is not None, refusal
    subprocess.run(["sh", "-c", template[0]], cwd=home, check=True)
    settings = [length[1], length[2], f"--{stake[1]}", stake[2]]
    assert "`shoal calibrate OUT RUN_FILE`" in refusal
    assert "validation.calibration" in refusal
    words = ("calibrate", "calibration.json", "run.toml", "--dtype", "float32")
    measured = answer(*words, *settings, here=home, PYTHONPATH=".")
    assert "wrote calibration.json" in measured
    return [*settings, "--validation.calibration", "calibration.json"]


def test_a_researcher_trains_an_own_model_on_own_tasks_with_an_own_verifier_and_loss(tmp_path: Path) -> None:
    write_own_files(tmp_path)
    own = Own(here=tmp_path, PYTHONPATH=".")
    refusal = answer("init", "run.toml", expect=78, **own)
    assert "4 things keep this run from being made." in refusal
    assert not (tmp_path / "run").exists()
    settings = cure(tmp_path, refusal)
    assert "contributors join with: shoal work http://127.0.0.1:" in answer("init", "run.toml", *settings, **own)

    up_log = tmp_path / "up.log"
    with shoal(up_log, "up", "run", "--workers", 1, "--relays", 1, **own) as up:
        assert up.wait(DEADLINE_S) == 0, up_log.read_text()[-2000:]
    assert f"is finished: {STEPS} versions" in up_log.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["honest_rejected"]) == (STEPS, 0)

    look_back(tmp_path, own)
    exported = answer("export", "trained", "run", **own)
    assert f"wrote version {STEPS}, the last one, to trained" in exported
    assert f"policy version {STEPS}" in (tmp_path / "trained" / "README.md").read_text()
    asked = answer("eval", "trained", "--against", "model", "--run", "run", "--limit", 4, "-k", 2, **own)
    assert "difference" in asked


def look_back(home: Path, own: Own) -> None:
    """The recorded rollouts, with what the own verifier said, and the same training from them without a swarm."""
    shown = answer("inspect", "run", "--limit", 2, **own)
    assert re.search(r"\d+ letters", shown), shown
    replayed = answer("train", "run", "--replay", home / "run" / "coordinator" / "submissions", **own)
    assert f"trained {STEPS} steps in" in replayed
