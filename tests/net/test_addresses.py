"""Who sent a request: spellings of addresses, and headers that anybody can write."""

import pytest

from shoal.config import build_config
from shoal.errors import ConfigError
from shoal.net import Proxies, address_block


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("testclient", "testclient", True),
        ("not:an:address", "not:another", False),
    ],
)
def test_an_ipv6_subscriber_counts_as_one_address(one: str, other: str, is_one: bool) -> None:
    assert (address_block(one) == address_block(other)) == is_one


@pytest.mark.parametrize(
    ("spelling", "block"),
    [
        ("192.0.2.1:8080", "192.0.2.1"),
        (" 192.0.2.1 ", "192.0.2.1"),
        ("[2001:db8:1:2::9]:443", "20010db800010002"),
        ("[2001:db8:1:2::9]", "20010db800010002"),
        ("fe80::1%eth0", "fe80000000000000"),
        ("[::ffff:192.0.2.1]:80", "192.0.2.1"),
        ("", ""),
        ("unknown", "unknown"),
    ],
)
def test_addresses_are_read_as_peers_and_headers_spell_them(spelling: str, block: str) -> None:
    assert address_block(spelling) == block


@pytest.mark.parametrize(
    ("peer", "forwarded", "sender"),
    [
        ("192.0.2.1", ["203.0.113.9"], "192.0.2.1"),  # anybody can write the header
        ("127.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", ["198.51.100.7, 203.0.113.9"], "203.0.113.9"),  # the sender wrote the first itself
        ("127.0.0.1", ["127.0.0.1, 203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["203.0.113.9, 10.1.2.3"], "203.0.113.9"),  # two proxies of ours
        ("127.0.0.1", ["198.51.100.7", "203.0.113.9", "10.1.2.3"], "203.0.113.9"),  # a header line per proxy
        ("127.0.0.1", ["203.0.113.9, 192.0.2.77"], "192.0.2.77"),  # a proxy that is not ours is a sender
        ("::ffff:127.0.0.1", ["2001:db8::1"], "2001:db8::1"),  # IPv4 proxy, socket of both kinds
        ("2001:db8:5::1", ["[2001:db8::1]:443"], "[2001:db8::1]:443"),
        ("127.0.0.1", ["10.1.2.3, 10.1.2.4"], "10.1.2.3"),
        ("127.0.0.1", ["unknown"], "127.0.0.1"),  # nor is each made-up name another sender
        ("127.0.0.1", ["203.0.113.9, x" + "x" * 10_000], "127.0.0.1"),
        ("127.0.0.1", ["203.0.113.9,"], "127.0.0.1"),
        ("127.0.0.1", ["unknown, 10.1.2.3"], "10.1.2.3"),
        ("testclient", ["203.0.113.9"], "testclient"),
    ],
)
def test_only_our_own_proxies_say_who_sent_a_request(peer: str, forwarded: list[str], sender: str) -> None:
    proxies = Proxies(["127.0.0.1", "10.0.0.0/8", "2001:db8:5::/48"])
    assert proxies.sender(peer, forwarded) == sender


@pytest.mark.parametrize("proxy", ["*", "nginx", "127.0.0.1:80", "10.0.0.0/33", ""])
def test_a_proxy_that_is_no_address_is_refused_with_the_settings(proxy: str) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        build_config({"coordinator": {"trusted_proxies": [proxy]}})
