"""A relay as a process: mirrors what the origin publishes, and registers with the coordinator if there is one."""

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.files import remove_all_leftovers
from shoal.identity import Keypair
from shoal.locks import hold
from shoal.metrics import Report, ReportingEventLog
from shoal.net import WILDCARDS, http_url
from shoal.owner.addresses import likely_host
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.evidence_store import KeptHeads
from shoal.roles.authority import trust_authority
from shoal.roles.joining import check_address, joined_descriptor

if TYPE_CHECKING:
    from shoal.broadcast import RelaySettings
    from shoal.broadcast.manifest import Head

RELAY_GONE_S = 30.0
LISTED = "workers are sent to this relay"
WAITS_FOR_PLACE = "this relay waits for a place in the coordinator's list: it needs clients that were served well"


def relay(
    settings: "RelaySettings", report: Report, *, coordinator: str | None = None, authority: Path | None = None
) -> None:
    """Runs a relay until SIGINT or SIGTERM."""
    from shoal.broadcast import Neighbours, Relay

    root, run_key = settings.root, settings.run_key
    for url in (*settings.upstreams, *settings.peers, *filter(None, [settings.public_url])):
        check_address(url)
    if authority is not None:
        trust_authority(authority, root / "trusted.pem")
    metrics = ReportingEventLog(root / "events.jsonl", report)
    neighbours, announce, clock = None, None, time.time
    heads: KeptHeads | None = None
    if coordinator is not None:
        settings = _announced(settings, report)
        descriptor = joined_descriptor(coordinator, run_key, root, report)
        settings = replace(settings, run_key=descriptor.run_key)
        keypair = Keypair.load_or_create(root / "relay.key")
        client = CoordinatorClient.for_run(descriptor, keypair, coordinator)
        clock = client.server_time
        neighbours = Neighbours(settings.upstreams, settings.peers)
        heads = kept = KeptHeads(root, descriptor.run_id, descriptor.coordinator_key)
        was_listed: bool | None = None

        def announce(url: str) -> None:
            nonlocal was_listed
            head = _newest_head(root, descriptor.run_key)
            if problem := kept.keep(head.ledger_head if head else ""):
                report(f"warning: {problem}")
            answer = client.announce_relay(
                api.RelayBody(
                    url=url,
                    exchanges=neighbours.exchanges,
                    newest_version=head.versions[-1].version if head and head.versions else -1,
                    bytes_sent=int(metrics.counters["bytes_sent"]),
                    bytes_received=int(metrics.counters["bytes_received"]),
                )
            )
            if answer.is_listed != was_listed:
                was_listed = answer.is_listed
                report(LISTED if was_listed else f"{WAITS_FOR_PLACE} (key {keypair.public})")
            living = [view for view in answer.relays if view.last_seen_s <= RELAY_GONE_S]
            spare = [answer.origin_url, *descriptor.relay_urls]
            neighbours.update([(view.url, view.exchanges) for view in living if view.url != url], spare)

    with hold(root / "lock", f"Another relay uses {root}.", hint="Give this one its own directory with --dir."):
        remove_all_leftovers(root)
        relay = Relay(settings, neighbours=neighbours, announce=announce, metrics=metrics, report=report, clock=clock)
        stopped = stop_signal()
        relay.start()
        report(f"relay at {relay.url}, following {', '.join(settings.upstreams)}")
        try:
            stopped.wait()
        finally:
            relay.stop()
            if heads is not None:
                heads.save()


def _announced(settings: "RelaySettings", report: Report) -> "RelaySettings":
    """A relay that listens everywhere is announced under the likely address of this machine, unless its owner says otherwise."""
    if settings.host not in WILDCARDS or settings.public_url is not None:
        return settings
    host = likely_host()
    if host is None or not settings.port:
        raise ConfigError("Workers must know how to reach this relay.", hint="Say how with --public-url.")
    url = http_url(host, settings.port)
    report(f"workers will be sent to {url}; if others reach this relay by another address, give --public-url")
    return replace(settings, public_url=url)


def stop_signal() -> threading.Event:
    """Set by SIGINT or SIGTERM from now on."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _newest_head(root: Path, run_key: str) -> "Head | None":
    from shoal.broadcast.manifest import open_head

    path = root / "head.json"
    return open_head(path.read_bytes(), run_key) if path.exists() else None
