"""A key's backup: the same key comes back, only with its passphrase, over nothing, and from no damaged file."""

import json
import os
from pathlib import Path

import nacl.pwhash.argon2id as argon2id
import pytest

from shoal.cli.main import main
from shoal.contributor import keys
from shoal.contributor.keys import KeyBackupError, is_encrypted, restore_backup, write_backup
from shoal.identity import Keypair


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "OPERATIONS", argon2id.OPSLIMIT_MIN)
    monkeypatch.setattr(keys, "MEMORY_BYTES", argon2id.MEMLIMIT_MIN)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    Keypair.load_or_create(tmp_path / "worker.key")
    return tmp_path / "worker.key"


@pytest.mark.parametrize("passphrase", ["correct horse", "päß wört", None])
def test_a_key_comes_back_from_its_backup(passphrase: str | None, key: Path, tmp_path: Path) -> None:
    public = write_backup(key, tmp_path / "backup", passphrase)
    assert is_encrypted(tmp_path / "backup") is (passphrase is not None)
    assert restore_backup(tmp_path / "backup", tmp_path / "new" / "worker.key", passphrase) == public
    assert Keypair.load(tmp_path / "new" / "worker.key").public == public
    assert (tmp_path / "new" / "worker.key").read_bytes() == key.read_bytes()
    assert (tmp_path / "new" / "worker.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o600


def test_an_encrypted_backup_does_not_hold_the_key(key: Path, tmp_path: Path) -> None:
    write_backup(key, tmp_path / "one", "secret")
    write_backup(key, tmp_path / "two", "secret")
    seed = key.read_text().strip()
    assert seed not in (tmp_path / "one").read_text()
    assert (tmp_path / "one").read_text() != (tmp_path / "two").read_text()


@pytest.mark.parametrize("passphrase", ["wrong", "", "secret ", None])
def test_another_passphrase_opens_nothing_and_writes_nothing(passphrase: str | None, key: Path, tmp_path: Path) -> None:
    write_backup(key, tmp_path / "backup", "secret")
    with pytest.raises(KeyBackupError, match=r"does not open|is encrypted"):
        restore_backup(tmp_path / "backup", tmp_path / "new.key", passphrase)
    assert not (tmp_path / "new.key").exists()


def test_nothing_is_overwritten(key: Path, tmp_path: Path) -> None:
    write_backup(key, tmp_path / "backup", "secret")
    with pytest.raises(KeyBackupError, match="exists already"):
        write_backup(key, tmp_path / "backup", "secret")
    other = tmp_path / "other.key"
    Keypair.load_or_create(other)
    before = other.read_bytes()
    with pytest.raises(KeyBackupError, match="holds another key already"):
        restore_backup(tmp_path / "backup", other, "secret")
    assert other.read_bytes() == before
    restore_backup(tmp_path / "backup", key, "secret")  # the same key: nothing to do
    (tmp_path / "garbage").write_text("no key")
    with pytest.raises(KeyBackupError, match="holds another key"):
        restore_backup(tmp_path / "backup", tmp_path / "garbage", "secret")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyBackupError, match="holds another key"):
        restore_backup(tmp_path / "backup", tmp_path / "dangling", "secret")


def test_an_empty_passphrase_is_none_at_all(key: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyBackupError, match="protects nothing"):
        write_backup(key, tmp_path / "backup", "")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"public": "ab" * 32},
        {"box": "00"},
        {"box": "zz"},
        {"salt": "00"},
        {"operations": 10**9},
        {"memory_bytes": 10**13},
        {"memory_bytes": -1},
        {"operations": "many"},
        {"kdf": "none"},
        {"box": None},
    ],
)
def test_a_damaged_or_hostile_backup_is_refused(changes: dict[str, object], key: Path, tmp_path: Path) -> None:
    write_backup(key, tmp_path / "backup", "secret")
    fields = json.loads((tmp_path / "backup").read_text()) | changes
    (tmp_path / "backup").write_text(json.dumps(fields))
    with pytest.raises(KeyBackupError):
        restore_backup(tmp_path / "backup", tmp_path / "new.key", "secret")
    assert not (tmp_path / "new.key").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b"{" * 5000, b'{"format": "shoal-key/2"}'])
def test_what_is_no_backup_is_said_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(content)
    with pytest.raises(KeyBackupError, match=r"no backup of a Shoal key|was damaged"):
        is_encrypted(tmp_path / "backup")


def test_the_commands_ask_for_a_file_warn_of_plain_text_and_name_the_key(
    key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words").write_text("a passphrase\n")
    backup, words = str(tmp_path / "backup"), str(tmp_path / "words")
    for line, said in (
        (["key", "backup", backup, "--key", str(key), "--passphrase-file", words], "wrote"),
        (
            ["key", "restore", backup, "--key", str(tmp_path / "n.key"), "--passphrase-file", words],
            "credit and trust state",
        ),
        (["key", "backup", f"{backup}-plain", "--key", str(key), "--plain"], "warning: it is not encrypted"),
    ):
        with pytest.raises(SystemExit) as end:
            main(line)
        output = capsys.readouterr()
        assert end.value.code in (0, None)
        assert said in output.out + output.err
    with pytest.raises(SystemExit) as end:
        main(["key", "backup", f"{backup}-3", "--key", str(key)])
    assert end.value.code == 78
    assert "Nobody is there to be asked" in capsys.readouterr().err


def test_a_pipe_or_a_directory_is_no_backup_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(KeyBackupError, match="is no file"):
            is_encrypted(place)
