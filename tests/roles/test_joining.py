"""How roles find their run: its descriptor, and the key that is pinned."""

import json
from pathlib import Path

import pytest

from roles.conftest import Fail, Show
from shoal.errors import ConfigError, IntegrityError, RefusedError, UnavailableError
from shoal.roles import joining
from support.samples import descriptor, keypair
from support.tiny_run import Reports

URL = "http://coordinator:7300"


def test_the_key_of_a_run_is_pinned_at_first_use(show: Show, tmp_path: Path) -> None:
    reports = Reports()
    show(descriptor())
    assert joining.joined_descriptor(URL, None, tmp_path, reports) == descriptor()
    assert joining.joined_descriptor(URL, None, tmp_path, reports) == descriptor()
    assert json.loads((tmp_path / "descriptor.json").read_bytes())["kind"] == "descriptor"
    assert reports[0] == f"asking {URL} for its run, for up to 60 minutes"


def test_another_run_under_the_same_address_is_refused_with_the_way_out(show: Show, tmp_path: Path) -> None:
    show(descriptor())
    joining.joined_descriptor(URL, None, tmp_path, Reports())
    show(descriptor(run_key=keypair("other").public))
    with pytest.raises(
        joining.PinnedKeyError, match=r"not the expected .* remove .*pinned.* or pass the new --run-key"
    ):
        joining.joined_descriptor(f"{URL}/", None, tmp_path, Reports())


def test_a_wrong_run_key_is_shown_where_it_differs(show: Show, tmp_path: Path) -> None:
    right = descriptor().run_key
    show(descriptor())
    near = right[:40] + ("0" if right[40] != "0" else "1") + right[41:]
    with pytest.raises(joining.PinnedKeyError) as refused:
        joining.joined_descriptor(URL, near, tmp_path, Reports())
    assert f"has the key {right[:44]}…, not the {near[:44]}… of --run-key." in refused.value.message
    assert "pinned" not in str(refused.value)
    assert "Ask the run's owner" in refused.value.hint


@pytest.mark.parametrize("key", ["", "abc", "zz" * 32, "ab" * 31, "AB" * 32, "ab" * 33, " " + "ab" * 32])
def test_a_malformed_run_key_is_refused_before_anybody_is_asked(key: str, tmp_path: Path) -> None:
    reports = Reports()
    with pytest.raises(ConfigError, match=r"is no public key.* 64 letters"):
        joining.joined_descriptor(URL, key, tmp_path, reports)
    assert reports == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org:7300",
        "ftp://example.org",
        "http://",
        "http://:7300",
        "http://a..b",
        "http://h:99999",
        "http://[::1",
    ],
)
def test_what_is_no_address_is_refused_before_anybody_is_asked(url: str, tmp_path: Path) -> None:
    reports = Reports()
    with pytest.raises(ConfigError, match="is no address"):
        joining.joined_descriptor(url, None, tmp_path, reports)
    assert reports == []


def test_a_given_key_must_match_and_replaces_the_pin(show: Show, tmp_path: Path) -> None:
    show(descriptor())
    with pytest.raises(joining.PinnedKeyError):
        joining.joined_descriptor(URL, keypair("other").public, tmp_path, Reports())
    assert not (tmp_path / "pinned").exists()
    joining.joined_descriptor(URL, None, tmp_path, Reports())
    other = descriptor(run_key=keypair("other").public)
    show(other)
    assert joining.joined_descriptor(URL, other.run_key, tmp_path, Reports()) == other
    assert joining.joined_descriptor(URL, None, tmp_path, Reports()) == other


@pytest.mark.parametrize(
    "error", [RefusedError("http", "It answered 404."), IntegrityError("These bytes are not a signed envelope.")]
)
def test_a_web_server_that_is_no_coordinator_is_recognised(fail: Fail, tmp_path: Path, error: Exception) -> None:
    fail(error)
    with pytest.raises(ConfigError, match="is not a Shoal coordinator"):
        joining.joined_descriptor(URL, None, tmp_path, Reports())


def test_a_coordinator_that_does_not_answer_stays_unavailable(fail: Fail, tmp_path: Path) -> None:
    fail(UnavailableError("The coordinator did not answer for 120 s."))
    with pytest.raises(UnavailableError, match="120 s"):
        joining.joined_descriptor(URL, None, tmp_path, Reports())
