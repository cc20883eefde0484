"""What somebody at a terminal types, and the one sentence that answers a mistake."""

import json
import os
import signal
import socket
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import __version__
from shoal.cli import main as cli
from shoal.config import ShoalConfig, build_config
from shoal.coordinator import ledger
from shoal.coordinator.store.writer import Store
from shoal.identity import Keypair
from shoal.owner.create import initialise
from shoal.protocol.evidence import LedgerHead, seal
from support.tiny_run import save_policy

NOBODY = "http://127.0.0.1:9"
Run = Callable[..., SimpleNamespace]


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.records.LOOK_DEADLINE_S", 0.2)
    monkeypatch.setattr("shoal.roles.joining.JOIN_DEADLINE_S", 0.2)


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def run(*arguments: object) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=out, err=err)

    return run


def assert_one_sentence(result: SimpleNamespace, *words: str) -> None:
    assert result.code != 0
    assert result.err.startswith("shoal: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


@pytest.fixture(scope="session")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> ShoalConfig:
    root = tmp_path_factory.mktemp("cli")
    config = build_config(
        {
            "run": {"name": "tiny", "dir": root / "run"},
            "model": {"path": str(save_policy(root / "model", seed=0))},
            "validation": {"foreign_calibration": True},
            "tasks": {"count": 20, "heldout": 4},
        }
    )
    initialise(config)
    return config


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_the_version_is_printed(shoal: Run) -> None:
    assert shoal("--version").out.strip() == __version__


def test_settings_may_stand_anywhere_and_later_ones_win(shoal: Run, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("[run]\nsteps = 5\n[training]\nasync_level = 1\n")
    for arguments in (
        ("--run.steps", 9, "coordinator", run_file, "--dry-run", "--training.learning_rate=0.5"),
        ("coordinator", "--dry-run", "--run.steps=9", run_file, "--training.learning_rate", "0.5"),
        ("coordinator", "--run.steps", 7, run_file, "--run.steps", 9, "--training.learning_rate", "0.5", "--dry-run"),
    ):
        tree = tomllib.loads(shoal(*arguments).out)
        assert tree["run"]["steps"] == 9
        assert tree["training"]["async_level"] == 1
        assert tree["training"]["learning_rate"] == 0.5


@pytest.mark.parametrize("command", ["init", "coordinator", "train", "validate", "evaluator", "up", "demo"])
def test_a_dry_run_prints_the_settings_and_touches_nothing(
    shoal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shoal(command, "--dry-run", "--run.dir", "somewhere")
    assert result.code == 0
    assert tomllib.loads(result.out)["run"]["dir"] == "somewhere"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_warns_about_what_cannot_work_beside_the_settings(shoal: Run) -> None:
    result = shoal("init", "--dry-run", "--coordinator.host", "0.0.0.0", "--tasks.source", "nowhere.jsonl")
    assert result.code == 0
    assert tomllib.loads(result.out)["coordinator"]["host"] == "0.0.0.0"
    assert "shoal: warning: coordinator.host = 0.0.0.0 says where to listen" in result.err
    assert "shoal: warning: There are no tasks at nowhere.jsonl" in result.err


def test_the_options_of_the_demo_are_settings(shoal: Run) -> None:
    result = shoal("demo", "--steps", 3, "--async-level", 0, "--seed", 11, "--dry-run", "--run.name", "mine")
    tree = tomllib.loads(result.out)
    assert (tree["run"]["steps"], tree["run"]["seed"], tree["run"]["name"]) == (3, 11, "mine")
    assert tree["training"]["async_level"] == 0


def test_a_wrong_key_is_answered_with_the_nearest_right_one(shoal: Run, tmp_path: Path) -> None:
    assert_one_sentence(shoal("demo", "--traning.async_level", 3), "--training.async_level?")
    run_file = tmp_path / "run.toml"
    run_file.write_text("[training]\nlearning_rat = 1\n")
    assert_one_sentence(shoal("coordinator", run_file), "training.learning_rat", "training.learning_rate?")


def test_a_wrong_value_is_answered_with_the_setting_and_what_is_wrong(shoal: Run) -> None:
    assert_one_sentence(shoal("train", "--run.steps", "many"), "run.steps = 'many'", "integer")
    assert_one_sentence(shoal("demo", "--async-level", -1), "training.async_level = -1")
    assert_one_sentence(shoal("train", "--run.steps"), "--run.steps needs a value")


def test_malformed_and_missing_run_files_are_named(shoal: Run, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("[run\nsteps = 5")
    assert_one_sentence(shoal("coordinator", run_file), str(run_file), "not valid TOML")
    assert_one_sentence(shoal("coordinator", tmp_path / "nowhere.toml"), "There is no run file")


def test_commands_without_a_run_file_refuse_settings(shoal: Run) -> None:
    assert_one_sentence(shoal("work", NOBODY, "--run.steps", 3), "`shoal work` takes no settings such as --run.steps")


def test_mistakes_that_a_restart_cannot_cure_have_their_own_exit_code(shoal: Run, tmp_path: Path) -> None:
    assert shoal("demo", "--run.stepz", 3).code == os.EX_CONFIG
    assert shoal("work", NOBODY, "--dir", tmp_path / "w").code == 1


def test_every_setting_is_listed_with_its_reason(shoal: Run) -> None:
    assert "training.async_level = 2\n    k: the batch of step s" in shoal("config").out


def test_init_prints_how_others_join(shoal: Run, run_config: ShoalConfig) -> None:
    result = shoal("init", run_config.run.dir / "run.toml")
    assert "contributors join with: shoal work http://127.0.0.1:7300 --run-key " in result.out


def test_a_model_that_is_not_there_leaves_nothing_behind(shoal: Run, tmp_path: Path) -> None:
    result = shoal("init", "--model.path", tmp_path / "nowhere", "--run.dir", tmp_path / "run")
    assert_one_sentence(result, "There is no model directory")
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_named_with_the_setting_that_moves_it(
    shoal: Run, run_config: ShoalConfig, taken_port: int
) -> None:
    run_file = run_config.run.dir / "run.toml"
    result = shoal("coordinator", run_file, "--coordinator.port", taken_port)
    assert_one_sentence(result, f"127.0.0.1:{taken_port}", "address already in use", "--coordinator.port")


@pytest.mark.parametrize("setting", ["--coordinator.port", "--broadcast.port"])
def test_the_demo_finds_a_taken_port_before_it_starts_anything(
    shoal: Run, tmp_path: Path, taken_port: int, setting: str
) -> None:
    free = {"--coordinator.port": 0, "--broadcast.port": 0} | {setting: taken_port}
    flags = [word for pair in free.items() for word in pair]
    assert_one_sentence(shoal("demo", "--run.dir", tmp_path / "run", *flags), f"127.0.0.1:{taken_port}", setting)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["supervisor.lock"]


def test_a_key_file_that_is_no_key_is_refused_before_anybody_is_waited_for(shoal: Run, tmp_path: Path) -> None:
    key = tmp_path / "my.key"
    key.write_text("hello")
    result = shoal("work", NOBODY, "--key", key, "--dir", tmp_path / "w")
    assert_one_sentence(result, f"{key} is not a Shoal key")
    assert not (tmp_path / "w").exists()


def test_a_key_file_that_cannot_be_read_is_named(shoal: Run, tmp_path: Path) -> None:
    result = shoal("work", NOBODY, "--key", tmp_path, "--dir", tmp_path / "w")
    assert_one_sentence(result, f"The key file {tmp_path} cannot be read: Is a directory")


@pytest.mark.parametrize(
    "arguments",
    [
        ("work", NOBODY),
        ("relay", "--upstream", NOBODY, "--coordinator", NOBODY, "--port", 0),
        ("run", "status", NOBODY),
        ("ledger", "export", NOBODY, "ledger.jsonl"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_a_coordinator_that_is_gone_is_named(
    shoal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] in ("work", "relay"):
        arguments = (*arguments, "--dir", tmp_path / "dir")
    assert_one_sentence(shoal(*arguments), f"The coordinator at {NOBODY} did not answer", "Check the address")
    assert not (tmp_path / "ledger.jsonl").exists()


def test_an_address_that_is_none_is_refused_at_once(shoal: Run, tmp_path: Path) -> None:
    assert_one_sentence(shoal("work", "example.org:7300", "--dir", tmp_path / "w"), "example.org:7300 is no address")


def test_a_host_that_does_not_exist_is_named_at_once(
    shoal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.roles.joining.JOIN_DEADLINE_S", 3600.0)
    result = shoal("work", "http://nowhere.invalid:7300", "--dir", tmp_path / "w")
    assert_one_sentence(result, "There is no host nowhere.invalid")


@pytest.mark.parametrize(
    "arguments",
    [
        ("work", NOBODY, "--engine", "foo"),
        ("work", NOBODY, "--threads", -1),
        ("validate", "--engine", "foo"),
        ("eval", "bundled", "--engine", "foo"),
        ("calibrate", "out.json", "--device", "abacus"),
        ("relay", "--upstream", NOBODY, "--port", 70000),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:3])),
)
def test_flags_with_wrong_values_are_refused_before_anything_happens(
    shoal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shoal(*arguments)
    assert result.code == 2
    assert "Invalid value" in result.err
    assert list(tmp_path.iterdir()) == []


def test_threads_that_are_none_are_refused_before_a_run_is_made(
    shoal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in ((), ("--dry-run",)):
        assert_one_sentence(shoal("up", "--threads", "relay=2", *flags), "--threads relay=2 is no number of threads")
    assert list(tmp_path.iterdir()) == []


def test_malformed_keys_and_addresses_are_refused_before_anybody_is_asked(shoal: Run, tmp_path: Path) -> None:
    place = ("--dir", tmp_path / "d")
    assert_one_sentence(shoal("work", NOBODY, "--run-key", "12", *place), "12 is no public key")
    assert_one_sentence(shoal("relay", "--upstream", "up:1", "--coordinator", NOBODY, *place), "up:1 is no address")
    assert_one_sentence(shoal("ledger", "verify", "nowhere", "--coordinator-key", "xy"), "xy is no public key")


def test_a_full_disk_is_one_sentence(shoal: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.owner.create.initialise", full)
    result = shoal("init")
    assert (result.code, result.err) == (
        1,
        "shoal: The disk is full. Make room; the same command goes on where it was.\n",
    )


def test_a_directory_that_cannot_be_written_is_named(shoal: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = shoal("work", NOBODY, "--dir", tmp_path / "file")
    assert_one_sentence(result, str(tmp_path / "file"))


COORDINATOR = Keypair.from_seed(b"c" * 32)


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    store = Store(tmp_path / "store.db")
    for state in ("running", "paused", "running"):
        store.write(partial(ledger.append, keypair=COORDINATOR, at=1.0, kind="run_state", state=state))
    store.write(partial(ledger.append, keypair=COORDINATOR, at=1.0, kind="slash", worker="w", held=0, slashed=0))
    reason = "by the owner: rude"
    store.write(partial(ledger.append, keypair=COORDINATOR, at=1.0, kind="ban", worker="w", reason=reason, by="owner"))
    count, head = store.read(ledger.head)
    lines = store.read(partial(ledger.page, start=0, stop=count))
    lines.append(ledger.seal(COORDINATOR, "run-1", ledger.Extent(count, head, count, head), 2.0))
    store.close()
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def signed_head(entries: int, head: str, at: float = 1.5, run_id: str = "run-1") -> str:
    return seal(LedgerHead(run_id=run_id, at=at, entries=entries, head=head), COORDINATOR)


def test_an_honest_ledger_verifies_and_what_was_not_checked_is_said(shoal: Run, ledger_file: Path) -> None:
    out = shoal("ledger", "verify", ledger_file).out
    assert out.startswith("ok: 5 entries of run run-1, signed by ")
    assert "ok: 0 audit draws repeated" in out
    assert "not checked: whose signatures these are" in out
    known = shoal("ledger", "verify", ledger_file, "--coordinator-key", COORDINATOR.public).out
    assert "whose signatures" not in known
    assert "not checked: whether verdicts were left out" in known
    assert "the owner sets the run to paused" in shoal("ledger", "show", ledger_file).out


def test_a_kept_head_is_held_against_a_ledger(shoal: Run, ledger_file: Path, tmp_path: Path) -> None:
    true = json.loads(ledger_file.read_bytes().splitlines()[2])["hash"]
    (tmp_path / "ledger-heads.jsonl").write_text(signed_head(3, true) + "\n")
    assert shoal("ledger", "verify", ledger_file, "--head", tmp_path, "--head", true).code == 0
    (tmp_path / "ledger-heads.jsonl").write_text(signed_head(3, true) + "\n" + signed_head(4, "ab" * 32) + "\n")
    found = shoal("ledger", "verify", ledger_file, "--head", tmp_path / "ledger-heads.jsonl")
    assert (found.code, "entry 3: a kept head of 4 entries" in found.out) == (1, True)
    assert "1 finding" in found.out
    strange = shoal("ledger", "verify", ledger_file, "--head", "cd" * 32)
    assert (strange.code, "rewritten" in strange.out) == (1, True)
    assert_one_sentence(shoal("ledger", "verify", ledger_file, "--head", ledger_file), "is no ledger-head")
    assert_one_sentence(shoal("ledger", "verify", ledger_file, "--receipts", tmp_path), "cannot be read")


def test_the_result_is_a_json_object_too(shoal: Run, ledger_file: Path) -> None:
    result = json.loads(shoal("ledger", "verify", ledger_file, "--head", "cd" * 32, "--json").out)
    assert (result["ok"], result["entries"], len(result["findings"])) == (False, 5, 1)
    assert result["findings"][0]["entry"] == 4
    assert result["unchecked"]


def test_tampering_with_a_ledger_is_found_and_located(shoal: Run, ledger_file: Path) -> None:
    lines = ledger_file.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[1])
    entry["body"] = entry["body"].replace("paused", "drained")
    ledger_file.write_bytes(b"".join([lines[0], json.dumps(entry).encode() + b"\n", *lines[2:]]))
    found = shoal("ledger", "verify", ledger_file)
    assert (found.code, "entry 1: The entry does not continue the chain." in found.out) == (1, True)


def test_a_truncated_ledger_is_found(shoal: Run, ledger_file: Path) -> None:
    lines = ledger_file.read_bytes().splitlines(keepends=True)
    ledger_file.write_bytes(b"".join(lines[:-1]))
    assert_one_sentence(shoal("ledger", "verify", ledger_file), "seal")
    ledger_file.write_bytes(b"".join([*lines[:-2], lines[-1]]))
    found = shoal("ledger", "verify", ledger_file)
    assert (found.code, "speaks of 5 entries" in found.out) == (1, True)


def test_a_ledger_of_another_signer_or_none_at_all_is_refused(shoal: Run, ledger_file: Path, tmp_path: Path) -> None:
    assert "not signed" in shoal("ledger", "verify", ledger_file, "--coordinator-key", "ab" * 32).out
    assert_one_sentence(shoal("ledger", "verify", tmp_path / "nowhere"), "cannot be read")
    (tmp_path / "empty").write_bytes(b"")
    assert_one_sentence(shoal("ledger", "show", tmp_path / "empty"), "is empty")
