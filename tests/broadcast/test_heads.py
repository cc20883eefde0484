"""What a client says when no head can be had: the reason is the one that a person has to act on."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.broadcast import Origin, OriginServer, WeightClient
from shoal.broadcast.store import DiskError
from shoal.errors import UnavailableError
from shoal.identity import Keypair

from .conftest import RUN_KEY, Mirror, answer
from .test_client import publish

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]


@pytest.fixture
def stalling(origin: Origin, make_mirror: MakeMirror) -> Iterator[Mirror]:
    publish(origin)
    released = threading.Event()
    mirror = make_mirror(lambda handler, path: released.wait(30))
    yield mirror
    released.set()


def test_a_relay_that_stalls_is_named(stalling: Mirror, make_client: MakeClient) -> None:
    # Who notices first, the poll or the thread that waits for it, is up to the scheduler.
    with pytest.raises(UnavailableError, match=r"does not answer|did not deliver") as caught:
        make_client(stalling.url).head(deadline_s=0.3)
    assert stalling.url in str(caught.value)
    assert "no relay is known" not in str(caught.value)


def test_an_expired_head_hints_at_the_clock(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    publish(origin)
    late = make_client(make_mirror().url, clock=lambda: 4e9)
    with pytest.raises(UnavailableError, match="expired") as caught:
        late.head(deadline_s=0.2)
    assert "the clock here, 2096-10-02 07:06 UTC, is wrong" in caught.value.hint


def test_a_head_of_another_run_names_the_key_that_is_trusted(
    origin: Origin, make_mirror: MakeMirror, tmp_path: Path
) -> None:
    publish(origin)
    url, other = make_mirror().url, Keypair.generate().public
    client = WeightClient(other, lambda: [url], tmp_path / "other")
    with pytest.raises(UnavailableError, match=f"signed by {RUN_KEY.public[:12]}") as caught:
        client.head(deadline_s=0.2)
    client.close()
    assert f"name its key: {other[:12]}" in caught.value.hint


def test_a_truncated_head_is_no_lie(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    publish(origin)
    whole = (origin.root / "head.json").read_bytes()
    mirror = make_mirror(lambda handler, path: answer(handler, whole[: len(whole) // 2]))
    client = make_client(mirror.url)
    with pytest.raises(UnavailableError, match="no whole head"):
        client.head(deadline_s=0.2)
    (report,) = client.reports()
    assert report.lies == 0
    assert report.failures > 0


def test_a_head_that_cannot_be_written_is_one_sentence(
    origin: Origin, origin_server: OriginServer, make_client: MakeClient, tmp_path: Path
) -> None:
    publish(origin)
    client = make_client(origin_server.url)
    (tmp_path / "client" / RUN_KEY.public[:16] / "head.json").mkdir()
    with pytest.raises(UnavailableError, match="cannot be written") as caught:
        client.head(deadline_s=0.2)
    assert "may write" in str(caught.value)


def test_a_cache_that_cannot_be_made_is_one_sentence(make_client: MakeClient, tmp_path: Path) -> None:
    (tmp_path / "client").write_text("not a directory")
    with pytest.raises(DiskError, match="cannot be written") as caught:
        make_client("http://127.0.0.1:1")
    assert caught.value.hint
