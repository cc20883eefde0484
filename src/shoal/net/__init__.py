"""What one address may hold of a server: addresses, connections, requests under way, rates."""

from shoal.net.addresses import Proxies, address_block
from shoal.net.connections import Connections, UnderWay, raise_file_limit
from shoal.net.rates import RateLimit

__all__ = ["Connections", "Proxies", "RateLimit", "UnderWay", "address_block", "raise_file_limit"]
