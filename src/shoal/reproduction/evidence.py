"""What a run left behind, checked before anything is repeated: descriptor, settings, ledger, rollout files, machine.

Reads a run directory, or the `evidence` of an export, which is laid out the same way. Signatures, the ledger's chain and books, and
the digest of every rollout file are checked; a file that is missing or was changed is named with its step and slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import ShoalConfig
from shoal.coordinator.ledger import verify_export
from shoal.coordinator.ledger.verification import verify_ledger
from shoal.errors import ShoalError
from shoal.files import digest_bytes
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.reproduction.history import History, RecordedFile
from shoal.rundir import RunDirectory
from shoal.training.machine import FILE as MACHINE
from shoal.training.machine import TrainingMachine

EVIDENCE = "evidence"
SHOWN = 20


class ReproductionError(ShoalError):
    """A run that cannot be repeated from what is here."""

    code = "reproduction"
    permanent = True


@dataclass(frozen=True)
class Evidence:
    directory: RunDirectory
    descriptor_bytes: bytes
    descriptor: RunDescriptor
    config: ShoalConfig
    history: History
    ledger_entries: int
    ledger_head: str
    files: dict[str, Path]
    """Digest → rollout file."""
    machine: TrainingMachine | None
    findings: list[str] = field(default_factory=list)
    """What does not hold about the inputs, most telling first."""

    def problem_with(self, file: RecordedFile) -> str:
        """Why a file cannot be used; empty if it can."""
        if file.digest in self.files:
            return ""
        return f"the rollout file of {file} (digest {file.digest[:16]}…) is missing or was changed"


def evidence_directory(where: Path) -> RunDirectory:
    return RunDirectory(where / EVIDENCE if (where / EVIDENCE / "descriptor.json").is_file() else where)


def read_evidence(where: Path, *, ledger: Sequence[bytes] | None = None, run_key: str | None = None) -> Evidence:
    """Everything that is needed to repeat the run; raises where nothing could be repeated at all.

    `ledger` are the lines of a run that has not exported its ledger itself.
    """
    directory = evidence_directory(where)
    data = _read(directory.descriptor_file)
    descriptor = open_descriptor(data, run_key)
    lines = _read(directory.ledger_file).splitlines() if ledger is None else ledger
    verification = verify_ledger(lines, descriptor.coordinator_key, run_key=descriptor.run_key)
    if verification.findings:
        first = verification.findings[0]
        raise ReproductionError(
            f"The ledger does not hold: entry {first.entry}: {first.text.rstrip('.')}.",
            hint="Nothing can be repeated from a ledger that was changed; `shoal ledger verify` shows all of it.",
        )
    history = History.of(verify_export(lines, descriptor.coordinator_key)[0])
    files = {digest_bytes(path.read_bytes()): path for path in sorted(directory.submissions.glob("*.parquet"))}
    return Evidence(
        directory=directory,
        descriptor_bytes=data,
        descriptor=descriptor,
        config=directory.config(),
        history=history,
        ledger_entries=verification.entries,
        ledger_head=verification.head,
        files=files,
        machine=TrainingMachine.load(directory.trainer),
        findings=[*_file_findings(history, files), *_machine_findings(directory)],
    )


def _machine_findings(directory: RunDirectory) -> Iterator[str]:
    if (directory.trainer / MACHINE).exists() and TrainingMachine.load(directory.trainer) is None:
        yield f"trainer/{MACHINE} cannot be read, so the class of the machine that trained is unknown"


def _file_findings(history: History, files: dict[str, Path]) -> Iterator[str]:
    """Files that a batch needs and that are not there; then also files that nobody vouches for, which may be those."""
    is_whole = True
    for trained in history.steps.values():
        for name in trained.unknown:
            yield f"step {trained.step} was trained on group {name}, of which the ledger accepts no file"
        missing = {group.file.digest: group.file for group in trained.groups if group.file.digest not in files}
        is_whole = is_whole and not missing
        for file in missing.values():
            yield f"step {trained.step} was trained on the file of {file}, digest {file.digest[:16]}…, missing or changed"
    strangers = [path.name for digest, path in files.items() if digest not in history.files]
    for name in () if is_whole else strangers[:SHOWN]:
        yield f"{name} has a digest that is in no verdict: it was changed, or has none yet"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReproductionError(
            f"{path} cannot be read: {(error.strerror or 'unreadable').lower()}.",
            hint="Name the directory of a run, or of an export with its evidence.",
        ) from None
