"""Finding the run and the worker that the owner means, and commanding a run that nobody serves."""

import json
from pathlib import Path

import pytest

from shoal.config import build_config
from shoal.coordinator import Store, ledger
from shoal.coordinator.server import begin, build_run
from shoal.coordinator.workers import register
from shoal.errors import ConfigError, KeyFileError, UnavailableError
from shoal.identity import Keypair
from shoal.owner import control as owner
from shoal.owner.create import initialise
from shoal.protocol import api
from shoal.rundir import RunDirectory

NOBODY = "http://127.0.0.1:9"


def view(key: str, name: str, state: api.WorkerState = "active") -> api.WorkerView:
    return api.WorkerView(key=key * 64, name=name, state=state)


KNOWN = [view("a", "ann"), view("b", "bob"), view("c", "bob"), view("d", "dddddd")]


@pytest.mark.parametrize(
    ("word", "key"), [("a" * 64, "a"), ("aaaaaa", "a"), ("aaaaaaaaaaaa…", "a"), ("ann", "a"), ("c" * 10, "c")]
)
def test_a_worker_is_found_by_key_by_its_beginning_or_by_a_name_of_its_own(word: str, key: str) -> None:
    assert owner.find_worker(word, KNOWN) == key * 64


def test_a_name_that_two_workers_have_is_refused_with_their_keys() -> None:
    with pytest.raises(ConfigError, match=r"2 workers.*bbbbbbbbbbbbbbbb \(active\), cccccccccccccccc") as caught:
        owner.find_worker("bob", KNOWN)
    assert "more of the key" in caught.value.hint


@pytest.mark.parametrize("word", ["aaa", "nobody", "", "e" * 64])
def test_a_worker_that_nobody_knows_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="has registered"):
        owner.find_worker(word, KNOWN)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with one worker that is not being served."""
    root = tmp_path_factory.mktemp("owner")
    tree = {"run": {"dir": root / "run", "seed": 1}, "coordinator": {"port": 9}, "tasks": {"count": 10, "heldout": 2}}
    directory = initialise(build_config(tree))
    run = build_run(directory)
    body = api.RegisterBody(name="ann", numerics_class=run.descriptor.numerics_classes[0], tokens_per_s=1e6)
    store = Store(directory.store)
    store.write(lambda connection: begin(connection, run))
    store.write(lambda connection: register(connection, run, "ab" * 32, body))
    store.close()
    return directory


def run_of(stopped: RunDirectory) -> owner.OwnedRun:
    found = owner.find_run(str(stopped.root))
    return owner.OwnedRun(found.url, found.directory, found.key_file, deadline_s=0.1)


def test_another_run_at_the_address_of_a_stopped_one_is_not_mistaken_for_it(
    stopped: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {
        "run": {"dir": tmp_path / "other", "seed": 2},
        "coordinator": {"port": 9},
        "tasks": {"count": 10, "heldout": 2},
    }
    other = initialise(build_config(tree)).descriptor()

    def never(*arguments: object, **settings: object) -> None:
        raise AssertionError("the other run was asked")

    monkeypatch.setattr(owner, "fetch_descriptor", lambda *arguments, **settings: (b"", other))
    monkeypatch.setattr(owner, "CoordinatorClient", never)
    found = run_of(stopped)
    assert found.status()[0].run_id == stopped.descriptor().run_id != other.run_id
    seal = json.loads(json.loads(found.ledger().splitlines()[-1])["payload"])
    assert seal["run_id"] == stopped.descriptor().run_id


def test_a_run_is_found_by_its_directory_its_run_file_and_its_address(
    stopped: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_directory = owner.find_run(str(stopped.root))
    assert (by_directory.url, by_directory.key_file) == (NOBODY, stopped.key_file("run"))
    by_file = owner.find_run(str(stopped.run_file))
    assert by_file.directory is not None
    assert by_file.directory.root == stopped.root
    monkeypatch.chdir(stopped.root.parent)
    relative = owner.find_run("run")
    assert relative.directory is not None
    assert relative.directory.root == stopped.root
    assert owner.find_run("https://far.away", Path("k")) == owner.OwnedRun("https://far.away", None, Path("k"))


def test_a_place_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        owner.find_run(str(tmp_path))
    with pytest.raises(ConfigError, match="no run file"):
        owner.find_run(str(tmp_path / "missing.toml"))


def test_what_needs_the_files_is_refused_for_an_address() -> None:
    with pytest.raises(ConfigError, match="where the run lives"):
        owner.find_directory("http://far.away")


def test_a_stopped_run_is_commanded_through_its_store(stopped: RunDirectory) -> None:
    run = run_of(stopped)
    assert run.set_state("draining").run_state == "draining"
    assert run.set_state("running").run_state == "running"
    assert run.ban("ann", "left the key in a bus").state == "banned"
    assert run.unban("abababab", "found it").state == "probation"
    status, history = run.status()
    assert [worker.state for worker in status.workers] == ["probation"]
    assert history.bans == []
    store = Store(stopped.store)
    entries = store.read(lambda connection: ledger.page(connection, 0, 100))
    store.close()
    kinds = [json.loads(line)["kind"] for line in entries]
    assert kinds[:4] == ["run", "terms", "commitment", "commitment"]
    assert kinds[4:] == ["run_state", "run_state", "slash", "ban", "unban"]


def test_a_run_elsewhere_that_does_not_answer_stays_unavailable(tmp_path: Path) -> None:
    Keypair.load_or_create(tmp_path / "run.key")
    with pytest.raises(UnavailableError):
        owner.OwnedRun(NOBODY, None, tmp_path / "run.key", deadline_s=0.1).set_state("paused")


def test_without_the_run_key_nothing_is_commanded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"are signed.*--key"):
        owner.OwnedRun(NOBODY, None, None).set_state("paused")
    with pytest.raises(KeyFileError):
        owner.OwnedRun(NOBODY, None, tmp_path / "missing.key").set_state("paused")


def test_a_reason_must_be_readable(stopped: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="one line"):
        run_of(stopped).ban("ann", "two\nlines")
