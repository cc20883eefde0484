from pathlib import Path

import pytest

from shoal.config import ShoalConfig, build_config, to_toml
from shoal.errors import ConfigError, KeyFileError, SignatureError
from shoal.files import write_atomic
from shoal.identity import Keypair
from shoal.protocol.steps import SECRET_BYTES, secret_commitment
from shoal.rundir import ROLES, RunDirectory, load_run, located
from support.samples import descriptor, keypair


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_a_directory_without_a_descriptor_holds_no_run(directory: RunDirectory) -> None:
    assert not directory.is_initialised
    with pytest.raises(ConfigError, match="holds no run") as caught:
        directory.descriptor()
    assert "shoal init" in caught.value.hint


def test_the_descriptor_comes_back_as_it_was_signed(directory: RunDirectory) -> None:
    directory.root.mkdir()
    directory.descriptor_file.write_bytes(descriptor().seal(keypair("run")).to_bytes())
    assert directory.is_initialised
    assert directory.descriptor() == descriptor()
    directory.descriptor_file.write_bytes(directory.descriptor_file.read_bytes().replace(b"run-1", b"run-2"))
    with pytest.raises(SignatureError):
        directory.descriptor()


def test_each_role_has_one_key(directory: RunDirectory) -> None:
    made = {directory.key(role).public: role for role in ROLES}
    assert directory.role_keys() == made
    assert len(made) == len(ROLES)


def test_the_owners_relays_are_those_of_the_directory_and_those_that_a_file_names(directory: RunDirectory) -> None:
    assert directory.relay_keys() == set()
    own = Keypair.load_or_create(directory.root / "relay-1" / "relay.key").public
    (directory.root / "relay-2").mkdir()
    (directory.root / "relay-2" / "relay.key").write_text("not yet written")
    assert directory.relay_keys() == {own}
    directory.key("coordinator")
    directory.relay_keys_file.write_text(f"{'ab' * 32}\n{'cd' * 32}\n")
    assert directory.relay_keys() == {own, "ab" * 32, "cd" * 32}


def test_a_role_key_that_should_be_there_is_not_made_again(directory: RunDirectory) -> None:
    with pytest.raises(KeyFileError, match=r"trainer\.key"):
        directory.existing_key("trainer")


def test_the_secret_is_random_and_kept_private(directory: RunDirectory) -> None:
    secret = directory.create_secret()
    assert len(secret) == SECRET_BYTES
    assert directory.secret() == secret
    assert (directory.root / "keys" / "run.secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_lay_there_before_is_never_used(directory: RunDirectory) -> None:
    known = directory.create_secret()
    assert directory.create_secret() != known


def test_a_secret_that_the_descriptor_does_not_commit_to_is_refused(directory: RunDirectory) -> None:
    commitment = secret_commitment(directory.create_secret())
    directory.descriptor_file.write_bytes(descriptor(secret_commitment=commitment).seal(keypair("run")).to_bytes())
    assert len(directory.secret()) == SECRET_BYTES
    (directory.root / "keys" / "run.secret").write_text(bytes(SECRET_BYTES).hex())
    with pytest.raises(KeyFileError, match="not the one that the run's descriptor commits to"):
        directory.secret()


def test_a_lost_secret_is_one_sentence(directory: RunDirectory) -> None:
    with pytest.raises(KeyFileError, match="Restore it from a backup"):
        directory.secret()
    directory.create_secret()
    (directory.root / "keys" / "run.secret").write_text("garbled")
    with pytest.raises(KeyFileError):
        directory.secret()


def test_the_run_file_is_the_configuration(directory: RunDirectory) -> None:
    directory.root.mkdir()
    directory.run_file.write_text(to_toml(ShoalConfig()))
    assert directory.config() == located(ShoalConfig(), directory.root)


def test_a_directory_that_moved_is_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RunDirectory(tmp_path / "old")
    made.root.mkdir()
    made.descriptor_file.write_bytes(descriptor().seal(keypair("run")).to_bytes())
    made.run_file.write_text(to_toml(located(ShoalConfig(), made.root)))
    made.root.rename(tmp_path / "new")
    assert RunDirectory(tmp_path / "new").config().run.dir == tmp_path / "new"
    assert load_run(tmp_path / "new" / "run.toml").run.dir == tmp_path / "new"
    monkeypatch.chdir(tmp_path / "new")
    assert load_run(Path("run.toml")).run.dir == tmp_path / "new"
    monkeypatch.chdir("/")
    assert RunDirectory(tmp_path / "new").config().run.dir == tmp_path / "new"


def test_a_run_file_elsewhere_means_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[run]\ndir = "runs/mine"\n')
    assert load_run(tmp_path / "mine.toml").run.dir == Path("runs/mine")


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    kept = {"my-notes.txt": b"important", "data/table.csv": b"1,2", "supervisor.lock": b""}
    written = {"run.toml": b"", "keys/run.key": b"", "relay-2/head.json": b"", "workers/honest-1/lock": b""}
    for name, data in (kept | written).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    RunDirectory(tmp_path).remove_run()
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)
    RunDirectory(tmp_path / "nowhere").remove_run()


def run_in(root: Path, name: str) -> RunDirectory:
    directory = RunDirectory(root)
    write_atomic(directory.run_file, to_toml(build_config({"run": {"name": name, "dir": "elsewhere"}})).encode())
    write_atomic(directory.descriptor_file, descriptor().seal(keypair("run")).to_bytes())
    return directory


def test_a_run_is_meant_by_its_file_by_its_directory_or_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = run_in(tmp_path / "runs" / "run", "mine")
    for where in (directory.root, str(directory.root), "runs/run", "runs/run/run.toml", None):
        config = load_run(where, ["--run.steps", "7"])
        assert (config.run.name, config.run.dir, config.run.steps) == ("mine", directory.root, 7)
    other = run_in(tmp_path / "other", "other")
    assert load_run(None, ["--run.dir", "other"]) == other.config()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="not over the network"):
        load_run("http://run.example.org:7300")
    with pytest.raises(ConfigError, match="There is no run file"):
        load_run(tmp_path / "nowhere")
