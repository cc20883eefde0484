import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import SimpleQueue

import pytest

from shoal.broadcast import Origin, OriginServer, Relay, RelaySettings, WeightClient, scores
from shoal.broadcast import relay as relay_module
from shoal.broadcast.http.pool import FetchError
from shoal.broadcast.peers import Sources
from shoal.broadcast.queue import WantedShard
from shoal.broadcast.store import DiskError, Folder, ShardStore, disk_error
from shoal.errors import ConfigError, UnavailableError
from shoal.identity import Envelope, Keypair
from shoal.metrics import EventLog

from .conftest import RUN_KEY, Listed, Mirror, answer
from .test_client import expected_weights, publish, weights_of

MakeClient = Callable[..., WeightClient]
MakeRelay = Callable[..., Relay]
MakeMirror = Callable[..., Mirror]


def test_version_passes_through_a_chain_of_relays(
    origin: Origin, origin_server: OriginServer, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    first = make_relay(origin_server.url, name="first")
    second = make_relay(first.url, name="second")
    client = make_client(second.url)
    digest = publish(origin)
    head = client.head(newer_than=0, wait_s=20)
    assert head.newest is not None
    assert head.newest.manifest_digest == digest
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()


def test_served_files_and_descriptor_pass_through(
    origin: Origin, origin_server: OriginServer, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    payload = json.dumps({"run_id": "run", "run_key": RUN_KEY.public})
    (origin.root / "descriptor.json").write_bytes(Envelope.seal("descriptor", payload, RUN_KEY).to_bytes())
    file = origin.add_file(b"tokenizer")
    publish(origin)
    relay = make_relay(origin_server.url, run_key=None)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert client.fetch_file(file) == b"tokenizer"


def test_shard_leaves_the_origin_once(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    relay = make_relay(mirror.url)
    for name in ("one", "two"):
        client = make_client(relay.url, name=name)
        client.head(newer_than=0, wait_s=20)
        client.fetch_version(0, digest)
    shards = [path for path in mirror.requests if path.startswith("/shards/")]
    assert len(shards) == len(set(shards))


def served_once(origin: Origin, mirror: Mirror, make_relay: MakeRelay, make_client: MakeClient) -> str:
    """A relay served the first version to one client and was stopped; returns the digest of the manifest."""
    digest = publish(origin)
    relay = make_relay(mirror.url)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    client.fetch_version(0, digest)
    relay.stop()
    return digest


def test_restarted_relay_fetches_nothing_twice(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    mirror = make_mirror()
    digest = served_once(origin, mirror, make_relay, make_client)
    mirror.requests.clear()
    again = make_relay(mirror.url)
    other = make_client(again.url, name="other")
    other.head(newer_than=0, wait_s=20)
    other.fetch_version(0, digest)
    assert not [path for path in mirror.requests if path.startswith("/shards/")]


def test_relay_names_the_parent_that_lied(
    origin: Origin,
    origin_server: OriginServer,
    make_mirror: MakeMirror,
    make_relay: MakeRelay,
    make_client: MakeClient,
) -> None:
    digest = publish(origin)
    liar = make_mirror(lambda handler, path: path.startswith("/shards/") and answer(handler, b"x" * 1000))
    relay = make_relay(liar.url, origin_server.url)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    by_url = {report.url: report for report in relay.sources.reports()}
    assert by_url[liar.url].lies == relay.metrics.counters["lies"]
    assert by_url[origin_server.url].lies == 0
    assert all(report.lies == 0 for report in client.reports())


def test_relay_directory_belongs_to_one_run(origin_server: OriginServer, make_relay: MakeRelay, tmp_path: Path) -> None:
    (tmp_path / "relay").mkdir()
    (tmp_path / "relay" / "run_key").write_text(Keypair.generate().public)
    with pytest.raises(ConfigError, match="belongs to the run"):
        make_relay(origin_server.url)


def test_taken_port_is_one_clear_sentence(origin_server: OriginServer, make_relay: MakeRelay, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot listen"):
        make_relay(origin_server.url, port=origin_server.port)
    second = OriginServer(ShardStore(tmp_path / "origin"), "127.0.0.1", origin_server.port)
    with pytest.raises(UnavailableError, match="cannot listen"):
        second.start()


def test_a_host_that_is_no_address_of_this_machine_is_not_taken_for_a_port_in_use(make_relay: MakeRelay) -> None:
    with pytest.raises(UnavailableError, match="cannot listen") as caught:
        make_relay("http://127.0.0.1:9", host="[::1]")
    assert "without brackets" in caught.value.hint


def test_relay_without_parents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="upstream"):
        Relay(RelaySettings(tmp_path, []))


def test_announce_hook_is_called_when_the_relay_runs(origin_server: OriginServer, make_relay: MakeRelay) -> None:
    called: SimpleQueue[str] = SimpleQueue()
    relay = make_relay(origin_server.url, announce=called.put)
    assert called.get(timeout=10) == relay.url


def test_a_relay_announces_a_version_when_it_is_here(
    origin: Origin, origin_server: OriginServer, make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "ANNOUNCE_EVERY_S", 600.0)
    monkeypatch.setattr(relay_module, "ANNOUNCE_PAUSE_S", 0.0)
    called: SimpleQueue[str] = SimpleQueue()
    relay = make_relay(origin_server.url, announce=called.put)
    assert called.get(timeout=20) == relay.url
    publish(origin)
    assert called.get(timeout=20) == relay.url
    assert relay.complete


def test_version_staged_under_two_heads_keeps_its_bytes(
    origin: Origin, origin_server: OriginServer, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    relay = make_relay(origin_server.url)
    client = make_client(relay.url)
    counter = 0
    for version in range(3):
        digest = publish(origin, version)
        while counter < version + 1:
            counter = client.head(newer_than=counter, wait_s=20).counter
        assert weights_of(client.fetch_version(version, digest)) == expected_weights(version)


def shard_requests(mirror: Mirror) -> list[str]:
    return [path for path in mirror.requests if path.startswith("/shards/")]


def test_relays_give_shards_to_each_other(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    parent = make_mirror()
    urls: list[str] = []
    relays = [make_relay(parent.url, name=f"relay{number}", neighbours=Listed(urls)) for number in range(4)]
    urls += [relay.url for relay in relays]
    digest = publish(origin)
    for number, relay in enumerate(relays):
        client = make_client(relay.url, name=f"client{number}")
        client.head(newer_than=0, wait_s=20)
        assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    asked = shard_requests(parent)
    assert len(asked) == len(set(asked))


def test_dead_peer_is_replaced(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    parent = make_mirror()
    urls = ["http://127.0.0.1:9"]
    relay = make_relay(parent.url, neighbours=Listed(urls))
    digest = publish(origin)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()


def test_lying_peer_is_named_and_avoided(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    parent = make_mirror()
    liar = make_mirror(lambda handler, path: path.startswith("/shards/") and answer(handler, b"x" * 1000))
    relay = make_relay(parent.url, neighbours=Listed([liar.url]))
    digest = publish(origin)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    lies = {report.url: report.lies for report in relay.sources.reports()}
    assert lies[liar.url] >= 1
    assert lies[parent.url] == 0


def test_dead_parent_is_replaced_by_a_spare_one(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    spare = make_mirror()
    relay = make_relay("http://127.0.0.1:9", neighbours=Listed(spare=[spare.url]))
    digest = publish(origin)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()


def test_spare_parents_are_left_alone_while_a_parent_lives(
    origin: Origin, origin_server: OriginServer, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    spare = make_mirror()
    relay = make_relay(origin_server.url, neighbours=Listed(spare=[spare.url]))
    digest = publish(origin)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    client.fetch_version(0, digest)
    assert spare.requests == []


def test_relay_in_a_mesh_takes_its_share_from_a_parent_that_is_no_member(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    parent = make_mirror()
    urls: list[str] = []
    first = make_relay(parent.url, name="first", neighbours=Listed(urls))
    second = make_relay(parent.url, first.url, name="second", neighbours=Listed(urls))
    urls += [first.url, second.url]
    digest = publish(origin)
    for number, relay in enumerate((first, second)):
        client = make_client(relay.url, name=f"client{number}")
        client.head(newer_than=0, wait_s=20)
        assert weights_of(client.fetch_version(0, digest, deadline_s=4)) == expected_weights()


@pytest.mark.parametrize("in_a_chain", [False, True])
def test_relays_that_waited_long_for_their_parent_do_not_wait_for_each_other(
    in_a_chain: bool,
    origin: Origin,
    make_mirror: MakeMirror,
    make_relay: MakeRelay,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run's relays start before its origin: each then asked the other for what both lacked, five seconds long."""
    monkeypatch.setattr(scores, "SMOOTHING", 0.1)  # a few answers do not make the parent reliable again
    parent = make_mirror()
    urls: list[str] = []
    relays: list[Relay] = []
    for number in range(2):
        above = [relay.url for relay in relays] if in_a_chain else []
        relays.append(make_relay(*above, parent.url, name=f"relay{number}", neighbours=Listed(urls)))
    urls += [relay.url for relay in relays]
    for relay in relays:
        was_away_for_long(relay, parent.url)
    digest = publish(origin)
    for number, relay in enumerate(relays):
        client = make_client(relay.url, name=f"client{number}")
        client.head(newer_than=0, wait_s=20)
        assert weights_of(client.fetch_version(0, digest, deadline_s=4)) == expected_weights()


def test_a_relay_that_learns_of_a_version_from_a_peer_before_its_parent_answers_does_not_wait_for_that_peer(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    """The peer waits for its share, too: each held the other's request, five seconds long."""

    def has_no_head(handler: BaseHTTPRequestHandler, path: str) -> bool:
        return path == "/head.json" and answer(handler, b"", status=500)

    silent, talking = make_mirror(has_no_head), make_mirror()
    urls: list[str] = []
    relays = [make_relay(silent.url, name="relay0", neighbours=Listed(urls))]
    relays.append(make_relay(talking.url, name="relay1", neighbours=Listed(urls)))
    urls += [relay.url for relay in relays]
    digest = publish(origin)
    for number, relay in enumerate(relays):
        client = make_client(relay.url, name=f"client{number}")
        client.head(newer_than=0, wait_s=20)
        assert weights_of(client.fetch_version(0, digest, deadline_s=4)) == expected_weights()


def test_a_relay_does_not_wait_for_a_parent_that_already_counts_on_it(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    """Relays learn of each other when they announce themselves, the first one ten seconds later."""
    parent = make_mirror()
    urls: list[str] = []
    first = make_relay(parent.url, name="relay0", neighbours=Listed(urls))
    second = make_relay(first.url, parent.url, name="relay1", neighbours=Listed([]))
    urls += [first.url, second.url]
    was_away_for_long(second, parent.url)
    digest = publish(origin)
    for number, relay in enumerate((first, second)):
        client = make_client(relay.url, name=f"client{number}")
        client.head(newer_than=0, wait_s=20)
        assert weights_of(client.fetch_version(0, digest, deadline_s=4)) == expected_weights()


def was_away_for_long(relay: Relay, parent_url: str) -> None:
    """The parent failed often, and answers again."""

    def refused(url: str, deadline: float) -> bytes:
        raise FetchError(f"{url} cannot be reached.", "unreachable")

    for _ in range(20):
        with suppress(FetchError):
            relay.sources.ask(parent_url, "head.json", refused, 0.0)
    relay.sources.ask(parent_url, "head.json", lambda url, deadline: b"", 0.0)


def test_missing_parent_is_reported_at_once(make_relay: MakeRelay) -> None:
    reported = threading.Event()

    class Heard(EventLog):
        def event(self, name: str, /, **fields: object) -> None:
            if name == "relay_failed" and "127.0.0.1:9" in str(fields["reason"]):
                reported.set()

    make_relay("http://127.0.0.1:9", metrics=Heard())
    assert reported.wait(10)


def test_full_disk_is_reported_and_cured_without_fetching_anything_twice(
    origin: Origin,
    make_mirror: MakeMirror,
    make_relay: MakeRelay,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = publish(origin)
    full, reported = threading.Event(), threading.Event()
    full.set()
    write = ShardStore.put

    def put(store: ShardStore, folder: Folder, data: bytes, digest: str | None = None) -> str:
        if full.is_set() and folder == "shards":
            raise disk_error(OSError(28, "No space left on device"), store.root)
        return write(store, folder, data, digest)

    class Heard(EventLog):
        heard = 0

        def event(self, name: str, /, **fields: object) -> None:
            if "no space on the disk" in str(fields.get("reason")):
                self.heard += 1
                if self.heard > 12:
                    reported.set()

    monkeypatch.setattr(ShardStore, "put", put)
    monkeypatch.setattr("shoal.broadcast.relay.AFTER_TROUBLE_S", 0.01)
    mirror = make_mirror()
    relay = make_relay(mirror.url, metrics=Heard())
    assert reported.wait(10)
    full.clear()
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    shards = [path for path in mirror.requests if path.startswith("/shards/")]
    assert len(shards) == len(set(shards))


def test_a_restarted_relay_serves_at_once_what_is_right_and_fetches_what_is_not(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient, tmp_path: Path
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    relay = make_relay(mirror.url)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    client.fetch_version(0, digest)
    relay.stop()
    damaged = sorted((tmp_path / "relay" / "shards").iterdir())[0]
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    mirror.requests.clear()
    again = make_relay(mirror.url)
    other = make_client(again.url, name="other")
    other.head(newer_than=0, wait_s=20)
    assert weights_of(other.fetch_version(0, digest)) == expected_weights()
    assert [path for path in mirror.requests if path.startswith("/shards/")] == [f"/shards/{damaged.name}"]


def test_a_restarted_relay_serves_a_whole_version_while_it_has_verified_nothing_by_itself(
    origin: Origin,
    make_mirror: MakeMirror,
    make_relay: MakeRelay,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large model takes a quarter of an hour: what is asked for is verified at once, out of turn."""
    mirror = make_mirror()
    digest = served_once(origin, mirror, make_relay, make_client)
    verified_all, matches = threading.Event(), ShardStore._matches

    def slow(store: ShardStore, folder: Folder, name: str) -> bool:
        if folder == "shards" and threading.current_thread().name.startswith("relay "):
            verified_all.wait(30)
        return matches(store, folder, name)

    monkeypatch.setattr(ShardStore, "_matches", slow)
    mirror.requests.clear()
    again = make_relay(mirror.url)
    other = make_client(again.url, name="other")
    try:
        other.head(newer_than=0, wait_s=20)
        assert weights_of(other.fetch_version(0, digest)) == expected_weights()
        assert not again.complete
    finally:
        verified_all.set()
    assert not [path for path in mirror.requests if path.startswith("/shards/")]


def test_a_relay_whose_parents_are_gone_serves_what_it_has_after_a_restart(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    digest = served_once(origin, make_mirror(), make_relay, make_client)
    again = make_relay("http://127.0.0.1:1")
    other = make_client(again.url, name="other")
    other.head(newer_than=0, wait_s=20)
    assert weights_of(other.fetch_version(0, digest)) == expected_weights()


def test_peers_that_never_answer_do_not_keep_a_relay_from_its_parents(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    """More strangers than fetchers, all in the mesh; each is asked about once and then left out."""
    parent = make_mirror()
    relay = make_relay(parent.url, neighbours=Listed([f"http://127.0.0.1:{port}" for port in range(1, 65)]))
    digest = publish(origin)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    failures = sum(report.failures for report in relay.sources.reports() if report.url != parent.url)
    assert failures < 128


def test_a_relay_whose_only_parent_flips_one_bit_once_still_gets_the_version(
    origin: Origin, make_mirror: MakeMirror, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    digest = publish(origin)
    flipped: list[str] = []

    def flips_once(handler: object, path: str) -> bool:
        if flipped or not path.startswith("/shards/"):
            return False
        flipped.append(path)
        data = bytearray((origin.root / path.strip("/")).read_bytes())
        data[0] ^= 1
        return answer(handler, bytes(data))  # type: ignore[arg-type]

    relay = make_relay(make_mirror(flips_once).url)
    client = make_client(relay.url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()
    assert flipped


def test_an_error_that_nobody_expects_does_not_end_the_threads_of_a_relay(
    origin: Origin,
    origin_server: OriginServer,
    make_relay: MakeRelay,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread meets it, and each shard arrives."""
    digest = publish(origin)
    monkeypatch.setattr(relay_module, "AFTER_TROUBLE_S", 0.01)
    fetch, broken = Relay._from_parents, set[str]()

    def breaks_at_first(relay: Relay, item: WantedShard) -> memoryview:
        if item.digest not in broken:
            broken.add(item.digest)
            raise ValueError("a page that nobody has thought of")
        return fetch(relay, item)

    monkeypatch.setattr(Relay, "_from_parents", breaks_at_first)
    client = make_client(make_relay(origin_server.url).url)
    client.head(newer_than=0, wait_s=20)
    assert weights_of(client.fetch_version(0, digest)) == expected_weights()


@pytest.mark.parametrize("torn", [b"", b"{", b'{"kind": "head"}'])
def test_heads_that_a_power_cut_tore_are_replaced(
    torn: bytes, origin: Origin, origin_server: OriginServer, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    digest = publish(origin)
    relay, client = make_relay(origin_server.url), make_client(origin_server.url)
    client.fetch_version(0, digest)
    client.head()
    relay.stop()
    heads = [path for path in origin.root.parent.rglob("*head.json") if "origin" not in path.parts]
    for path in heads:
        path.write_bytes(torn)
    again = make_client(make_relay(origin_server.url).url)
    assert again.head(newer_than=0, wait_s=20).counter == 1
    assert heads


def test_a_head_that_cannot_be_read_is_named_and_not_taken_for_a_port(tmp_path: Path, make_relay: MakeRelay) -> None:
    (tmp_path / "relay/head.json").mkdir(parents=True)
    with pytest.raises(DiskError, match=r"head\.json cannot be read: Is a directory"):
        make_relay("http://127.0.0.1:9")


def test_connections_that_break_because_this_side_stops_are_held_against_nobody() -> None:
    said: list[str] = []

    class Heard(EventLog):
        def event(self, name: str, /, **fields: object) -> None:
            said.append(name)

    def broken(url: str, until: float) -> None:
        raise FetchError("cut off", "unreachable")

    sources = Sources(lambda: ["http://parent"], metrics=Heard())
    sources.stop()
    with pytest.raises(FetchError):
        sources.ask("http://parent", "head.json", broken, 0.0)
    assert not said
    assert sources.reports() == []
