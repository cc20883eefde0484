"""Where the owner's side of a run lives on disk.

One directory holds keys, the run secret, the descriptor, the origin's files, the store and the logs. Roles on one host
share it; a role on another host needs only its own key, the run file and the address of the coordinator.
"""

import secrets
from pathlib import Path

from blake3 import blake3

from shoal.config import ShoalConfig, load_config
from shoal.errors import ConfigError, KeyFileError
from shoal.files import write_atomic
from shoal.identity import Keypair
from shoal.protocol.assignment import SECRET_BYTES
from shoal.protocol.descriptor import RunDescriptor, open_descriptor

ROLES = ("coordinator", "trainer", "validator", "evaluator")


class RunDirectory:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_file = root / "run.toml"
        self.descriptor_file = root / "descriptor.json"
        self.origin = root / "origin"
        self.store = root / "coordinator" / "store.db"
        self.submissions = root / "coordinator" / "submissions"
        self.trainer = root / "trainer"
        self.logs = root / "logs"
        self.events = root / "events"
        self._keys = root / "keys"
        self._secret = root / "keys" / "run.secret"

    @property
    def is_initialised(self) -> bool:
        return self.descriptor_file.exists()

    def key(self, role: str) -> Keypair:
        return Keypair.load_or_create(self._keys / f"{role}.key")

    def existing_key(self, role: str) -> Keypair:
        return Keypair.load(self._keys / f"{role}.key")

    def role_keys(self) -> dict[str, str]:
        """Public key of each of the owner's roles → role."""
        return {self.existing_key(role).public: role for role in ROLES}

    def create_secret(self, seed: int) -> bytes:
        """A new run secret. A seed other than 0 makes it repeatable, and slots foreseeable to whoever guesses the seed."""
        if not self._secret.exists():
            secret = blake3(f"run seed {seed}".encode()).digest() if seed else secrets.token_bytes(SECRET_BYTES)
            write_atomic(self._secret, secret.hex().encode(), mode=0o600)
        return self.secret()

    def secret(self) -> bytes:
        try:
            secret = bytes.fromhex(self._secret.read_text())
        except (OSError, ValueError):
            secret = b""
        if len(secret) != SECRET_BYTES:
            raise KeyFileError(f"The run secret {self._secret} cannot be read.", hint="Restore it from a backup.")
        return secret

    def descriptor(self) -> RunDescriptor:
        try:
            data = self.descriptor_file.read_bytes()
        except OSError:
            raise ConfigError(f"{self.root} holds no run.", hint="Make one with `shoal init RUN_FILE`.") from None
        return open_descriptor(data)

    def config(self) -> ShoalConfig:
        return load_config(self.run_file)
