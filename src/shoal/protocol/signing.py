"""Signed requests: key, time, nonce, body digest and an Ed25519 signature over everything the server acts on.

The message includes the run id and the audience (the coordinator's key), so a request cannot be replayed to another run or
server. A nonce is valid once inside the clock window. The body's digest is a header, so the signature is checked before the body
is read.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import RefusedError, SignatureError
from shoal.files import is_digest
from shoal.identity import Keypair, verify_signature

KEY_HEADER = "x-shoal-key"
TIME_HEADER = "x-shoal-time"
NONCE_HEADER = "x-shoal-nonce"
SIGNATURE_HEADER = "x-shoal-signature"
PROTOCOL_HEADER = "x-shoal-protocol"
BODY_HEADER = "x-shoal-body"
"""Digest of the body, so that the signature can be checked before the first byte of the body is read."""
STAMP_HEADERS = (KEY_HEADER, TIME_HEADER, NONCE_HEADER, BODY_HEADER, SIGNATURE_HEADER)

PROTOCOL_VERSION = 1
"""Releases with the same number understand each other. The descriptor and every signed request carry it."""
TIME_PATTERN = re.compile(r"[0-9]{1,12}\.[0-9]{3}")
NONCE_PATTERN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class RequestTarget:
    """What a request is about. Its signature covers every field."""

    run_id: str
    audience: str
    method: str
    path: str
    query: str
    body_digest: str

    def message(self, time: str, nonce: str) -> bytes:
        fields = (self.run_id, self.audience, self.method.upper(), self.path, self.query, self.body_digest, time, nonce)
        return "\n".join(("shoal-request/1", *fields)).encode()


@dataclass(frozen=True)
class RequestStamp:
    """The headers of a signed request."""

    key: str
    time: str
    nonce: str
    body_digest: str
    signature: str

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> "RequestStamp":
        version = headers.get(PROTOCOL_HEADER, str(PROTOCOL_VERSION))
        if version != str(PROTOCOL_VERSION):
            raise RefusedError(
                "protocol_version",
                f"This run speaks protocol {PROTOCOL_VERSION}, your request {version[:20]!r}.",
                hint="Install the release of shoal that the run uses.",
                status=426,
            )
        try:
            stamp = cls(*(headers[name] for name in STAMP_HEADERS))
        except KeyError:
            raise SignatureError("This request must be signed.", hint="Use the shoal client of this release.") from None
        # One spelling each: a key in capitals would be another identity with the same signature.
        is_well_formed = is_digest(stamp.key) and is_digest(stamp.body_digest)
        if not (is_well_formed and TIME_PATTERN.fullmatch(stamp.time) and NONCE_PATTERN.fullmatch(stamp.nonce)):
            raise SignatureError("The key, the time, the nonce or the body digest of this request is malformed.")
        return stamp

    def headers(self) -> dict[str, str]:
        values = (self.key, self.time, self.nonce, self.body_digest, self.signature)
        return {PROTOCOL_HEADER: str(PROTOCOL_VERSION)} | dict(zip(STAMP_HEADERS, values, strict=True))


def stamp_request(keypair: Keypair, target: RequestTarget, now: float) -> RequestStamp:
    time, nonce = f"{now:.3f}", secrets.token_hex(16)
    return RequestStamp(keypair.public, time, nonce, target.body_digest, keypair.sign(target.message(time, nonce)))


def check_stamp(stamp: RequestStamp, target: RequestTarget) -> None:
    verify_signature(stamp.key, target.message(stamp.time, stamp.nonce), stamp.signature)


def restored_message(run_id: str, facts: Mapping[str, object]) -> bytes:
    """What the run key signs about a restore: which entries were kept, when the backup was made, and when it was restored."""
    names = ("entries", "head", "backup_made_at", "restored_at")
    return "\n".join(("shoal-restored/1", run_id, *(repr(facts.get(name)) for name in names))).encode()


def rewound_message(run_id: str, epoch: int | str, version: int | str, manifest_digest: str) -> bytes:
    """What the run key signs about a rewind: the epoch that begins, and the version that the run returned to."""
    return f"shoal-rewound/1\n{run_id}\n{epoch}\n{version}\n{manifest_digest}".encode()


def submission_message(run_id: str, lease_id: str, file_digest: str) -> bytes:
    """What a worker signs about its file; kept as evidence with the verdict."""
    return f"shoal-submission/1\n{run_id}\n{lease_id}\n{file_digest}".encode()
