"""SHARDCAST: weights from one publisher to all nodes, through relays that nobody trusts.

The package imports neither `shoal.protocol` nor `shoal.config`: it knows run keys, digests and addresses, and could serve any
project that publishes versions of large files. `tests/test_architecture.py` enforces that.
"""

from shoal.broadcast.client import WeightClient, WeightClientSettings
from shoal.broadcast.download import DownloadProgress
from shoal.broadcast.http.limits import ServerLimits
from shoal.broadcast.http.server import OriginServer
from shoal.broadcast.manifest import AdaptedBase, Head, Manifest, VersionEntry, WireTensor
from shoal.broadcast.mesh import Neighbours
from shoal.broadcast.origin import Origin, OriginSettings, Publication
from shoal.broadcast.relay import Relay, RelaySettings
from shoal.broadcast.scores import RelayReport

__all__ = [
    "AdaptedBase",
    "DownloadProgress",
    "Head",
    "Manifest",
    "Neighbours",
    "Origin",
    "OriginServer",
    "OriginSettings",
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
