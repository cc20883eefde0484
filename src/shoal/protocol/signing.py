"""Signed requests: key, time, nonce and an Ed25519 signature over everything the server will act on.

The run id and the audience (the coordinator's key) are part of the message, so that a request cannot be shown to another run
or another server; the nonce is single-use inside the clock window.
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
"""Digest of an upload, so that its signature can be checked before the first byte is read."""

PROTOCOL_VERSION = 1
"""What releases that understand each other share; the descriptor and every signed request name it."""
TIME_PATTERN = re.compile(r"[0-9]{1,12}\.[0-9]{3}")
NONCE_PATTERN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class RequestStamp:
    """The headers of a signed request."""

    key: str
    time: str
    nonce: str
    signature: str

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> "RequestStamp":
        spoken = headers.get(PROTOCOL_HEADER, str(PROTOCOL_VERSION))
        if spoken != str(PROTOCOL_VERSION):
            raise RefusedError(
                "protocol_version",
                f"This run speaks protocol {PROTOCOL_VERSION}, your request {spoken[:20]!r}.",
                hint="Install the release of shoal that the run uses.",
                status=426,
            )
        try:
            stamp = cls(*(headers[name] for name in (KEY_HEADER, TIME_HEADER, NONCE_HEADER, SIGNATURE_HEADER)))
        except KeyError:
            raise SignatureError("This request must be signed.", hint="Use the shoal client of this release.") from None
        # One spelling each: a key in capitals would be another identity with the same signature.
        if not (is_digest(stamp.key) and TIME_PATTERN.fullmatch(stamp.time) and NONCE_PATTERN.fullmatch(stamp.nonce)):
            raise SignatureError("The key, the time or the nonce of this request is malformed.")
        return stamp

    def headers(self) -> dict[str, str]:
        return {
            PROTOCOL_HEADER: str(PROTOCOL_VERSION),
            KEY_HEADER: self.key,
            TIME_HEADER: self.time,
            NONCE_HEADER: self.nonce,
            SIGNATURE_HEADER: self.signature,
        }


def request_message(
    run_id: str, audience: str, method: str, path: str, query: str, body_digest: str, time: str, nonce: str
) -> bytes:
    fields = ("shoal-request/1", run_id, audience, method.upper(), path, query, body_digest, time, nonce)
    return "\n".join(fields).encode()


def stamp_request(
    keypair: Keypair, run_id: str, audience: str, method: str, path: str, query: str, body_digest: str, now: float
) -> RequestStamp:
    time, nonce = f"{now:.3f}", secrets.token_hex(16)
    message = request_message(run_id, audience, method, path, query, body_digest, time, nonce)
    return RequestStamp(keypair.public, time, nonce, keypair.sign(message))


def check_stamp(
    stamp: RequestStamp, run_id: str, audience: str, method: str, path: str, query: str, body_digest: str
) -> None:
    message = request_message(run_id, audience, method, path, query, body_digest, stamp.time, stamp.nonce)
    verify_signature(stamp.key, message, stamp.signature)


def submission_message(run_id: str, lease_id: str, file_digest: str) -> bytes:
    """What a worker signs about its file; kept as evidence with the verdict."""
    return f"shoal-submission/1\n{run_id}\n{lease_id}\n{file_digest}".encode()
