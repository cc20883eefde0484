import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from shoal.broadcast import DownloadProgress, Origin, OriginServer, OriginSettings, WeightClient, manifest
from shoal.broadcast.download import duration
from shoal.broadcast.peers import Deadline
from shoal.broadcast.plan import Plan
from shoal.broadcast.store import DiskError
from shoal.errors import IntegrityError, UnavailableError

from .conftest import RUN_KEY, Mirror, answer, make_tensors

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]


def publish(origin: Origin, version: int = 0) -> str:
    digest = origin.stage(version, make_tensors(seed=version)).manifest_digest
    origin.announce(ledger_head="")
    return digest


def weights_of(directory: Path) -> bytes:
    data = (directory / "model.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def expected_weights(version: int = 0) -> bytes:
    return b"".join(bytes(tensor.data) for tensor in make_tensors(seed=version))


def test_version_arrives_as_a_valid_safetensors_file(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    digest = publish(origin)
    directory = make_client(origin_server.url).fetch_version(0, digest)
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    assert weights_of(directory) == expected_weights()
    with safe_open(directory / "model.safetensors", "numpy") as file:
        assert file.get_tensor("norm").tobytes() == make_tensors()[3].data
        assert file.get_slice("empty").get_shape() == [0, 3]


def test_the_cost_of_the_newest_version_is_known_before_it_is_fetched(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    client = make_client(origin_server.url)
    digest, size_bytes = publish(origin), len(expected_weights())
    before = client.preview()
    assert before is not None
    assert (before.version, before.size_bytes) == (0, size_bytes)
    assert before.fetch_bytes > 0
    client.fetch_version(0, digest)
    after = client.preview()
    assert after is not None
    assert after.fetch_bytes == 0


def test_fetching_again_costs_nothing(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    client = make_client(mirror.url)
    first = client.fetch_version(0, digest)
    count = len(mirror.requests)
    assert client.fetch_version(0, digest) == first
    assert make_client(mirror.url).fetch_version(0, digest) == first
    assert len(mirror.requests) == count


def test_damaged_cache_is_noticed_by_the_next_process(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    directory = make_client(mirror.url).fetch_version(0, digest)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert weights_of(make_client(mirror.url).fetch_version(0, digest)) == expected_weights()


def test_interrupted_fetch_resumes_without_a_verified_byte_twice(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    digest = publish(origin)
    mirror = make_mirror()
    shards = 0

    def dies_after_five(handler: object, path: str) -> bool:
        nonlocal shards
        shards += path.startswith("/shards/")
        return path.startswith("/shards/") and shards > 5

    mirror.behaviour = dies_after_five
    with pytest.raises(UnavailableError):
        make_client(mirror.url, answer_within_s=0.2, connections=1).fetch_version(0, digest, deadline_s=0.5)
    fetched = [path for path in mirror.requests if path.startswith("/shards/")][:5]
    mirror.behaviour = lambda handler, path: False
    mirror.requests.clear()
    assert weights_of(make_client(mirror.url).fetch_version(0, digest)) == expected_weights()
    assert not set(fetched) & set(mirror.requests)


def test_old_versions_leave_the_cache(origin: Origin, origin_server: OriginServer, make_client: MakeClient) -> None:
    client = make_client(origin_server.url, keep_versions=2)
    directories = [client.fetch_version(version, publish(origin, version)) for version in range(3)]
    assert [directory.exists() for directory in directories] == [False, True, True]


@pytest.mark.parametrize("keep_versions", [1, 2])
@pytest.mark.parametrize("seconds", [0, -1])
def test_the_newest_versions_stay_whatever_the_clock_says(
    seconds: int, keep_versions: int, origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    """Versions that came within one tick had the same time, and one came too much; after the clock was set back the new ones
    were older than all others."""
    client = make_client(origin_server.url, keep_versions=keep_versions)
    directories = []
    for version in range(5):
        directories.append(client.fetch_version(version, publish(origin, version)))
        for directory in filter(Path.exists, directories):
            os.utime(directory, (1e9 + seconds * directories.index(directory),) * 2)
        kept = [directory for directory in directories if directory.exists()]
        assert kept == directories[-keep_versions:]


def test_head_waits_for_news(origin: Origin, origin_server: OriginServer, make_client: MakeClient) -> None:
    publish(origin)
    client = make_client(origin_server.url)
    counter = client.head().counter
    timer = threading.Timer(0.05, publish, (origin, 1))
    timer.start()
    assert client.head(newer_than=counter, wait_s=30).counter == counter + 1
    timer.join()


def test_head_without_news_comes_back_after_the_wait(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    publish(origin)
    client = make_client(origin_server.url)
    counter = client.head().counter
    assert client.head(newer_than=counter, wait_s=0.05).counter == counter


def test_head_never_goes_back_even_after_a_restart(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    publish(origin)
    old = (origin.root / "head.json").read_bytes()
    publish(origin, 1)
    mirror = make_mirror()
    newest = make_client(mirror.url).head()
    mirror.behaviour = lambda handler, path: answer(handler, old)
    assert make_client(mirror.url).head() == newest


def test_expired_head_is_refused(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    publish(origin)
    mirror = make_mirror()
    late = make_client(mirror.url, clock=lambda: 1e12)
    with pytest.raises(UnavailableError, match="expired"):
        late.head(deadline_s=0.2)


def test_manifest_of_another_version_is_refused(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    digest = publish(origin)
    with pytest.raises(IntegrityError, match="of version 0"):
        make_client(origin_server.url).fetch_version(1, digest)


def test_nobody_to_ask_is_an_error_that_says_so(make_client: MakeClient) -> None:
    with pytest.raises(UnavailableError, match="No relay"):
        make_client().head(deadline_s=0.1)
    with pytest.raises(UnavailableError, match="No relay is known"):
        make_client().fetch_version(0, "a" * 64, deadline_s=0.1)


def test_served_files_come_whole_and_bounded(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    digest = origin.add_file(b"tokenizer")
    mirror = make_mirror()
    client = make_client(mirror.url)
    assert client.fetch_file(digest, max_bytes=100, deadline_s=5) == b"tokenizer"
    assert make_client(mirror.url).fetch_file(digest, max_bytes=100, deadline_s=5) == b"tokenizer"
    assert len(mirror.requests) == 1
    large = origin.add_file(b"x" * 1000)
    with pytest.raises(UnavailableError, match="at most 100"):
        client.fetch_file(large, max_bytes=100, deadline_s=1)


def test_a_version_that_is_here_is_usable_on_a_disk_that_became_read_only(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [publish(origin, version) for version in range(2)]
    for version, digest in enumerate(digests):
        make_client(origin_server.url).fetch_version(version, digest)

    def refuses(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    more = origin.add_file(b"more")
    for name in ("unlink", "utime", "replace", "mkdir", "rmdir"):
        monkeypatch.setattr(os, name, refuses)
    client = make_client(origin_server.url, keep_versions=1)
    assert weights_of(client.fetch_version(1, digests[1])) == expected_weights(1)
    with pytest.raises(DiskError, match="Read-only") as caught:
        client.fetch_file(more)
    assert caught.value.hint


def test_progress_is_reported_and_ends_complete(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    digest = publish(origin)
    reported: list[tuple[int, int]] = []
    client = make_client(origin_server.url)
    client.fetch_version(0, digest, on_progress=lambda p: reported.append((p.bytes_done, p.bytes_total)))
    assert reported[0][0] == 0
    assert max(reported) == (reported[0][1], reported[0][1])


def test_progress_line_is_for_people() -> None:
    now = [0.0]
    progress = DownloadProgress(7, 512_000_000, clock=lambda: now[0])
    progress.bytes_done, now[0] = 128_000_000, 2.0
    assert progress.line() == "version 7: 128 MB of 512 MB (25%), 64.0 MB/s, 6 s left"


def test_what_an_earlier_fetch_left_does_not_count_as_speed() -> None:
    now = [0.0]
    progress = DownloadProgress(7, 65_000_000_000, clock=lambda: now[0])
    progress.bytes_done = progress.bytes_found = 2_500_000_000
    assert progress.line() == "version 7: 2.5 GB of 65.0 GB (4%), 0 B/s"
    progress.bytes_done, now[0] = progress.bytes_found + 62_500_000, 10.0
    assert progress.line().endswith("6.2 MB/s, 2 h 46 min left")


@pytest.mark.parametrize(
    ("seconds", "text"), [(4, "4 s"), (600, "10 min"), (10_400, "2 h 53 min"), (300_000, "3 days")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_newest_version_is_found_by_itself(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    publish(origin)
    publish(origin, 1)
    entry, directory = make_client(origin_server.url).fetch_newest()
    assert entry.version == 1
    assert weights_of(directory) == expected_weights(1)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when a client has planned how to fetch version 1."""
    done = threading.Event()
    plan = WeightClient._plan

    def planned(client: WeightClient, wanted: str, deadline: Deadline) -> Plan:
        result = plan(client, wanted, deadline)
        if client._manifests.get(wanted, deadline=deadline).version == 1:
            done.set()
        return result

    monkeypatch.setattr(WeightClient, "_plan", planned)
    yield done
    done.set()


def test_superseded_fetch_moves_to_the_newer_version(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, priced: threading.Event
) -> None:
    publish(origin)
    client = make_client(make_mirror().url, connections=1)
    published: list[str] = []

    def publish_next(progress: DownloadProgress) -> None:
        if not published:
            published.append(publish(origin, 1))
            client.head(newer_than=1, wait_s=20)
            assert priced.wait(20)

    entry, directory = client.fetch_newest(on_progress=publish_next)
    assert entry.version == 1
    assert weights_of(directory) == expected_weights(1)


def test_a_newer_version_is_priced_once_and_not_for_every_shard(
    tmp_path: Path,
    make_mirror: MakeMirror,
    make_client: MakeClient,
    priced: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    origin = Origin(tmp_path / "origin", RUN_KEY, OriginSettings(shard_bytes=100))
    publish(origin)
    opened: list[bytes] = []
    read = manifest.open_manifest

    def counted(data: bytes, run_key: str) -> manifest.Manifest:
        opened.append(data)
        return read(data, run_key)

    for module in ("heads", "peers"):
        monkeypatch.setattr(f"shoal.broadcast.{module}.open_manifest", counted)
    client = make_client(make_mirror(root=origin.root).url, connections=1)
    shards: list[int] = []

    def publish_late(progress: DownloadProgress) -> None:
        shards.append(progress.bytes_done)
        if len(shards) == 60:  # version 1 costs more than the rest of version 0 from here on
            publish(origin, 1)
            client.head(newer_than=1, wait_s=20)
            assert priced.wait(20)

    entry, _ = client.fetch_newest(on_progress=publish_late)
    assert entry.version == 0
    assert len(shards) > 100
    assert len(opened) <= 4


def test_nothing_published_yet_is_an_error(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient
) -> None:
    origin.announce(ledger_head="")
    with pytest.raises(UnavailableError, match="Nothing has been published"):
        make_client(origin_server.url).fetch_newest(deadline_s=5)
