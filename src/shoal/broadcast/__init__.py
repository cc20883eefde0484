"""SHARDCAST: weights to everyone, through relays that nobody trusts."""

from shoal.broadcast.book import RelayReport
from shoal.broadcast.client import WeightClient, WeightClientSettings
from shoal.broadcast.http.limits import ServerLimits
from shoal.broadcast.http.server import OriginServer
from shoal.broadcast.manifest import Head, Manifest, VersionEntry, WireTensor
from shoal.broadcast.mesh import Neighbours
from shoal.broadcast.origin import Origin, OriginSettings, Publication
from shoal.broadcast.progress import Progress
from shoal.broadcast.relay import Relay, RelaySettings

__all__ = [
    "Head",
    "Manifest",
    "Neighbours",
    "Origin",
    "OriginServer",
    "OriginSettings",
    "Progress",
    "Publication",
    "Relay",
    "RelayReport",
    "RelaySettings",
    "ServerLimits",
    "VersionEntry",
    "WeightClient",
    "WeightClientSettings",
    "WireTensor",
]
