"""A third party comes to the validator's verdict with public things alone."""

import json
import shutil
from pathlib import Path

import pytest

from shoal.coordinator.ledger import Entry
from shoal.errors import ConfigError
from shoal.protocol.steps import StepId, step_commitment, step_secret
from shoal.protocol.verdicts import Reason
from shoal.validation.offline import OfflineVerdict, recorded, verdict_lines, verify_file
from support.samples import RUN_SECRET, keypair
from support.submissions import Submission, submit
from support.tiny_run import TinyRun


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
    return verify_file(data, policy, sealed, step_secret(RUN_SECRET, StepId(step=step)))


def test_honest_work_is_accepted_with_metrics(honest: Submission, policy: Path, tiny_run: TinyRun) -> None:
    verdict = verdict_on(honest.data, policy, tiny_run)
    assert verdict.accepted
    assert verdict.metrics.tokens == sum(len(rollout.output_tokens) for rollout in honest.rollouts)
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


def entry(kind: str, seq: int = 0, **body: object) -> Entry:
    return Entry(seq=seq, at=0.0, kind=kind, body=json.dumps(body), previous="", hash="", signature="")


def ledger_of(digest: str, *, batch: bool = True) -> list[Entry]:
    step, secret = StepId(step=3), step_secret(RUN_SECRET, StepId(step=3))
    verdict = {
        "file": digest,
        "accepted": True,
        "groups": 2,
        "position": 0,
        "audit_drawn": [0, 1],
        "audit_rate": 1.0,
        "audit_step": step,
        "audited": [0, 1],
        "useful": [0, 1],
        "useful_rate": 1.0,
    }
    committed = entry("commitment", **step.fields(), commitment=step_commitment(step, secret))
    published = [entry("recorded", seq=2, **step.fields(), step_secret=secret.hex())] if batch else []
    return [committed, entry("verdict", seq=1, **step.fields(), **verdict), *published]


def test_the_ledger_brings_the_secret_the_verdict_and_the_draw(
    honest: Submission, policy: Path, tiny_run: TinyRun
) -> None:
    known = recorded(ledger_of(honest.claim().digest), honest.claim().digest)
    assert str(known) == "the ledger says accepted, groups 0, 1 drawn for an audit at rate 1"
    sealed = tiny_run.workload.descriptor.seal(keypair("run")).to_bytes()
    assert verify_file(honest.data, policy, sealed, known.step_secret).accepted


def test_a_file_that_the_ledger_does_not_know_or_not_yet_is_reported(honest: Submission) -> None:
    digest = honest.claim().digest
    with pytest.raises(ConfigError, match="no verdict on a file"):
        recorded(ledger_of("0" * 64), digest)
    with pytest.raises(ConfigError, match="secret of step 3 yet"):
        recorded(ledger_of(digest, batch=False), digest)
