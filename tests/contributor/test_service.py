"""The unit of a worker: verified by systemd itself, quoted against expansion, handled through systemctl with one sentence each."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.contributor.service import (
    CONFINEMENT,
    Manager,
    Service,
    ServiceError,
    can_confine,
    check_lasting,
    check_name,
    quoted,
    unit_text,
)
from shoal.errors import ConfigError
from shoal.locks import hold

URL = "http://run.example.org:7300"


def service(directory: Path, *arguments: str, **options: object) -> Service:
    given = arguments or (URL, "--run-key", "ab" * 32, "--when", "idle")
    return Service("worker", (sys.executable, "-m", "shoal"), given, directory, **options)  # type: ignore[arg-type]


def verified(unit: Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(unit.parent), "HOME": str(unit.parent)},
    )
    about = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    assert done.returncode == 0, done.stderr
    return "\n".join(about)


@pytest.mark.parametrize(
    "made",
    [
        lambda root: service(root / "plain"),
        lambda root: service(root / "plain", is_confined=False),
        lambda root: service(root / "with blank", cpus=2, memory_bytes=4_000_000_000),
        lambda root: service(root / "odd", URL, "--name", 'a "b" $HOME %h \\ c', variables=[("HF_HOME", "/a b")]),
    ],
)
def test_systemd_finds_nothing_to_say_about_the_unit(made: object, tmp_path: Path) -> None:
    one: Service = made(tmp_path)  # type: ignore[operator]
    one.directory.mkdir()
    unit = tmp_path / one.unit
    unit.write_text(unit_text(one))
    assert verified(unit) == ""


def test_the_unit_is_hardened_and_starts_again_only_where_that_helps(tmp_path: Path) -> None:
    text = unit_text(service(tmp_path, cpus=2, memory_bytes=4_000_000_000))
    for line in (
        "Restart=on-failure",
        "RestartPreventExitStatus=78",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        f'ReadWritePaths="{tmp_path}"',
        "CPUQuota=200%",
        "MemoryMax=4000000000",
    ):
        assert line in text.splitlines()
    assert "RestrictNamespaces" not in text, "the sandbox needs them"
    assert "ProtectKernelTunables" not in text, "it is mounted over /proc, which the sandbox mounts again"


def test_confinement_comes_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """Outside a user namespace a user's systemd ignores what needs mounts and fails at what drops capabilities."""
    confined, plain = (unit_text(service(tmp_path, is_confined=value)).splitlines() for value in (True, False))
    assert "PrivateUsers=yes" in confined
    needing = {line for line in confined if line.startswith(("Private", "Protect", "ReadWrite", "Capability"))}
    assert {*CONFINEMENT, f'ReadWritePaths="{tmp_path}"'} == needing
    assert not needing & set(plain)
    assert "NoNewPrivileges=yes" in plain


def test_a_system_without_the_probe_counts_as_one_without_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not can_confine()
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    assert not can_confine()
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 0\n")
    assert can_confine()


def test_systemd_rates_the_exposure_of_the_unit(tmp_path: Path) -> None:
    """A unit without any hardening has 9.6; what is missing here is what the sandbox and the network need."""
    unit = tmp_path / "shoal-worker.service"
    unit.write_text(unit_text(service(tmp_path)))
    words = ["systemd-analyze", "security", "--offline=yes", "--json=short", str(unit)]
    rated = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert rated.returncode == 0, rated.stderr
    found = {row["json_field"]: row["set"] for row in json.loads(rated.stdout) if row.get("set") is not None}
    assert found["NoNewPrivileges"] is True
    assert found["ProtectSystem"] is True


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("http://h:7300", "http://h:7300"),
        ("a b", '"a b"'),
        ("$HOME", '"$$HOME"'),
        ("50%", '"50%%"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("", '""'),
    ],
)
def test_a_word_stays_one_word_and_expands_to_nothing(word: str, written: str) -> None:
    assert quoted(word) == written


@pytest.mark.parametrize("word", ["a\nExecStart=/bin/evil", "tab\tbed", "\x00"])
def test_a_line_break_cannot_add_a_line_to_the_unit(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control character"):
        unit_text(service(tmp_path, URL, "--name", word))


@pytest.mark.parametrize("name", ["", "../up", "a b", "Ab", "x" * 60, "-x", "a.service"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a service"):
        check_name(name)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that writes down what it was asked, and fails if a file `broken` is there."""
    log = tmp_path / "asked.txt"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    here = shlex.quote(str(tmp_path))
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {here}/asked.txt\nif [ -e {here}/broken ]; then echo "No medium found." >&2; exit 1; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return log


def shoal(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def test_install_writes_the_unit_and_starts_it_and_remove_undoes_both(systemctl: Path, tmp_path: Path) -> None:
    assert shoal("service", "install", URL, "--dir", str(tmp_path / "w"), "--when", "idle", "--cpus", "1") == 0
    unit = tmp_path / "config" / "systemd" / "user" / "shoal-worker.service"
    assert f"work {URL} --when idle --cpus 1 --dir {tmp_path / 'w'}" in unit.read_text()
    assert "CPUQuota=100%" in unit.read_text()
    assert systemctl.read_text().splitlines() == ["--user daemon-reload", "--user enable --now shoal-worker.service"]
    assert shoal("service", "remove") == 0
    assert not unit.exists()
    assert systemctl.read_text().splitlines()[2:] == [
        "--user disable --now shoal-worker.service",
        "--user daemon-reload",
    ]


def test_paths_are_absolute_because_a_service_starts_elsewhere(
    systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").touch()
    assert shoal("service", "install", "--no-start", URL, "--dir=w", "--key", "k/my.key", "--ca", "ca.pem") == 0
    unit = (tmp_path / "config" / "systemd" / "user" / "shoal-worker.service").read_text()
    assert f"--key {tmp_path}/k/my.key --ca {tmp_path}/ca.pem --dir {tmp_path}/w" in unit
    assert (tmp_path / "k" / "my.key").exists(), "the service itself could not write it"
    assert f"Environment=HF_HOME={tmp_path}/w/.cache/huggingface" in unit
    assert not systemctl.exists()


def test_paths_in_variables_are_absolute_too(systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PYTHONPATH=. shoal service install … --verifier mine:check` is what the guide's reader types."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}/opt/more")
    monkeypatch.setenv("SSL_CERT_FILE", "ca.pem")
    assert shoal("service", "install", URL, "--dir", "w", "--verifier", "mine:check", "--no-start") == 0
    unit = (tmp_path / "config" / "systemd" / "user" / "shoal-worker.service").read_text().splitlines()
    assert f"Environment=PYTHONPATH={tmp_path}:/opt/more" in unit
    assert f"Environment=SSL_CERT_FILE={tmp_path}/ca.pem" in unit
    assert not systemctl.exists(), "--no-start counts behind the worker's words as well"


@pytest.mark.usefixtures("systemctl")
def test_a_service_that_is_not_there_is_neither_shown_nor_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "journalctl").write_text("#!/bin/sh\necho '-- No entries --'\n")
    (tmp_path / "bin" / "journalctl").chmod(0o755)
    for words in (("status",), ("logs",), ("logs", "--follow")):
        assert shoal("service", *words, "--name", "wroker") == 78
        assert "shoal-wroker.service. Known: none." in capsys.readouterr().err
    assert shoal("service", "install", URL, "--dir", str(tmp_path / "w"), "--no-start") == 0
    assert shoal("service", "logs", "--follow") == 0
    assert shoal("service", "status") == 0


def test_a_mistake_in_the_workers_words_is_seen_before_anything_is_written(systemctl: Path, tmp_path: Path) -> None:
    assert shoal("service", "install", URL, "--cpuss", "1") != 0
    assert shoal("service", "install", URL, "--when", "never") != 0
    assert not (tmp_path / "config").exists()
    assert not systemctl.exists()


@pytest.mark.usefixtures("systemctl")
def test_another_service_of_that_name_is_not_overwritten(tmp_path: Path) -> None:
    manager = Manager.of_user()
    manager.install(service(tmp_path / "w"), start=False)
    manager.install(service(tmp_path / "w"), start=False)
    with pytest.raises(ServiceError, match=r"is a service already.*shoal service remove --name worker"):
        manager.install(service(tmp_path / "other"), start=False)


@pytest.mark.usefixtures("systemctl")
def test_a_user_manager_that_does_not_answer_is_one_sentence_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    manager = Manager.of_user()
    with pytest.raises(ServiceError, match=r"systemctl --user daemon-reload failed: No medium found\. Log in"):
        manager.install(service(tmp_path / "w"), start=True)
    assert manager.units() == ["shoal-worker.service"]


@pytest.mark.usefixtures("systemctl")
def test_what_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(ServiceError, match=r"There is no service .*Known: none"):
        Manager.of_user().remove("shoal-worker.service")


def test_without_systemd_nothing_is_written_and_what_is_there_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert shoal("service", "install", URL, "--dir", str(tmp_path / "w")) == 78
    assert "This machine has no systemd, so nothing was installed. Let cron" in capsys.readouterr().err
    assert not (tmp_path / "config").exists()
    for words in (("status",), ("logs",)):
        assert shoal("service", *words) == 78
        assert "is not installed here. Services need systemd." in capsys.readouterr().err
    assert shoal("service", "install", "--no-start", URL, "--dir", str(tmp_path / "w")) == 0
    assert shoal("service", "remove") == 0
    assert Manager.of_user().units() == []


@pytest.mark.usefixtures("systemctl")
def test_a_directory_where_a_worker_runs_gets_no_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(tmp_path / "w" / "lock", ""):
        assert shoal("service", "install", URL, "--dir", str(tmp_path / "w")) == 78
    assert f"A worker runs in {tmp_path / 'w'}. End it with `shoal work finish`" in capsys.readouterr().err
    assert Manager.of_user().units() == []
    assert shoal("service", "install", URL, "--dir", str(tmp_path / "w")) == 0
    with hold(tmp_path / "w" / "lock", ""):  # by the service itself
        assert shoal("service", "install", URL, "--dir", str(tmp_path / "w")) == 0


def test_an_environment_that_a_cache_holds_is_no_home_for_a_service(tmp_path: Path) -> None:
    caches = tmp_path / "cache"
    check_lasting(tmp_path / "share" / "pipx" / "venvs" / "shoal", caches)
    (tmp_path / "link").symlink_to(caches)
    for prefix in (caches / "uv" / "archive-v0" / "x", caches / "pipx" / "1f", tmp_path / "link" / "uv"):
        with pytest.raises(ServiceError, match=r"for one command only, in .*`pipx install` first"):
            check_lasting(prefix, tmp_path / "other", caches)


@pytest.mark.usefixtures("systemctl")
@pytest.mark.parametrize(
    "words", [("--hours", "22"), ("--memory", "nan"), ("--memory", "inf"), ("--cpus", "-1"), ("--memory", "-1")]
)
def test_a_limit_that_means_nothing_is_refused_before_the_unit_is_written(words: tuple[str, str]) -> None:
    assert shoal("service", "install", URL, *words) in (2, 78)
    assert Manager.of_user().units() == []


@pytest.mark.usefixtures("systemctl")
def test_zero_cores_and_zero_memory_are_no_limit(tmp_path: Path) -> None:
    assert shoal("service", "install", URL, "--dir", str(tmp_path / "w"), "--cpus", "0", "--memory", "0") == 0
    unit = Manager.of_user().path("shoal-worker.service").read_text()
    assert "CPUQuota" not in unit
    assert "MemoryMax" not in unit
