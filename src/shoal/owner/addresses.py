"""How other machines reach a run: checked before its addresses are signed, with the likely ones of this machine as a proposal.

A server may listen on every address of a machine (0.0.0.0 or ::). Others cannot use that, so such a run needs public addresses.
"""

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from shoal.config import ShoalConfig
from shoal.config.schema import ListenConfig
from shoal.errors import ConfigError
from shoal.net import WILDCARDS, http_url

SERVERS = ("coordinator", "broadcast")
SIOCGIFADDR = 0x8915
SOMEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that belong to nobody: a route to them is the route to everybody."""
HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:]+")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def check_addresses(config: ShoalConfig) -> None:
    """Refuses addresses that no other machine could use, with those that are likely right."""
    for name in missing_addresses(config):
        raise ConfigError(
            f"{name}.host = {_server(config, name).host} says where to listen, not how others reach it.",
            hint=f"Give {_flags(config, likely_host() or 'ADDRESS')}, or put them into the run file.",
        )
    for name in SERVERS:
        url = _server(config, name).public_url
        if url and urlsplit(url).hostname in WILDCARDS:
            raise ConfigError(
                f"{name}.public_url = {url} is no address that others can use.", hint="Name this machine."
            )
    if not is_local(config.coordinator_url) and is_local(config.origin_url):
        raise ConfigError(
            f"Others are to join at {config.coordinator_url}, but the weights are at {config.origin_url}.",
            hint="Set broadcast.host, or broadcast.public_url, too.",
        )


def missing_addresses(config: ShoalConfig) -> list[str]:
    """Servers that listen everywhere and have no public address."""
    return [
        name for name in SERVERS if _server(config, name).host in WILDCARDS and not _server(config, name).public_url
    ]


def with_public_host(config: ShoalConfig, host: str) -> ShoalConfig:
    """The same run with public addresses on this host, where it lacks them."""
    servers = {}
    for name in missing_addresses(config):
        server = _server(config, name)
        servers[name] = server.model_copy(update={"public_url": http_url(host, server.port)})
    return config.model_copy(update=servers)


def with_known_addresses(config: ShoalConfig, known: ShoalConfig) -> ShoalConfig:
    """The same run with the public addresses that it had before, where it lacks them."""
    servers = {}
    for name in missing_addresses(config):
        servers[name] = _server(config, name).model_copy(update={"public_url": _server(known, name).public_url})
    return config.model_copy(update=servers)


def parse_host(text: str) -> str:
    """The host that somebody answered: a name, an address, or a URL with one."""
    with suppress(ValueError):
        address = ipaddress.ip_address(text.strip().strip("[]"))
        if not address.is_unspecified:
            return str(address)
    with suppress(ValueError):
        parts = urlsplit(text if "//" in text else f"//{text}")
        host = parts.hostname or ""
        if HOST_NAME.fullmatch(host) and host not in WILDCARDS and parts.path in ("", "/"):
            return host
    raise ConfigError(f"{text.strip()!r} is no address of a machine.", hint="Such as run.example.org or 203.0.113.5.")


def is_local(url: str) -> bool:
    """Whether an address means this machine and no other."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def likely_host() -> str | None:
    """The address under which other machines probably reach this one: that of the route outwards, or of any interface."""
    routes = (_routed(family, host) for family, host in SOMEWHERE.items())
    candidates = chain(routes, _ipv4_addresses(), _ipv6_addresses())
    return next((host for host in candidates if host is not None and _is_usable(host)), None)


def _routed(family: socket.AddressFamily, host: str) -> str | None:
    """The own address of the route to a host; nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _ipv4_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> Iterator[str]:
    with suppress(OSError):
        for line in IPV6_ADDRESSES.read_text().splitlines():
            yield str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))


def _is_usable(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _flags(config: ShoalConfig, host: str) -> str:
    missing = missing_addresses(config)
    return " and ".join(f"--{name}.public_url {http_url(host, _server(config, name).port)}" for name in missing)


def _server(config: ShoalConfig, name: str) -> ListenConfig:
    server = getattr(config, name)
    assert isinstance(server, ListenConfig)
    return server
