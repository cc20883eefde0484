"""Who sent a request: what counts as one address, and whose `X-Forwarded-For` is believed.

The header is read from its end, past proxies that are trusted; the first address that is not one of them sent the request.
Everything before it was written by that sender and is not looked at. And how an address is written in a URL.
"""

import functools
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
"""Listening on every address of a machine, and how its own processes reach that."""
LONGEST_ADDRESS = 100
"""Letters, brackets, zone and port included; longer text is none, and must not fill a cache."""


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@functools.lru_cache(maxsize=4096)
def address_block(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 that an IPv6 subscriber holds whole."""
    address = parse_address(host)
    if address is None:
        return host
    return str(address) if isinstance(address, IPv4Address) else address.packed[:8].hex()


def parse_address(text: str) -> Address | None:
    """An address as peers and headers spell it: `192.0.2.1:80`, `[2001:db8::1]:80`, `fe80::1%eth0`, `::ffff:192.0.2.1`."""
    return _parse(text) if len(text) <= LONGEST_ADDRESS else None


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Address | None:
    """Cached: every request asks several times for the address of its peer, and parsing one takes 30 microseconds."""
    host = text.strip()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


class Proxies:
    """The proxies of a server, by address or network."""

    def __init__(self, trusted: Iterable[str]) -> None:
        self._networks: list[Network] = [ip_network(one, strict=False) for one in trusted]
        self._is_proxy = functools.lru_cache(maxsize=4096)(self._look_up)

    def __contains__(self, host: str) -> bool:
        return len(host) <= LONGEST_ADDRESS and self._is_proxy(host)

    def _look_up(self, host: str) -> bool:
        address = parse_address(host)
        return address is not None and any(address in network for network in self._networks)

    def sender(self, peer: str, forwarded: Iterable[str]) -> str:
        """The address that sent a request; `forwarded` are the values of its X-Forwarded-For headers, in order."""
        hops = [hop.strip() for value in forwarded for hop in value.split(",")]
        sender = peer
        # What is no address counts as its proxy: made-up names would each be a new sender, with limits of its own.
        while sender in self and hops and parse_address(hops[-1]) is not None:
            sender = hops.pop()
        return sender
