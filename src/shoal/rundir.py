"""Where the owner's side of a run lives on disk.

One directory holds keys, the run secret, the descriptor, the origin's files, the store and the logs. Roles on one host
share it; a role on another host needs only its own key, the run file and the address of the coordinator. The directory is
where it is found: it may be used from any working directory, moved, and restored elsewhere.
"""

import contextlib
import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal.config import ShoalConfig, load_config
from shoal.errors import ConfigError, KeyFileError, ShoalError
from shoal.files import write_atomic
from shoal.identity import Keypair
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.protocol.steps import SECRET_BYTES, Rewind, is_void, secret_commitment

DESCRIPTOR_NAME = "descriptor.json"
ROLES = ("coordinator", "trainer", "validator", "evaluator")
SEVERAL = ("validator", "evaluator", "relay-")
"""Beginnings of the directories of roles that a host may run several of."""
_CHECKPOINT = "step-"


class RunDirectory:
    def __init__(self, root: Path) -> None:
        root = root.absolute()
        self.root = root
        self.run_file = root / "run.toml"
        self.descriptor_file = root / DESCRIPTOR_NAME
        self.origin = root / "origin"
        self.store = root / "coordinator" / "store.db"
        self.submissions = root / "coordinator" / "submissions"
        self.trainer = root / "trainer"
        self.checkpoints = checkpoints_of(self.trainer)
        self.logs = root / "logs"
        self.events = root / "events"
        self.summary_file = root / "summary.json"
        self.report_file = root / "report.html"
        self.view_file = root / "view.svg"
        self.ledger_file = root / "ledger.jsonl"
        self.create_lock = root / "create.lock"
        self.supervisor_lock = root / "supervisor.lock"
        self._keys = root / "keys"
        self.relay_keys_file = root / "keys" / "relays.txt"
        self._secret = root / "keys" / "run.secret"

    @property
    def is_initialised(self) -> bool:
        return self.descriptor_file.exists()

    def log_file(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def remove_run(self) -> None:
        """Removes what a run has written, and nothing else that may lie in its directory."""
        own = [path for path in vars(self).values() if path.parent == self.root and path != self.supervisor_lock]
        several = [path for kind in SEVERAL for path in self.root.glob(f"{kind}*")]
        for path in {*own, *several, self.store.parent, self.root / "workers"}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def key_file(self, role: str) -> Path:
        return self._keys / f"{role}.key"

    def key(self, role: str) -> Keypair:
        return Keypair.load_or_create(self.key_file(role))

    def existing_key(self, role: str) -> Keypair:
        return Keypair.load(self.key_file(role))

    def role_keys(self) -> dict[str, str]:
        """Public key of each of the owner's roles → role."""
        return {self.existing_key(role).public: role for role in ROLES}

    def relay_keys(self) -> set[str]:
        """Public keys of the owner's relays: those of this directory, and those of other hosts that a file names, one per line."""
        own = set[str]()
        for path in self.root.glob("relay-*/relay.key"):
            with contextlib.suppress(KeyFileError):  # being written, or of another user
                own.add(Keypair.load(path).public)
        named = self.relay_keys_file.read_text().split() if self.relay_keys_file.exists() else []
        return own | set(named)

    def create_secret(self) -> bytes:
        """A secret from the system's randomness alone: slots and audits follow from it. One that was there before, whose bytes
        somebody may know, is replaced unless a descriptor that this run published commits to it."""
        secret = self._read_secret()
        if not self._has_published(secret):
            secret = secrets.token_bytes(SECRET_BYTES)
            write_atomic(self._secret, secret.hex().encode(), mode=0o600)
        return secret

    def _has_published(self, secret: bytes) -> bool:
        try:
            published = open_descriptor((self.origin / DESCRIPTOR_NAME).read_bytes(), self.existing_key("run").public)
        except (OSError, ShoalError):
            return False
        return published.secret_commitment == secret_commitment(secret)

    def secret(self) -> bytes:
        """The run secret; one that the signed descriptor does not commit to is refused."""
        secret = self._read_secret()
        if len(secret) != SECRET_BYTES:
            raise KeyFileError(f"The run secret {self._secret} cannot be read.", hint="Restore it from a backup.")
        if self.is_initialised and secret_commitment(secret) != self.descriptor().secret_commitment:
            raise KeyFileError(
                f"The run secret {self._secret} is not the one that the run's descriptor commits to.",
                hint="Restore it from a backup.",
            )
        return secret

    def _read_secret(self) -> bytes:
        try:
            return bytes.fromhex(self._secret.read_text())
        except (OSError, ValueError):
            return b""

    def descriptor(self) -> RunDescriptor:
        try:
            data = self.descriptor_file.read_bytes()
        except OSError:
            raise ConfigError(f"{self.root} holds no run.", hint="Make one with `shoal init RUN_FILE`.") from None
        return open_descriptor(data)

    def config(self) -> ShoalConfig:
        return located(load_config(self.run_file), self.root)


def checkpoints_of(work_dir: Path) -> Path:
    """Where a trainer that works in `work_dir` keeps its checkpoints."""
    return work_dir / "checkpoints"


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"{_CHECKPOINT}{step:08d}"


def checkpoint_step(path: Path) -> int:
    return int(path.name.removeprefix(_CHECKPOINT))


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """Steps that can be resumed, oldest first."""
    return sorted(checkpoint_step(path) for path in checkpoints.glob(f"{_CHECKPOINT}*"))


def void_checkpoints(checkpoints: Path, rewinds: Sequence[Rewind]) -> list[int]:
    """Steps whose checkpoint a rewind voided, oldest first."""
    return [step for step in checkpoint_steps(checkpoints) if is_void(_epoch_of(checkpoints, step), step, rewinds)]


def _epoch_of(checkpoints: Path, step: int) -> int:
    """In which a checkpoint was made; one that cannot be read counts as of the first, and its load says what is wrong."""
    try:
        return int(json.loads((checkpoint_path(checkpoints, step) / "trainer.json").read_bytes())["epoch"])
    except (OSError, ValueError, KeyError):
        return 0


def located(config: ShoalConfig, root: Path) -> ShoalConfig:
    """The same run, in this directory."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": root.absolute()})})


def is_address(where: str) -> bool:
    return "://" in where


def load_run(where: str | Path | None, settings: Sequence[str] = ()) -> ShoalConfig:
    """The run that somebody means by a run file, a run directory, or nothing: the directory of `run.dir`, if it holds a run.

    A run file that lies in a run directory means that directory, wherever it lay when it was written.
    """
    if where is None:
        config = load_config(None, settings)
        directory = RunDirectory(config.run.dir)
        return (
            located(load_config(directory.run_file, settings), directory.root) if directory.is_initialised else config
        )
    if is_address(str(where)):
        raise ConfigError("This works on the run's files, not over the network.", hint="Run it where the run lives.")
    path = Path(where)
    if path.is_dir():
        RunDirectory(path).descriptor()  # refuses a directory that holds no run
        path = RunDirectory(path).run_file
    config = load_config(path, settings)
    return located(config, path.parent) if RunDirectory(path.parent).is_initialised else config
