"""Rewards in whole swarms: programs and formulas are scored again by the validator, and a reward model is the validator's alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from end_to_end.problems import STEPS, code_task, math_task, taught_policy, write_problems
from end_to_end.swarm import DEADLINE_S, Swarm, small_config, swarm, worker_named
from shoal.cli import main as cli
from shoal.config import TasksConfig
from shoal.curation import make_pairs, read_candidates
from shoal.inspection import Record, explain, open_recording
from shoal.policy import bundled_directory
from shoal.policy.reward_model import RewardModel, build_classifier
from shoal.protocol.verdicts import Reason
from shoal.tasks import CODEC_FILES, load_tasks, score

OWNER_ROLES = ("coordinator", "trainer", "relay-1", "validator")
RANKED = "reward_model:polite"
WEIGHT = 0.5
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="run `make system`")


def accepted(directory: Path) -> list[Record]:
    return [record for record in open_recording([directory]).records() if record.verified]


def run_without_bubblewrap(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "empty").mkdir(exist_ok=True)
    environment = {**os.environ, "PATH": str(tmp_path / "empty")}
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.slow
@needs_sandbox
def test_programs_and_formulas_are_scored_again_and_only_where_a_sandbox_is(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        steps=2,
        model={"path": str(taught_policy(tmp_path))},
        reward={"target_lengths": []},
        validation={"foreign_calibration": True},
        tasks={"source": str(write_problems(tmp_path / "problems.jsonl")), "count": 0, "heldout": 1},
    )
    with swarm(config) as run:
        run.add_owner_roles(*OWNER_ROLES)
        run.add_worker("liar", "rewards")
        run.until("the liar's rejection", lambda status: rejections(status, "liar") > 0)
        run.add_worker("honest-1")
        run.until("the last version", lambda status: status.newest_version == 2)
        check_refusals(run, tmp_path)
        assert run.history().bans == [], "a tolerant verifier proves nothing"
        assert rejections(run.client.status(), "honest-1") == 0
    check_recomputed(config.run.dir)
    shown = list(open_recording([config.run.dir]).records())
    assert {reason for record in shown if record.verdict for reason in record.verdict.reasons} == {
        Reason.REWARD_TOLERANT
    }


def rejections(status: Any, name: str) -> int:
    worker = worker_named(status, name)
    return 0 if worker is None else int(worker.submissions_rejected)


def check_refusals(run: Swarm, tmp_path: Path) -> None:
    """Neither side scores code without a sandbox, and both say what to install."""
    joining = run_without_bubblewrap(tmp_path, "work", run.config.coordinator_url, "--dir", str(tmp_path / "stranger"))
    validating = run_without_bubblewrap(tmp_path, "validate", str(run.directory.run_file))
    for refused in (joining, validating):
        assert refused.returncode == os.EX_CONFIG, refused.stderr
        assert (
            "Model-written code cannot be run here: bubblewrap is not installed. Install bubblewrap" in refused.stderr
        )


def check_recomputed(directory: Path) -> None:
    """What the validator found is what the verifiers find here, and what honest workers had claimed."""
    tasks = {task.problem_id: task for step in STEPS for task in (code_task(step), math_task(step))}
    records = accepted(directory)
    for record in records:
        assert (
            score(tasks[record.rollout.task_id], record.text).reward == record.task_reward == record.rollout.task_reward
        )
    for kind in ("code", "math"):
        rewards = {record.task_reward for record in records if record.rollout.task_id.startswith(kind)}
        assert rewards == {0.0, 1.0}, f"{kind} answers are right and wrong"
    workload = open_recording([directory]).workload()
    assert workload is not None
    passed = next(one for one in records if one.rollout.task_id.startswith("code") and one.task_reward == 1.0)
    assert explain(passed, workload).why == "all 2 tests passed"


@pytest.mark.slow
def test_a_reward_model_is_the_validators_alone_and_learns_from_what_was_verified(tmp_path: Path) -> None:
    reward_model = save_reward_model(tmp_path / "reward_model")
    config = small_config(
        tmp_path / "run",
        steps=2,
        tasks={"source": str(write_sums(tmp_path / "sums.jsonl")), "count": 0, "heldout": 8},
        reward={"parts": {"task": 1.0, RANKED: WEIGHT}, "target_lengths": [16], "length_alpha": 0.003},
        validation={"reward_models": {"polite": str(reward_model)}},
    )
    with swarm(config) as run:
        run.add_owner_roles(*OWNER_ROLES, "evaluator")
        run.add_worker("honest-1")
        run.until("the last version", lambda status: status.newest_version == 2)
        assert rejections(run.client.status(), "honest-1") == 0
        check_rewards(run, RewardModel(str(reward_model)))
    candidates = list(read_candidates([config.run.dir]))
    assert {one.reward for one in candidates} == {0.0, 1.0}, (
        "only what was verified, not what the reward model itself said"
    )
    pairs, heldout = make_pairs(candidates, pairs_per_task=2)
    fit = ["reward-model", "train", str(config.run.dir), "--out", str(tmp_path / "fitted"), "--epochs", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*fit, "--pairs-per-task", "2", "--threads", "1"])
    assert not ended.value.code
    facts = json.loads((tmp_path / "fitted" / "reward_model.json").read_bytes())
    assert (facts["pairs"], facts["heldout_pairs"]) == (len(pairs), len(heldout))


def save_reward_model(directory: Path) -> Path:
    """A classifier with a new head: as good as any other for seeing whose rewards count."""
    build_classifier(bundled_directory()).save_pretrained(directory)
    for name in CODEC_FILES:
        if (bundled_directory() / name).is_file():
            shutil.copy(bundled_directory() / name, directory / name)
    return directory


def write_sums(path: Path) -> Path:
    """Sums as the policy knows them; every third is said to have no verifiable answer."""
    sums = load_tasks(TasksConfig(count=60, heldout=1)).train
    left = {"task_type": RANKED, "verification_info": {}}
    tasks = [
        task.model_copy(update={"problem_id": f"sum/{number}", **({} if number % 3 else left)})
        for number, task in enumerate(sums)
    ]
    path.write_text("".join(f"{task.model_dump_json()}\n" for task in tasks))
    return path


def check_rewards(run: Swarm, reward_model: RewardModel) -> None:
    """The worker claims what it can know; the validator adds the ranking; the trainer learns from the sum."""
    groups: dict[str, list[Record]] = {}
    for record in accepted(run.config.run.dir):
        groups.setdefault(record.group_id, []).append(record)
    seen = set()
    for records in groups.values():
        is_sum = int(records[0].rollout.task_id.removeprefix("sum/")) % 3 != 0
        chances = reward_model.rank(
            records[0].rollout.input_tokens, [record.rollout.output_tokens for record in records]
        )
        for record, chance in zip(records, chances, strict=True):
            claim, penalty = record.rollout.task_reward, record.rollout.length_penalty
            assert record.rollout.reward == pytest.approx(claim - penalty)
            assert is_sum or claim == 0.0
            gains = WEIGHT * chance + (0.0 if is_sum else chance)
            assert record.task_reward == pytest.approx(claim + (0.0 if is_sum else chance), abs=1e-5)
            assert record.reward == pytest.approx(claim + gains - penalty, abs=1e-5)
        seen.add(is_sum)
    assert seen == {True, False}
    check_trained(run, [record for records in groups.values() for record in records])


def check_trained(run: Swarm, records: list[Record]) -> None:
    for version in run.history().versions[1:]:
        rewards = [record.reward for record in records if record.batch_step == version.version - 1]
        assert version.report["reward_mean"] == pytest.approx(fmean(rewards))
