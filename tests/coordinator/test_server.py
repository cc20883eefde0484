import socket
from pathlib import Path

import pytest

from shoal.config import ShoalConfig, to_toml
from shoal.coordinator.server import PortTakenError, bind, build_run
from shoal.errors import ConfigError, KeyFileError
from shoal.files import write_atomic
from shoal.protocol.steps import secret_commitment
from shoal.rundir import RunDirectory, located
from support.samples import RUN_SECRET, descriptor, keypair
from support.swarm import ROLES, Swarm, running, small_config


def run_directory(root: Path, config: ShoalConfig) -> RunDirectory:
    directory = RunDirectory(root)
    for role in ROLES:
        write_atomic(root / "keys" / f"{role}.key", keypair(role)._private.private_bytes_raw().hex().encode())
    commitment = secret_commitment(directory.create_secret())
    directory.run_file.write_text(to_toml(config))
    described = descriptor(rollouts=config.rollouts, secret_commitment=commitment)
    directory.descriptor_file.write_bytes(described.seal(keypair("run")).to_bytes())
    return directory


def test_a_run_directory_holds_all_that_the_coordinator_needs(tmp_path: Path) -> None:
    config = small_config(trust={"stake_tokens": 100_000})
    directory = run_directory(tmp_path, config)
    run = build_run(directory)
    assert (run.config, run.secret) == (located(config, directory.root), directory.secret())
    assert set(run.role_keys.values()) == set(ROLES)
    assert run.submissions.is_dir()


def test_settings_under_which_cheating_pays_are_refused_with_the_stake_that_helps(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, small_config(trust={"stake_tokens": 30}))
    with pytest.raises(ConfigError, match="cheating would pay") as caught:
        build_run(directory)
    stake = int(caught.value.hint.split("trust.stake_tokens to ")[1].split()[0])
    assert build_run(run_directory(tmp_path, small_config(trust={"stake_tokens": stake})))


def test_an_injected_secret_is_refused_by_the_signed_descriptor(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, small_config())
    (tmp_path / "keys" / "run.secret").write_text(RUN_SECRET.hex())
    with pytest.raises(KeyFileError, match="not the one that the run's descriptor commits to"):
        build_run(directory)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, small_config())
    (tmp_path / "keys" / "coordinator.key").unlink()
    with pytest.raises(KeyFileError, match=r"coordinator\.key"):
        build_run(directory)


def test_a_taken_port_is_one_sentence_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PortTakenError, match=f"Cannot listen on 127.0.0.1:{port}: address already in use"
        ) as caught:
            bind("127.0.0.1", port, "coordinator.port")
    assert "--coordinator.port" in caught.value.hint
    bind("127.0.0.1", 0, "coordinator.port").close()


def test_uploads_that_a_kill_cut_off_are_removed_at_the_next_start_and_others_stay(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        _, submission_id = swarm.work(ann)
    (tmp_path / "submissions" / "0123.parquet").write_bytes(b"half a file")
    with running(tmp_path, small_config()) as swarm:
        assert [path.stem for path in swarm.run.submissions.iterdir()] == [submission_id]


def test_the_ledger_begins_with_the_run_and_its_commitment(swarm: Swarm) -> None:
    first = swarm.one("SELECT kind, body FROM ledger WHERE seq=0")
    assert first["kind"] == "run"
    assert swarm.run.descriptor.secret_commitment in str(first["body"])
