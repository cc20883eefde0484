import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import IntegrityError, KeyFileError, SignatureError
from shoal.identity import Envelope, Keypair, verify_signature

ALICE = Keypair.from_seed(b"a" * 32)
BOB = Keypair.from_seed(b"b" * 32)


def test_a_signature_belongs_to_one_key_and_one_message() -> None:
    signature = ALICE.sign(b"message")
    verify_signature(ALICE.public, b"message", signature)
    for key, message in ((BOB.public, b"message"), (ALICE.public, b"massage")):
        with pytest.raises(SignatureError):
            verify_signature(key, message, signature)


@pytest.mark.parametrize("signature", ["", "zz", "00", "00" * 63, "00" * 64, "00" * 65])
def test_malformed_signatures_are_wrong_signatures(signature: str) -> None:
    with pytest.raises(SignatureError):
        verify_signature(ALICE.public, b"message", signature)


@pytest.mark.parametrize("key", ["", "zz" * 32, "00" * 31, "ff" * 32])
def test_malformed_keys_verify_nothing(key: str) -> None:
    with pytest.raises(SignatureError):
        verify_signature(key, b"message", ALICE.sign(b"message"))


@pytest.mark.parametrize("key", ["01" + "00" * 31, "00" * 32, "ec" + "ff" * 30 + "7f"])
def test_keys_under_which_one_signature_fits_any_message_verify_nothing(key: str) -> None:
    neutral = "01" + "00" * 31 + "00" * 32
    for message in (b"one", b"other"):
        with pytest.raises(SignatureError):
            verify_signature(key, message, neutral)


def test_a_key_is_made_once_for_its_owner_alone_and_loaded_ever_after(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "worker.key"
    made = Keypair.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Keypair.load_or_create(path).public == Keypair.load(path).public == made.public
    assert Keypair.generate().public != made.public


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no key file at .*nowhere\.key"):
        Keypair.load(tmp_path / "nowhere.key")


@pytest.mark.parametrize("content", [b"", b"not hex", b"ab" * 31, b"ab" * 33, b"\xff\xfe\x00"])
def test_a_file_that_is_no_key_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "worker.key"
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match="is not a Shoal key"):
        Keypair.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_file_that_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "directory.key").mkdir()
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        Keypair.load_or_create(tmp_path / "directory.key")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KeyFileError, match="No key can be written"):
        Keypair.load_or_create(tmp_path / "file" / "worker.key")


def test_a_dangling_link_is_not_replaced_by_a_new_key(tmp_path: Path) -> None:
    os.symlink(tmp_path / "unmounted" / "worker.key", tmp_path / "worker.key")
    with pytest.raises(KeyFileError, match="no key file"):
        Keypair.load_or_create(tmp_path / "worker.key")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_an_envelope_carries_any_text_unchanged(payload: str) -> None:
    sealed = Envelope.seal("head", payload, ALICE)
    assert Envelope.from_bytes(sealed.to_bytes()).open("head", ALICE.public) == payload


def test_an_envelope_is_of_one_kind_and_one_key() -> None:
    sealed = Envelope.seal("manifest", "{}", ALICE)
    with pytest.raises(SignatureError, match="Expected a signed head, got a signed manifest"):
        sealed.open("head", ALICE.public)
    with pytest.raises(SignatureError, match="not by the trusted key"):
        sealed.open("manifest", BOB.public)


@pytest.mark.parametrize("field", ["kind", "payload", "key", "signature"])
def test_no_field_of_an_envelope_can_be_exchanged(field: str) -> None:
    fields = json.loads(Envelope.seal("head", "{}", ALICE).to_bytes())
    fields[field] = {"kind": "manifest", "payload": "{ }", "key": BOB.public, "signature": BOB.sign(b"")}[field]
    forged = Envelope.from_bytes(json.dumps(fields).encode())
    with pytest.raises(SignatureError):
        forged.open("manifest" if field == "kind" else "head", BOB.public if field == "key" else ALICE.public)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b"\xff",
        b'{"kind": "head", "payload": "{}", "key": "k"}',
        b'{"kind": "head", "payload": {}, "key": "k", "signature": "s"}',
        b'{"kind": 1, "payload": "{}", "key": "k", "signature": "s"}',
    ],
)
def test_bytes_that_are_no_envelope_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Envelope.from_bytes(data)


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"kind": "head", "payload": "\\ud800", "key": "k", "signature": "s"}'],
    ids=["deep", "lone surrogate"],
)
def test_bytes_that_nobody_can_have_signed_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Envelope.from_bytes(data)
