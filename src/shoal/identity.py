"""Ed25519 keys, signatures, and signed envelopes.

A public key is 64 hex digits, a signature 128. An envelope carries the exact payload text that was signed, so no canonical JSON
is needed; its kind is signed too, so that a manifest is never accepted as a head.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import nacl.bindings
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.exceptions import CryptoError

from shoal.errors import IntegrityError, KeyFileError, SignatureError
from shoal.files import write_atomic

KEY_BYTES, SIGNATURE_BYTES = 32, 64
DESCRIPTOR_KIND = "descriptor"
MAX_DESCRIPTOR_BYTES = 1 << 20


class Keypair:
    """A private key that never leaves its file and this object."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "Keypair":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Keypair":
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> "Keypair":
        try:
            seed = bytes.fromhex(path.read_text().strip())
        except FileNotFoundError:
            raise KeyFileError(
                f"There is no key file at {path}.", hint="Check the path, or let shoal make one."
            ) from None
        except OSError as error:
            raise KeyFileError(
                f"The key file {path} cannot be read: {error.strerror}.", hint="Check its owner and mode."
            ) from None
        except ValueError:
            seed = b""
        if len(seed) != 32:
            raise KeyFileError(f"{path} is not a Shoal key.", hint="A key file holds 64 hex digits; name another file.")
        return cls.from_seed(seed)

    @classmethod
    def load_or_create(cls, path: Path) -> "Keypair":
        if os.path.lexists(path):
            return cls.load(path)
        keypair = cls.generate()
        try:
            write_atomic(path, keypair._private.private_bytes_raw().hex().encode() + b"\n", mode=0o600)
        except OSError as error:
            raise KeyFileError(
                f"No key can be written to {path}: {error.strerror}.", hint="Name another file."
            ) from None
        return keypair

    def sign(self, message: bytes) -> str:
        return self._private.sign(message).hex()


def verify_signature(public: str, message: bytes, signature: str) -> None:
    # libsodium checks in half the time of OpenSSL, and refuses the few degenerate keys under which a signature fits any message.
    try:
        key, signed = bytes.fromhex(public), bytes.fromhex(signature)
        if (len(key), len(signed)) != (KEY_BYTES, SIGNATURE_BYTES):
            raise ValueError
        nacl.bindings.crypto_sign_open(signed + message, key)
    except (ValueError, CryptoError):
        raise SignatureError(f"The signature is not one of key {public[:12]}….") from None


@dataclass(frozen=True)
class Envelope:
    """A payload and the signature of the key that vouches for it."""

    kind: str
    payload: str
    key: str
    signature: str

    @classmethod
    def seal(cls, kind: str, payload: str, keypair: Keypair) -> "Envelope":
        return cls(kind, payload, keypair.public, keypair.sign(_signed_bytes(kind, payload)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Envelope":
        try:
            fields = json.loads(data)
            envelope = cls(**{name: fields[name] for name in ("kind", "payload", "key", "signature")})
            json.dumps(fields, ensure_ascii=False).encode()  # refuses lone surrogates, which no signer can have signed
        except (ValueError, KeyError, TypeError, RecursionError):
            raise IntegrityError("These bytes are not a signed envelope.") from None
        if not all(
            isinstance(value, str) for value in (envelope.kind, envelope.payload, envelope.key, envelope.signature)
        ):
            raise IntegrityError("A signed envelope holds text fields only.")
        return envelope

    def to_bytes(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    def open(self, kind: str, trusted_key: str) -> str:
        """The payload, if it is of this kind and vouched for by this key."""
        if self.kind != kind:
            raise SignatureError(f"Expected a signed {kind}, got a signed {self.kind}.")
        if self.key != trusted_key:
            raise SignatureError(
                f"The {kind} is signed by {self.key[:12]}…, not by the trusted key {trusted_key[:12]}…."
            )
        verify_signature(self.key, _signed_bytes(kind, self.payload), self.signature)
        return self.payload


def _signed_bytes(kind: str, payload: str) -> bytes:
    return f"shoal-envelope/1\n{kind}\n".encode() + payload.encode()
