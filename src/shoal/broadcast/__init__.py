"""SHARDCAST: weights to everyone, through relays that nobody trusts."""

from shoal.broadcast.book import RelayReport
from shoal.broadcast.client import WeightClient
from shoal.broadcast.http.limits import ServerLimits
from shoal.broadcast.http.server import OriginServer, serve_origin
from shoal.broadcast.manifest import Head, Manifest, VersionEntry, WireTensor
from shoal.broadcast.mesh import Neighbours
from shoal.broadcast.origin import Origin, Publication
from shoal.broadcast.progress import Progress
from shoal.broadcast.relay import Relay, run_relay

__all__ = [
    "Head",
    "Manifest",
    "Neighbours",
    "Origin",
    "OriginServer",
    "Progress",
    "Publication",
    "Relay",
    "RelayReport",
    "ServerLimits",
    "VersionEntry",
    "WeightClient",
    "WireTensor",
    "run_relay",
    "serve_origin",
]
