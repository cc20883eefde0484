import dataclasses

import pytest

from shoal.errors import SignatureError
from shoal.files import digest_bytes
from shoal.identity import verify_signature
from shoal.protocol.signing import (
    BODY_HEADER,
    KEY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    RequestStamp,
    RequestTarget,
    check_stamp,
    stamp_request,
    submission_message,
)
from support.samples import keypair

WORKER = keypair("worker")
BODY = digest_bytes(b"{}")
REQUEST = RequestTarget("run-1", "audience", "POST", "/v1/leases", "a=1", BODY)


def stamp() -> RequestStamp:
    return stamp_request(WORKER, REQUEST, now=1_000.25)


def test_a_stamp_survives_the_trip_through_headers_and_verifies() -> None:
    received = RequestStamp.from_headers(stamp().headers())
    check_stamp(received, REQUEST)
    assert (received.key, received.time) == (WORKER.public, "1000.250")


def test_the_method_may_be_written_in_any_case() -> None:
    check_stamp(stamp(), dataclasses.replace(REQUEST, method="post"))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RequestTarget)])
def test_every_part_of_the_request_is_signed(field: str) -> None:
    with pytest.raises(SignatureError):
        check_stamp(stamp(), dataclasses.replace(REQUEST, **{field: "other"}))


@pytest.mark.parametrize("field", ["key", "time", "nonce", "signature"])
def test_every_part_of_the_stamp_is_bound(field: str) -> None:
    other = {"key": keypair("other").public, "time": "1000.251", "nonce": "0" * 32, "signature": "0" * 128}
    with pytest.raises(SignatureError):
        check_stamp(dataclasses.replace(stamp(), **{field: other[field]}), REQUEST)


def test_nonces_are_never_repeated() -> None:
    assert len({stamp().nonce for _ in range(100)}) == 100


@pytest.mark.parametrize("missing", [KEY_HEADER, TIME_HEADER, NONCE_HEADER, BODY_HEADER, SIGNATURE_HEADER])
def test_a_request_without_a_whole_stamp_must_be_signed(missing: str) -> None:
    headers = stamp().headers()
    del headers[missing]
    with pytest.raises(SignatureError, match="must be signed"):
        RequestStamp.from_headers(headers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (KEY_HEADER, "ab" * 31),
        (KEY_HEADER, "zz" * 32),
        (KEY_HEADER, WORKER.public.upper()),
        (TIME_HEADER, "nan"),
        (TIME_HEADER, "inf"),
        (TIME_HEADER, "1e3"),
        (TIME_HEADER, "-1.000"),
        (TIME_HEADER, "1000.250 "),
        (TIME_HEADER, "٣.000"),
        (NONCE_HEADER, "short"),
        (NONCE_HEADER, "A" * 32),
        (NONCE_HEADER, "0" * 65),
        (BODY_HEADER, "ab" * 31),
        (BODY_HEADER, BODY.upper()),
    ],
)
def test_a_stamp_has_exactly_one_spelling(name: str, value: str) -> None:
    with pytest.raises(SignatureError, match="malformed"):
        RequestStamp.from_headers(stamp().headers() | {name: value})


@pytest.mark.parametrize("signature", ["", "zz", "ab" * 63, "not hex at all"])
def test_a_malformed_signature_is_refused_like_a_wrong_one(signature: str) -> None:
    with pytest.raises(SignatureError):
        check_stamp(dataclasses.replace(stamp(), signature=signature), REQUEST)


def test_messages_of_requests_and_submissions_cannot_be_mistaken_for_each_other() -> None:
    request = REQUEST.message("1.000", "0" * 32)
    submission = submission_message("run-1", "lease", BODY)
    assert request.split(b"\n")[0] != submission.split(b"\n")[0]


def test_a_submission_signature_names_run_lease_and_file() -> None:
    signature = WORKER.sign(submission_message("run-1", "lease", BODY))
    verify_signature(WORKER.public, submission_message("run-1", "lease", BODY), signature)
    for other in (("run-2", "lease", BODY), ("run-1", "other", BODY), ("run-1", "lease", digest_bytes(b""))):
        with pytest.raises(SignatureError):
            verify_signature(WORKER.public, submission_message(*other), signature)
