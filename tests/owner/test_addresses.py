"""Addresses that other machines can use, or a refusal with those that are likely right."""

import ipaddress
from typing import Any

import pytest

from shoal.config import ShoalConfig, build_config
from shoal.errors import ConfigError
from shoal.owner import addresses


def listening(host: str, **public: str) -> ShoalConfig:
    servers = {
        name: {"host": host} | ({"public_url": public[name]} if name in public else {}) for name in addresses.SERVERS
    }
    return build_config(servers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_run_that_listens_everywhere_must_say_how_others_reach_it(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "likely_host", lambda: "10.1.2.3")
    with pytest.raises(
        ConfigError, match=r"coordinator\.host = .* says where to listen, not how others reach it"
    ) as refused:
        addresses.check_addresses(listening(host))
    assert refused.value.hint == (
        "Give --coordinator.public_url http://10.1.2.3:7300 and --broadcast.public_url http://10.1.2.3:7301,"
        " or put them into the run file."
    )


def test_only_what_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "likely_host", lambda: "fd00::7")
    with pytest.raises(ConfigError, match=r"^broadcast\.host") as refused:
        addresses.check_addresses(listening("::", coordinator="https://run.example.org"))
    assert "Give --broadcast.public_url http://[fd00::7]:7301, or" in refused.value.hint


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"coordinator": {"public_url": "http://0.0.0.0:7300"}}, "no address that others can use"),
        ({"broadcast": {"public_url": "http://[::]:7301"}}, "no address that others can use"),
        ({"coordinator": {"host": "10.0.0.4"}}, r"but the weights are at http://127\.0\.0\.1:7301"),
        ({"coordinator": {"public_url": "https://run.example.org"}}, "but the weights are at"),
    ],
)
def test_addresses_that_cannot_work_are_refused(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        addresses.check_addresses(build_config(sections))


@pytest.mark.parametrize(
    "config",
    [
        ShoalConfig(),
        listening("10.0.0.4"),
        listening("0.0.0.0", coordinator="http://run.example.org:7300", broadcast="https://cdn.example.org/weights"),
        build_config({"broadcast": {"host": "10.0.0.4"}}),
    ],
)
def test_addresses_that_may_work_are_left_alone(config: ShoalConfig) -> None:
    addresses.check_addresses(config)
    assert addresses.with_public_host(config, "elsewhere") == config


def test_one_answer_gives_both_servers_their_address() -> None:
    config = addresses.with_public_host(listening("0.0.0.0"), "203.0.113.5")
    assert (config.coordinator_url, config.origin_url) == ("http://203.0.113.5:7300", "http://203.0.113.5:7301")
    addresses.check_addresses(config)


def test_a_run_remembers_its_public_addresses() -> None:
    known = addresses.with_public_host(listening("::"), "2001:db8::5")
    config = addresses.with_known_addresses(listening("::"), known)
    assert config.coordinator_url == "http://[2001:db8::5]:7300"
    moved = listening("::", coordinator="http://new.example.org:7300", broadcast="http://new.example.org:7301")
    assert addresses.with_known_addresses(moved, known) == moved


@pytest.mark.parametrize(
    ("answer", "host"),
    [
        ("run.example.org", "run.example.org"),
        (" 203.0.113.5 ", "203.0.113.5"),
        ("203.0.113.5:7300", "203.0.113.5"),
        ("http://run.example.org:7300/", "run.example.org"),
        ("2001:db8::5", "2001:db8::5"),
        ("[2001:db8::5]", "2001:db8::5"),
        ("http://[2001:db8::5]:7300", "2001:db8::5"),
    ],
)
def test_an_answer_may_be_a_name_an_address_or_a_url(answer: str, host: str) -> None:
    assert addresses.parse_host(answer) == host


@pytest.mark.parametrize(
    "answer", ["", " ", "0.0.0.0", "::", "http://", "two words", "a/b@", "http://[::]:7300", "http://[x"]
)
def test_an_answer_that_is_no_address_is_refused(answer: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a machine"):
        addresses.parse_host(answer)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:7300", True),
        ("http://127.8.8.8", True),
        ("http://[::1]:7300", True),
        ("http://localhost:7300", True),
        ("http://127.0.0.1.example.org", False),
        ("http://10.0.0.1", False),
        ("https://run.example.org", False),
    ],
)
def test_addresses_of_this_machine_alone_are_recognised(url: str, local: bool) -> None:
    assert addresses.is_local(url) is local


def test_the_likely_address_is_one_that_others_could_use() -> None:
    host = addresses.likely_host()
    assert host is None or not ipaddress.ip_address(host).is_loopback


def test_without_a_route_outwards_an_interface_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_routed", lambda family, host: None)
    monkeypatch.setattr(addresses, "_ipv4_addresses", lambda: iter(["127.0.0.1", "169.254.3.4", "192.168.7.9"]))
    assert addresses.likely_host() == "192.168.7.9"
    monkeypatch.setattr(addresses, "_ipv4_addresses", lambda: iter(["127.0.0.1"]))
    monkeypatch.setattr(addresses, "_ipv6_addresses", lambda: iter(["::1", "fe80::1", "fd00::9"]))
    assert addresses.likely_host() == "fd00::9"
    monkeypatch.setattr(addresses, "_ipv6_addresses", lambda: iter(["::1"]))
    assert addresses.likely_host() is None
