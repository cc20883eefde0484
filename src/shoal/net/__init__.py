"""What one address may hold of a server: addresses, connections, requests under way, rates."""

from shoal.net.addresses import WILDCARDS, Proxies, address_block, http_url
from shoal.net.connections import Connections, UnderWay, raise_file_limit
from shoal.net.rates import RateLimit

__all__ = [
    "WILDCARDS",
    "Connections",
    "Proxies",
    "RateLimit",
    "UnderWay",
    "address_block",
    "http_url",
    "raise_file_limit",
]
