"""How roles find their run: descriptor, pinned key, one process per directory."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.broadcast import Relay, RelaySettings
from shoal.errors import ConfigError, IntegrityError, RefusedError, UnavailableError
from shoal.locks import BusyError, hold
from shoal.protocol.descriptor import RunDescriptor
from shoal.roles import processes as roles
from support.samples import descriptor, keypair
from support.tiny_run import Reports

URL = "http://coordinator:7300"
Show = Callable[[RunDescriptor], None]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Puts a run behind the address."""

    def put(run: RunDescriptor) -> None:
        sealed = run.seal(keypair("run")).to_bytes()
        monkeypatch.setattr(roles, "fetch_descriptor", lambda url, key, deadline_s: (sealed, run))

    return put


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    def put(error: Exception) -> None:
        def fetch(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(roles, "fetch_descriptor", fetch)

    return put


def test_the_key_of_a_run_is_pinned_at_first_use(show: Show, tmp_path: Path) -> None:
    reports = Reports()
    show(descriptor())
    assert roles.joined_descriptor(URL, None, tmp_path, reports) == descriptor()
    assert roles.joined_descriptor(URL, None, tmp_path, reports) == descriptor()
    assert json.loads((tmp_path / "descriptor.json").read_bytes())["kind"] == "descriptor"
    assert reports[0] == f"asking {URL} for its run, for up to 120 s"


def test_another_run_under_the_same_address_is_refused_with_the_way_out(show: Show, tmp_path: Path) -> None:
    show(descriptor())
    roles.joined_descriptor(URL, None, tmp_path, Reports())
    show(descriptor(run_key=keypair("other").public))
    with pytest.raises(roles.PinnedKeyError, match=r"not the expected .* remove .*pinned.* or pass the new --run-key"):
        roles.joined_descriptor(f"{URL}/", None, tmp_path, Reports())


def test_a_given_key_must_match_and_replaces_the_pin(show: Show, tmp_path: Path) -> None:
    show(descriptor())
    with pytest.raises(roles.PinnedKeyError):
        roles.joined_descriptor(URL, keypair("other").public, tmp_path, Reports())
    assert not (tmp_path / "pinned").exists()
    roles.joined_descriptor(URL, None, tmp_path, Reports())
    other = descriptor(run_key=keypair("other").public)
    show(other)
    assert roles.joined_descriptor(URL, other.run_key, tmp_path, Reports()) == other
    assert roles.joined_descriptor(URL, None, tmp_path, Reports()) == other


@pytest.mark.parametrize(
    "error", [RefusedError("http", "It answered 404."), IntegrityError("These bytes are not a signed envelope.")]
)
def test_a_web_server_that_is_no_coordinator_is_told_apart(
    fail: Callable[[Exception], None], tmp_path: Path, error: Exception
) -> None:
    fail(error)
    with pytest.raises(ConfigError, match="is not a Shoal coordinator"):
        roles.joined_descriptor(URL, None, tmp_path, Reports())


def test_a_coordinator_that_does_not_answer_stays_unavailable(
    fail: Callable[[Exception], None], tmp_path: Path
) -> None:
    fail(UnavailableError("The coordinator did not answer for 120 s."))
    with pytest.raises(UnavailableError, match="120 s"):
        roles.joined_descriptor(URL, None, tmp_path, Reports())


def work(root: Path, **options: Any) -> None:
    roles.work(
        URL, Reports(), **({"root": root, "key_file": None, "run_key": None, "name": "", "threads": 0} | options)
    )


def test_two_workers_never_share_a_directory(tmp_path: Path) -> None:
    with hold(tmp_path / "lock", ""), pytest.raises(BusyError, match=r"Another worker uses .* --dir"):
        work(tmp_path)


def test_no_key_is_made_for_a_run_that_cannot_be_reached(fail: Callable[[Exception], None], tmp_path: Path) -> None:
    fail(UnavailableError("Nobody there."))
    with pytest.raises(UnavailableError):
        work(tmp_path)
    assert not (tmp_path / "worker.key").exists()


def test_a_cheat_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="Known: stale, rewards"):
        roles._worker_kind("bribes")


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
    monkeypatch.setattr(roles, "stop_signal", lambda: stopped)
    reports = Reports()
    roles.relay(RelaySettings(tmp_path, ["http://up"]), reports)
    assert reports == ["relay at http://127.0.0.1:7302, following http://up", "upstream is gone", "upstream lies"]


def test_trouble_is_told_at_once_and_again_while_it_lasts(tmp_path: Path) -> None:
    now, reports = [0.0], Reports()
    metrics = roles.SpokenTrouble(tmp_path / "events.jsonl", reports, monotonic=lambda: now[0])
    for second in range(21):
        now[0] = float(second)
        metrics.event("relay_failed", relay="http://up", reason=f"http://up cannot be reached for shard {second}")
    assert len(reports) == 3
    metrics.event("relay_lied", relay="http://liar", about="shard", reason="bytes with digest 12… instead of 34…")
    assert reports[-1] == "http://liar lied and is avoided: bytes with digest 12… instead of 34…"


def test_several_validators_of_one_host_each_have_a_place_of_their_own(tmp_path: Path) -> None:
    with roles.own_place(tmp_path, "validator") as first, roles.own_place(tmp_path, "validator") as second:
        assert (first.name, second.name) == ("validator", "validator-2")
    with roles.own_place(tmp_path, "validator") as again:
        assert again == first
