"""The doctor names what is missing and is content with this machine."""

import shutil
import socket

import pytest

from shoal.cli import doctor
from shoal.tasks.sandbox import sandbox
from support.tiny_run import Reports


def test_this_machine_can_run_shoal() -> None:
    reports = Reports()
    assert doctor.examine(reports) == 0
    assert reports.some("ok    what generates, validates and evaluates: torch ")
    assert reports.some("cores")


def test_a_missing_package_of_every_role_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ("pyarrow", "no_such_package"))
    reports = Reports()
    assert doctor.examine(reports) == 1
    assert "MISS  no_such_package is not installed: install Shoal again" in reports


def test_a_light_install_is_sound_and_hears_what_a_worker_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_modules", lambda extra: ["torch", "numba"])
    reports = Reports()
    assert doctor.examine(reports) == 0
    assert reports.some("note  what generates, validates and evaluates needs torch, numba: type pip install './shoal-")
    assert reports.some("[worker]', or `make setup` in a clone; relays need none of it")


def test_a_missing_program_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL_PROGRAMS", {"no-such-program": "does nothing"})
    reports = Reports()
    assert doctor.examine(reports) == 0
    assert "note  no-such-program is not installed: it does nothing" in reports


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="run `make system`")
def test_the_sandbox_is_tried_not_only_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    assert doctor.examine(reports) == 0
    assert "ok    the sandbox for model-written code ran a first program" in reports
    monkeypatch.setattr(sandbox, "_fixed_arguments", lambda: ("--no-such-option",))
    sandbox.sandbox_complaint.cache_clear()
    try:
        assert doctor.examine(reports) == 0
    finally:
        sandbox.sandbox_complaint.cache_clear()
    assert reports.some("note  no sandbox for model-written code: ")
    assert reports.some("no-such-option")


def test_a_taken_port_is_noted_with_the_settings_that_move_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "DEMO_PORTS", (port,))
        reports = Reports()
        assert doctor.examine(reports) == 0
    assert reports.some(f"port {port} is taken: choose others with --coordinator.port")
