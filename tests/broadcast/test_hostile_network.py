"""Relays that lie, stall, vanish or never end: no wrong byte is accepted, no wait is unbounded, the reason is always reported."""

import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.broadcast import Origin, WeightClient
from shoal.broadcast.manifest import open_head, open_manifest, seal_head
from shoal.errors import ShoalError, UnavailableError
from shoal.identity import Envelope, Keypair

from .conftest import RUN_KEY, Behaviour, Mirror, answer
from .test_client import expected_weights, publish, weights_of

Handler = http.server.BaseHTTPRequestHandler
MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]
STRANGER = Keypair.from_seed(b"s" * 32)


def file_of(origin: Origin, path: str) -> bytes:
    return (origin.root / path.strip("/")).read_bytes()


def flips_bits(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if not path.startswith("/shards/"):
            return False
        data = bytearray(file_of(origin, path))
        data[len(data) // 2] ^= 4
        return answer(handler, bytes(data))

    return behave


def truncates(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        return path.startswith("/shards/") and answer(handler, file_of(origin, path)[:-1])

    return behave


def promises_more_than_it_sends(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if not path.startswith("/shards/"):
            return False
        data = file_of(origin, path)
        answer(handler, data[: len(data) // 2], length=len(data))
        handler.close_connection = True
        return True

    return behave


def never_ends(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if not path.startswith(("/shards/", "/manifests/")):
            return False
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        try:
            while True:
                handler.wfile.write(b"x" * 65536)
        except OSError:
            return True

    return behave


def drips(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if not path.startswith("/shards/"):
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.close_connection = True
        try:
            for _ in range(1000):
                handler.wfile.write(b"x")
                time.sleep(0.05)
        except OSError:
            pass
        return True

    return behave


def says_nothing(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if path.startswith("/shards/"):
            handler.close_connection = True
            handler.rfile.read(1)
            return True
        return False

    return behave


def breaks_off(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if path.startswith("/shards/"):
            handler.close_connection = True
            return True
        return False

    return behave


def redirects(origin: Origin) -> Behaviour:
    def behave(handler: Handler, path: str) -> bool:
        if not path.startswith("/shards/"):
            return False
        handler.send_response(302)
        handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return behave


class FirstListed(random.Random):
    """Chance that always falls on the first."""

    def choices(self, population: Any, *arguments: Any, **options: Any) -> list[Any]:
        return [population[0]]


LIARS = [flips_bits]
STALLS = [drips, says_nothing]
FAILURES = [truncates, promises_more_than_it_sends, never_ends, breaks_off, redirects, *STALLS]


@pytest.mark.parametrize("make_behaviour", [*LIARS, *FAILURES])
def test_good_relay_makes_up_for_a_bad_one_and_the_bad_one_is_named(
    make_behaviour: Callable[[Origin], Behaviour], origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    bad, good = make_mirror(make_behaviour(origin)), make_mirror()
    client = make_client(bad.url, good.url, answer_within_s=0.5 if make_behaviour in STALLS else 20, rng=FirstListed())
    assert weights_of(client.fetch_version(0, digest, deadline_s=60)) == expected_weights()
    reports = {report.url: report for report in client.reports()}
    assert reports[good.url].lies == 0
    assert reports[bad.url].lies + reports[bad.url].failures > 0
    assert bool(reports[bad.url].lies) == (make_behaviour in LIARS)


@pytest.mark.parametrize("make_behaviour", [*LIARS, *FAILURES])
def test_bad_relay_alone_ends_in_an_error_that_names_it(
    make_behaviour: Callable[[Origin], Behaviour], origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    bad = make_mirror(make_behaviour(origin))
    client = make_client(bad.url, answer_within_s=0.2)
    with pytest.raises(UnavailableError) as caught:
        client.fetch_version(0, digest, deadline_s=0.6)
    assert bad.url in str(caught.value)
    assert not list((origin.root.parent / "client").glob("*/versions/*"))


def replace_head(payload: bytes) -> Behaviour:
    return lambda handler, path: path == "/head.json" and answer(handler, payload)


def test_head_signed_by_a_stranger_is_a_lie(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    publish(origin)
    forged = seal_head(open_head(file_of(origin, "head.json"), RUN_KEY.public), STRANGER)
    bad, good = make_mirror(replace_head(forged)), make_mirror()
    client = make_client(bad.url, good.url)
    assert client.head(deadline_s=10).versions
    with pytest.raises(UnavailableError, match="signed by"):
        make_client(bad.url, name="other").head(deadline_s=0.2)


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"kind": 1}', b"x" * 2_000_000])
def test_head_of_any_bytes_is_refused(
    body: bytes, origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    publish(origin)
    with pytest.raises(UnavailableError, match="No relay showed a valid head"):
        make_client(make_mirror(replace_head(body)).url).head(deadline_s=0.2)


def test_relay_that_freezes_the_head_cannot_hide_news(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    publish(origin)
    frozen = make_mirror(replace_head(file_of(origin, "head.json")))
    client = make_client(frozen.url, make_mirror().url)
    counter = client.head().counter
    publish(origin, 1)
    assert client.head(newer_than=counter, wait_s=20).counter == counter + 1


def test_manifest_with_hostile_sizes_is_refused_before_anything_is_allocated(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, tmp_path: Path
) -> None:
    digest = publish(origin)
    envelope = Envelope.from_bytes(origin.store.read("manifests", digest))
    fields = json.loads(envelope.payload)
    fields["tensors"][0]["shape"] = [1 << 40, 1 << 40]
    hostile = Envelope.seal("manifest", json.dumps(fields), RUN_KEY).to_bytes()
    name = origin.store.put("manifests", hostile)
    with pytest.raises(ShoalError, match="breaks its format"):
        make_client(make_mirror().url).fetch_version(0, name, deadline_s=5)
    assert not list((tmp_path / "client").glob("*/staging/*"))


def test_relay_that_vanishes_in_the_middle_is_replaced(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    leaving, staying = make_mirror(), make_mirror()
    served = 0

    def leaves(handler: Handler, path: str) -> bool:
        nonlocal served
        served += path.startswith("/shards/")
        if served < 3:
            return False
        threading.Thread(target=leaving.close).start()
        handler.close_connection = True
        return True

    leaving.behaviour = leaves
    client = make_client(leaving.url, staying.url, rng=random.Random(0))
    assert weights_of(client.fetch_version(0, digest, deadline_s=60)) == expected_weights()


def test_full_disk_is_reported_before_anything_is_fetched(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publish(origin)

    def no_room(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    mirror = make_mirror()
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(UnavailableError, match="no space on the disk"):
        make_client(mirror.url).fetch_version(0, digest)
    assert not any(path.startswith("/shards/") for path in mirror.requests)
    assert not list((origin.root.parent / "client").glob("*/staging/*"))


def test_disk_that_fills_up_while_fetching_is_reported(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = publish(origin)
    written = 0

    def fills_up(file: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 3000:
            raise OSError(28, "No space left on device")
        return real(file, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", fills_up)
    mirror = make_mirror()
    with pytest.raises(UnavailableError, match="no space on the disk"):
        make_client(mirror.url).fetch_version(0, digest)
    monkeypatch.undo()
    assert weights_of(make_client(mirror.url).fetch_version(0, digest)) == expected_weights()


def test_two_versions_published_while_one_is_fetched(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    first = publish(origin)
    mirror = make_mirror()
    published: list[str] = []

    def publishes(handler: Handler, path: str) -> bool:
        if path.startswith("/shards/") and not published:
            published.extend([publish(origin, 1), publish(origin, 2)])
        return False

    mirror.behaviour = publishes
    client = make_client(mirror.url, connections=1)
    assert weights_of(client.fetch_version(0, first)) == expected_weights()
    assert weights_of(client.fetch_version(2, published[1])) == expected_weights(2)


def test_client_stopped_at_random_points_never_shows_a_wrong_file(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, tmp_path: Path
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    rng = random.Random(3)
    for attempt in range(12):
        client = make_client(mirror.url, connections=2)
        limit, count = rng.randrange(1, 8), 0

        def stops(handler: Handler, path: str, client: WeightClient = client, limit: int = limit) -> bool:
            nonlocal count
            count += path.startswith("/shards/")
            if count == limit:
                client.close()
            return False

        mirror.behaviour = stops
        try:
            assert weights_of(client.fetch_version(0, digest, deadline_s=10)) == expected_weights()
            break
        except UnavailableError:
            assert attempt < 11
    ready = list((tmp_path / "client").glob("*/versions/*"))
    assert [weights_of(directory) for directory in ready] in ([], [expected_weights()])
    mirror.behaviour = lambda handler, path: False
    assert weights_of(make_client(mirror.url).fetch_version(0, digest)) == expected_weights()


CHILD = """
import sys
from pathlib import Path
from shoal.broadcast import WeightClient, WeightClientSettings
key, url, cache, digest = sys.argv[1:]
client = WeightClient(key, lambda: [url], Path(cache), WeightClientSettings(connections=2))
print(client.fetch_version(0, digest, deadline_s=30))
"""


def test_client_killed_at_random_points_fetches_no_verified_byte_twice(
    origin: Origin, make_mirror: MakeMirror, tmp_path: Path
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    rng = random.Random(5)
    children: list[subprocess.Popen[str]] = []
    served = 0
    kill_at = 0

    def kills(handler: Handler, path: str) -> bool:
        nonlocal served
        served += path.startswith("/shards/")
        if path.startswith("/shards/") and served == kill_at:
            children[-1].kill()
        return False

    mirror.behaviour = kills
    arguments = [sys.executable, "-c", CHILD, RUN_KEY.public, mirror.url, str(tmp_path / "cache"), digest]
    for _ in range(3):
        served, kill_at = 0, rng.randrange(2, 5)
        children.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        assert children[-1].wait(60) == -signal.SIGKILL
        assert not list((tmp_path / "cache").glob("*/versions/*"))
    kill_at = -1
    directory = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()
    assert weights_of(Path(directory)) == expected_weights()
    fetched = Counter(path for path in mirror.requests if path.startswith("/shards/"))
    shards = open_manifest(origin.store.read("manifests", digest), RUN_KEY.public).shards
    # At most the two shards that were under way at each of three deaths came again.
    assert fetched.total() <= len(shards) + 3 * 2


def test_journal_that_promises_too_much_is_found_out(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, tmp_path: Path
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    mirror.behaviour = breaks_off(origin)
    with pytest.raises(UnavailableError):
        make_client(mirror.url).fetch_version(0, digest, deadline_s=0.3)
    (journal,) = (tmp_path / "client").glob("*/staging/*/verified")
    manifest = open_manifest(origin.store.read("manifests", digest), RUN_KEY.public)
    journal.write_bytes(b"".join(index.to_bytes(4, "little") for index in range(len(manifest.shards))))
    mirror.behaviour = lambda handler, path: False
    assert weights_of(make_client(mirror.url).fetch_version(0, digest)) == expected_weights()


def test_one_flipped_bit_of_the_only_relay_does_not_end_the_fetch(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    flips = flips_bits(origin)
    flipped: list[str] = []

    def flips_once(handler: Handler, path: str) -> bool:
        if flipped or not path.startswith("/shards/"):
            return False
        flipped.append(path)
        return flips(handler, path)

    mirror.behaviour = flips_once
    client = make_client(mirror.url)
    assert weights_of(client.fetch_version(0, digest, deadline_s=30)) == expected_weights()
    assert [report.lies for report in client.reports()] == [1]


def adds_bytes(origin: Origin) -> Behaviour:
    return lambda handler, path: path.startswith("/shards/") and answer(handler, file_of(origin, path) + b"more")


@pytest.mark.parametrize("make_behaviour", [truncates, promises_more_than_it_sends, adds_bytes, breaks_off])
def test_an_only_relay_with_a_wrong_length_first_and_the_right_bytes_then_still_serves(
    origin: Origin,
    make_mirror: MakeMirror,
    make_client: MakeClient,
    make_behaviour: Callable[[Origin], Behaviour],
) -> None:
    digest = publish(origin)
    mirror, wrong, seen = make_mirror(), make_behaviour(origin), set[str]()

    def behave(handler: Handler, path: str) -> bool:
        if path in seen:
            return False
        seen.add(path)
        return wrong(handler, path)

    mirror.behaviour = behave
    assert weights_of(make_client(mirror.url).fetch_version(0, digest, deadline_s=30)) == expected_weights()


def test_relays_of_strangers_that_do_not_answer_do_not_keep_a_client_from_the_owners(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    good = make_mirror()
    strangers = [f"http://127.0.0.1:{port}" for port in range(1, 65)]
    client = make_client(*strangers, good.url, owner_relays=[good.url], rng=random.Random(0))
    assert weights_of(client.fetch_version(0, digest, deadline_s=30)) == expected_weights()
    failures = sum(report.failures for report in client.reports())
    assert failures < 20
