"""SHARDCAST: weights to everyone, through relays that nobody trusts."""

from shoal.broadcast.book import RelayReport
from shoal.broadcast.client import WeightClient
from shoal.broadcast.limits import ServerLimits
from shoal.broadcast.manifest import Head, Manifest, VersionEntry, WireTensor
from shoal.broadcast.mesh import Neighbours
from shoal.broadcast.origin import Origin, Publication
from shoal.broadcast.progress import Progress
from shoal.broadcast.relay import Relay, run_relay
from shoal.broadcast.server import OriginServer, serve_origin

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
