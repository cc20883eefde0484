"""init names everything that an own model lacks at once, with commands that cure it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.config import ShoalConfig, build_config
from shoal.errors import ConfigError
from shoal.metrics import silent
from shoal.owner.create import initialise
from shoal.owner.readiness import NotReadyError, check_ready
from shoal.tasks.codec import MissingTemplateError
from support.tiny_run import save_policy


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model of one's own: without a chat template, and not the one of the bundled calibration."""
    model = save_policy(tmp_path / "my model", seed=0)
    (model / "chat_template.jinja").unlink()
    return model


def config(model: Path, root: Path, **sections: dict[str, Any]) -> ShoalConfig:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "dir": root},
        "model": {"path": str(model)},
        "tasks": {"count": 20, "heldout": 4},
    }
    return build_config(tree | sections)


def test_everything_that_an_own_model_lacks_is_named_at_once(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError) as refused:
        initialise(config(bare, tmp_path / "run", rollouts={"max_prompt_tokens": 8}))
    lines = refused.value.message.splitlines()
    assert lines[0].startswith("3 things")
    for line, (problem, command) in zip(
        lines[1:],
        [
            ("no chat template", "printf %s"),
            ("rollouts.max_prompt_tokens allows 8", "--rollouts.max_prompt_tokens"),
            ("The calibration was made for the model", "shoal calibrate"),
        ],
        strict=True,
    ):
        assert problem in line
        assert command in line
    assert not (tmp_path / "run").exists()


def test_a_stake_that_lets_cheating_pay_is_named_with_the_rest(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(
        NotReadyError, match=r"4\. With these settings cheating would pay.*Raise trust\.stake_tokens to \d+"
    ):
        initialise(
            config(
                bare,
                tmp_path / "run",
                rollouts={"max_prompt_tokens": 8},
                trust={"stake_tokens": 1, "probation_audits": 1},
            )
        )
    assert not (tmp_path / "run").exists()


def test_the_commands_cure_it(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError) as refused:
        check_ready(config(bare, tmp_path / "run", rollouts={"max_prompt_tokens": 8}), silent)
    template, prompt, _ = refused.value.message.splitlines()[1:]
    subprocess.run(["sh", "-c", template[template.index("printf") :]], check=True)
    wanted = re.search(r"--rollouts\.max_prompt_tokens (\d+)", prompt)
    assert wanted is not None
    cured = config(
        bare,
        tmp_path / "run",
        rollouts={"max_prompt_tokens": int(wanted.group(1))},
        validation={"foreign_calibration": True},
    )
    assert initialise(cured).descriptor().rollouts.max_prompt_tokens == int(wanted.group(1))


def test_the_proposed_prompt_length_fits_every_prompt(bare: Path, tmp_path: Path) -> None:
    """The longest prompt counts, not the first one that is too long."""
    shutil.copy(save_policy(tmp_path / "other", seed=0) / "chat_template.jinja", bare)
    known = {"foreign_calibration": True}
    with pytest.raises(ConfigError) as refused:
        check_ready(config(bare, tmp_path, rollouts={"max_prompt_tokens": 8}, validation=known), silent)
    wanted = re.search(r"Raise it to (\d+)", str(refused.value))
    assert wanted is not None
    check_ready(config(bare, tmp_path, rollouts={"max_prompt_tokens": int(wanted.group(1))}, validation=known), silent)


def test_one_problem_is_reported_as_itself(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingTemplateError, match="chat template"):
        check_ready(config(bare, tmp_path, validation={"foreign_calibration": True}), silent)


def test_a_model_that_is_not_there_does_not_hide_wrong_tasks(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"no model directory(.|\n)*riddles"):
        check_ready(config(tmp_path / "nowhere", tmp_path, tasks={"source": "builtin:riddles"}), silent)


def test_completions_that_the_model_has_no_positions_for_are_refused(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"positions, the model has \d+\. Lower rollouts\.max_new_tokens to \d+"):
        check_ready(config(bare, tmp_path, rollouts={"max_new_tokens": 100_000}), silent)
