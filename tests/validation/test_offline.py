"""A third party comes to the validator's verdict with public things alone."""

import shutil
from pathlib import Path

import pytest

from protocol.samples import RUN_SECRET, keypair
from shoal.errors import ConfigError
from shoal.protocol.assignment import step_secret
from shoal.protocol.verdicts import Reason
from shoal.validation.offline import OfflineVerdict, verdict_lines, verify_file
from validation.submissions import Submission, submit
from worker.tiny_run import TinyRun


@pytest.fixture(scope="session")
def honest(tiny_run: TinyRun) -> Submission:
    return submit(tiny_run)


@pytest.fixture
def policy(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """Version 0 as an export has it: model files and weights in one directory."""
    directory = tmp_path / "policy"
    shutil.copytree(tiny_run.root / "model", directory)
    shutil.copy(tiny_run.policies[0] / "model.safetensors", directory)
    return directory


def verdict_on(data: bytes, policy: Path, tiny_run: TinyRun, *, step: int = 3) -> OfflineVerdict:
    sealed = tiny_run.workload.descriptor.seal(keypair("run")).to_bytes()
    return verify_file(data, policy, sealed, step_secret(RUN_SECRET, step))


def test_honest_work_is_accepted_with_figures(honest: Submission, policy: Path, tiny_run: TinyRun) -> None:
    verdict = verdict_on(honest.data, policy, tiny_run)
    assert verdict.accepted
    assert verdict.figures.tokens == sum(len(rollout.output_tokens) for rollout in honest.rollouts)
    assert verdict_lines(verdict)[-1] == "accepted"


def test_a_lie_is_named_with_its_reason(honest: Submission, policy: Path, tiny_run: TinyRun) -> None:
    forged = honest.with_row(2, proofs=honest.rollouts[3].proofs)
    verdict = verdict_on(forged.data, policy, tiny_run)
    assert [finding.reason for finding in verdict.findings] == [Reason.COMMITMENT]
    assert verdict_lines(verdict)[-1] == "rejected"


def test_work_for_another_slot_is_seen_by_the_steps_secret(honest: Submission, policy: Path, tiny_run: TinyRun) -> None:
    verdict = verdict_on(honest.data, policy, tiny_run, step=4)
    assert [finding.reason for finding in verdict.findings] == [Reason.ASSIGNMENT]


def test_bytes_that_are_no_rollout_file_break_the_schema(policy: Path, tiny_run: TinyRun) -> None:
    verdict = verdict_on(b"PAR1", policy, tiny_run)
    assert (verdict.header, verdict.findings[0].reason) == (None, Reason.SCHEMA)


def test_a_secret_of_another_length_is_refused(honest: Submission, policy: Path, tiny_run: TinyRun) -> None:
    sealed = tiny_run.workload.descriptor.seal(keypair("run")).to_bytes()
    with pytest.raises(ConfigError, match="32 bytes"):
        verify_file(honest.data, policy, sealed, b"short")
