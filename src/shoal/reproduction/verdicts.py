"""Verdicts of a run, repeated from their files: a drawn sample is audited in full, each with the weights that it names.

The draw follows from the ledger's head, so neither owner nor reader chooses. A rewarded lie that the run's own sample of audits did
not see is a difference too.
"""

import random
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shoal.broadcast import WireTensor
from shoal.broadcast.manifest import safetensors_header
from shoal.broadcast.wire import tensor_entry
from shoal.files import atomic_file
from shoal.policy.lora.files import write_adapter_config
from shoal.protocol.rollouts import TRUNCATED, Rollout
from shoal.reproduction.evidence import Evidence, ReproductionError
from shoal.reproduction.history import RecordedFile, TrainedGroup
from shoal.tasks import TaskSets, TextCodec
from shoal.tasks.datasets.transfer import tasks_of_run
from shoal.tasks.verifiers.requirements import verifier_names
from shoal.tasks.verifiers.reward_models import is_learned
from shoal.tasks.workload import Workload
from shoal.training.packing.samples import Group, Sample
from shoal.validation.checks import Checked, check_claims
from shoal.validation.findings import RejectedError
from shoal.validation.offline import OfflineVerdict, claim_of, verify_file

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class RepeatedVerdict:
    file: RecordedFile
    verdict: OfflineVerdict

    @property
    def agrees(self) -> bool:
        return self.verdict.accepted == self.file.accepted

    def __str__(self) -> str:
        recorded = "accepted" if self.file.accepted else f"rejected ({', '.join(self.file.reasons)})"
        found = ", ".join(finding.reason for finding in self.verdict.findings)
        repeated = "accepted" if self.verdict.accepted else f"rejected ({found})"
        return f"{self.file}, worker {self.file.worker[:12]}…: recorded {recorded}, repeated {repeated}"


class Auditor:
    """Rewards of files from their tokens, and verdicts of files from their policies."""

    def __init__(self, evidence: Evidence, model: Path, scratch: Path) -> None:
        self._evidence, self._model, self._scratch = evidence, model, scratch

    @cached_property
    def workload(self) -> Workload:
        found = self._tasks
        workload = Workload(self._evidence.descriptor, TextCodec.from_directory(self._model), found)
        if any(map(is_learned, verifier_names(found.train, self._evidence.descriptor.reward))):
            raise ReproductionError(
                "Rewards of this run come from a reward model, which is not among what is repeated here.",
                hint="Runs whose verifiers are programs can be repeated.",
            )
        return workload

    @cached_property
    def _tasks(self) -> TaskSets:
        found = tasks_of_run(self._evidence.descriptor, self._evidence.directory.root)
        if found is None:
            raise ReproductionError("The tasks that the owner served are not here.", hint="They lie in origin/shards.")
        return found

    def group(self, group: TrainedGroup) -> Group:
        """A group as the trainer had it: tokens from the file, rewards computed again."""
        checked = self._checked(group.file)
        numbers = checked.rows_by_group()[group.number]
        is_audited = group.number in group.file.audited
        return Group(group.group_id, [_sample(checked, number, group.file.version, is_audited) for number in numbers])

    def _checked(self, file: RecordedFile) -> Checked:
        if problem := self._evidence.problem_with(file):
            raise ReproductionError(f"{problem[:1].upper()}{problem[1:]}.")
        data = self._evidence.files[file.digest].read_bytes()
        secret = self._evidence.history.secret_of(file)
        if secret is None:
            raise ReproductionError(f"The secret of {file} is not in the ledger.")
        try:
            return check_claims(
                data, claim_of(data, file.digest, secret, self.workload.limits), self.workload, self._vocab
            )
        except RejectedError as error:
            raise ReproductionError(
                f"The file of {file} was accepted, but {error.finding.reason}: {error.finding.detail}."
            ) from None

    @cached_property
    def _vocab(self) -> int:
        from shoal.policy.directory import read_config

        return int(read_config(self._model).vocab_size)

    def draw(self, count: int, versions: Collection[int]) -> list[RecordedFile]:
        """Files whose policy will be at hand."""
        known = [
            file
            for _, file in sorted(self._evidence.history.files.items())
            if file.version in versions
            and file.digest in self._evidence.files
            and self._evidence.history.secret_of(file) is not None
        ]
        return random.Random(self._evidence.ledger_head).sample(known, min(count, len(known)))

    def keep_policy(self, version: int, tensors: Iterable[WireTensor]) -> None:
        """The weights of a version as its workers had them, with the model's other files."""
        target, lora = self._policy(version), self._evidence.config.model.adapter
        target.mkdir(parents=True)
        if lora is not None:
            write_adapter_config(target, lora, base=str(self._model.resolve()))
        for path in self._model.iterdir() if lora is None else ():
            if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
        rows = [(tensor_entry(tensor), tensor.data) for tensor in tensors]
        with atomic_file(target / WEIGHTS) as file:
            file.write(safetensors_header([entry for entry, _ in rows]))
            file.writelines(data for _, data in rows)

    def has_policy(self, version: int) -> bool:
        return (self._policy(version) / WEIGHTS).is_file()

    def audit(self, file: RecordedFile, calibration: str) -> RepeatedVerdict:
        data = self._evidence.files[file.digest].read_bytes()
        secret = self._evidence.history.secret_of(file)
        assert secret is not None, "only such files are drawn"
        return RepeatedVerdict(
            file,
            verify_file(
                data,
                self._policy(file.version),
                self._evidence.descriptor_bytes,
                secret,
                calibration=calibration,
                task_sets=self._tasks,
            ),
        )

    def _policy(self, version: int) -> Path:
        return self._scratch / "policies" / str(version)


def _sample(checked: Checked, number: int, version: int, is_audited: bool) -> Sample:
    row: Rollout = checked.rollouts[number]
    return Sample(
        prompt_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        reward=checked.rewards[number].total,
        task_reward=checked.rewards[number].task_reward,
        behaviour_logprobs=row.output_logprobs if is_audited else None,
        policy_version=version,
        truncated=row.finish_reason in TRUNCATED,
        segment_lengths=row.segment_lengths,
    )
