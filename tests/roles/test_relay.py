"""A relay's start, and what its operator reads."""

import threading
from pathlib import Path

import pytest

from shoal.broadcast import Relay, RelaySettings
from shoal.roles import relay
from support.tiny_run import Reports


def test_a_relay_tells_its_operator_what_is_wrong_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class TroubledRelay(Relay):
        url = "http://127.0.0.1:7302"

        def start(self) -> None:
            stopped.set()

        def stop(self) -> None:
            for reason in ("upstream is gone", "upstream is gone", "upstream lies"):
                self.metrics.event("trouble", reason=reason)
            self.metrics.event("head_mirrored", counter=1)

    stopped = threading.Event()
    monkeypatch.setattr("shoal.broadcast.Relay", TroubledRelay)
    monkeypatch.setattr(relay, "stop_signal", lambda: stopped)
    reports = Reports()
    relay.relay(RelaySettings(tmp_path, ["http://up"]), reports)
    assert reports == ["relay at http://127.0.0.1:7302, following http://up", "upstream is gone", "upstream lies"]
