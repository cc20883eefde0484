"""A worker's key in one small file, to be kept elsewhere: credit and trust belong to the key, not to the machine.

With a passphrase the file is encrypted (Argon2id, then XSalsa20-Poly1305); without one it is as good as the key itself. It names
the public key, so that backups can be distinguished without opening them. Nothing that exists is ever overwritten.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nacl.pwhash.argon2id as argon2id
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox
from nacl.utils import random as random_bytes

from shoal.errors import KeyFileError, ShoalError
from shoal.files import write_atomic
from shoal.identity import Keypair

FORMAT = "shoal-key/1"
MAX_BYTES = 4096
OPERATIONS = argon2id.OPSLIMIT_MODERATE
MEMORY_BYTES = argon2id.MEMLIMIT_MODERATE
LARGEST_MEMORY_BYTES = 4 * argon2id.MEMLIMIT_MODERATE
"""A file from elsewhere must not make this machine allocate what it likes."""
LARGEST_OPERATIONS = 16


class KeyBackupError(ShoalError):
    """A backup of a key that cannot be written or read."""

    code = "key_backup"
    permanent = True


def write_backup(key_file: Path, backup: Path, passphrase: str | None) -> str:
    """Writes the backup and reads it again; the public key. `None` writes the key in plain text."""
    keypair = Keypair.load(key_file)
    seed = bytes.fromhex(key_file.read_text().strip())
    if os.path.lexists(backup):
        raise KeyBackupError(f"{backup} exists already.", hint="Name another file; none is overwritten.")
    if passphrase == "":
        raise KeyBackupError("An empty passphrase protects nothing.", hint="Give one, or --plain.")
    body = {"seed": seed.hex()} if passphrase is None else _encrypted(seed, passphrase)
    text = json.dumps({"format": FORMAT, "public": keypair.public, **body}, indent=1)
    write_atomic(backup, text.encode() + b"\n", mode=0o600)
    assert _opened(backup, passphrase)[0] == seed
    return keypair.public


def is_encrypted(backup: Path) -> bool:
    return "seed" not in _fields(backup)


def restore_backup(backup: Path, key_file: Path, passphrase: str | None) -> str:
    """Writes the key file, unless there is one; the public key. A key file that holds this key already is left alone."""
    seed, public = _opened(backup, passphrase)
    if os.path.lexists(key_file):
        if _same_key(key_file, public):
            return public
        raise KeyBackupError(
            f"{key_file} holds another key already.",
            hint="Back that up and move it away first; a key is an account, and nothing brings it back.",
        )
    write_atomic(key_file, seed.hex().encode() + b"\n", mode=0o600)
    return public


def _same_key(key_file: Path, public: str) -> bool:
    try:
        return Keypair.load(key_file).public == public
    except KeyFileError:
        return False


def _encrypted(seed: bytes, passphrase: str) -> dict[str, Any]:
    salt = random_bytes(argon2id.SALTBYTES)
    box = SecretBox(_derived(passphrase, salt, OPERATIONS, MEMORY_BYTES))
    return {
        "kdf": "argon2id",
        "salt": salt.hex(),
        "operations": OPERATIONS,
        "memory_bytes": MEMORY_BYTES,
        "box": bytes(box.encrypt(seed)).hex(),
    }


def _opened(backup: Path, passphrase: str | None) -> tuple[bytes, str]:
    """Seed and public key; refused unless they belong to each other."""
    fields = _fields(backup)
    try:
        seed = bytes.fromhex(fields["seed"]) if "seed" in fields else _decrypted(fields, passphrase, backup)
        keypair = Keypair.from_seed(seed)
    except (KeyError, TypeError, ValueError):
        raise _damaged(backup) from None
    if keypair.public != fields.get("public"):
        raise _damaged(backup)
    return seed, keypair.public


def _decrypted(fields: Mapping[str, Any], passphrase: str | None, backup: Path) -> bytes:
    if passphrase is None:
        raise KeyBackupError(f"{backup} is encrypted.", hint="Give its passphrase.")
    operations, memory_bytes = int(fields["operations"]), int(fields["memory_bytes"])
    if fields["kdf"] != "argon2id" or operations > LARGEST_OPERATIONS or memory_bytes > LARGEST_MEMORY_BYTES:
        raise _damaged(backup)
    box = SecretBox(_derived(passphrase, bytes.fromhex(fields["salt"]), operations, memory_bytes))
    try:
        return box.decrypt(bytes.fromhex(fields["box"]))
    except CryptoError:
        raise KeyBackupError(f"The passphrase does not open {backup}.", hint="Or the file was damaged.") from None


def _derived(passphrase: str, salt: bytes, operations: int, memory_bytes: int) -> bytes:
    try:
        return argon2id.kdf(SecretBox.KEY_SIZE, passphrase.encode(), salt, opslimit=operations, memlimit=memory_bytes)
    except CryptoError as error:
        raise ValueError(str(error)) from None


def _fields(backup: Path) -> dict[str, Any]:
    if backup.exists() and not backup.is_file():  # a pipe would be waited for
        raise KeyBackupError(f"{backup} is no file.", hint="Check the path.")
    try:
        with backup.open("rb") as file:
            fields = json.loads(file.read(MAX_BYTES + 1)[:MAX_BYTES])
    except OSError as error:
        raise KeyBackupError(f"{backup} cannot be read: {error.strerror}.", hint="Check the path.") from None
    except (ValueError, RecursionError):
        raise _damaged(backup) from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise KeyBackupError(f"{backup} is no backup of a Shoal key.", hint="`shoal key backup` writes one.")
    return fields


def _damaged(backup: Path) -> KeyBackupError:
    return KeyBackupError(f"{backup} was damaged.", hint="Use another copy of it.")
