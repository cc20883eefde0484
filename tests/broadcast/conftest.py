"""A publisher, relays and clients on loopback, and a web server that can be made to misbehave."""

import http.server
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shoal.broadcast import (
    Neighbours,
    Origin,
    OriginServer,
    OriginSettings,
    Relay,
    RelaySettings,
    WeightClient,
    WeightClientSettings,
    WireTensor,
)
from shoal.identity import Keypair

RUN_KEY = Keypair.from_seed(b"r" * 32)


def make_tensors(seed: int = 0, *, count: int = 3, rows: int = 40) -> list[WireTensor]:
    rng = random.Random(seed)
    tensors = [
        WireTensor(f"layers.{number}.weight", "bfloat16", (rows, 50), rng.randbytes(rows * 100))
        for number in range(count)
    ]
    tensors.append(WireTensor("norm", "float32", (7,), rng.randbytes(28)))
    tensors.append(WireTensor("empty", "float16", (0, 3), b""))
    tensors.append(WireTensor("scale", "float32", (), rng.randbytes(4)))
    return tensors


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin", RUN_KEY, OriginSettings(shard_bytes=1000))


@pytest.fixture
def origin_server(origin: Origin) -> Iterator[OriginServer]:
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    yield server
    server.stop()


def taken(options: dict[str, Any], settings: type[Any]) -> dict[str, Any]:
    """Those of the options that are fields of the settings; the others stay."""
    return {field.name: options.pop(field.name) for field in fields(settings) if field.name in options}


class Listed(Neighbours):
    """Neighbours that a test lists."""

    def __init__(self, peers: Sequence[str] = (), spare: Sequence[str] = ()) -> None:
        super().__init__(["http://parent"])
        self.listed, self.spare = peers, spare

    def peers(self) -> list[str]:
        return list(self.listed)

    def spare_parents(self) -> list[str]:
        return list(self.spare)


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., WeightClient]]:
    clients: list[WeightClient] = []

    def make(*urls: str, name: str = "client", **options: Any) -> WeightClient:
        settings = WeightClientSettings(**taken(options, WeightClientSettings))
        client = WeightClient(RUN_KEY.public, lambda: urls, tmp_path / name, settings, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def make_relay(tmp_path: Path) -> Iterator[Callable[..., Relay]]:
    relays: list[Relay] = []

    def make(*upstreams: str, name: str = "relay", run_key: str | None = RUN_KEY.public, **options: Any) -> Relay:
        settings = RelaySettings(tmp_path / name, upstreams, run_key, **taken(options, RelaySettings))
        relay = Relay(settings, **options)
        relays.append(relay)
        relay.start()
        return relay

    yield make
    for relay in relays:
        relay.stop()


class SlowClock:
    """A clock for one reader and one writer in step: time passes before each piece that the writer sends.

    The reader asks for the time before every read, so a piece has been read when it asks again.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self._asked = threading.Event()
        self._stopped = False

    def stop(self) -> None:
        """The reader is done: the writer need not wait for it."""
        self._stopped = True
        self._asked.set()

    def __call__(self) -> float:
        now = self.now
        self._asked.set()
        return now

    def send(self, write: Callable[[bytes], object], piece: bytes, seconds: float) -> None:
        self.now += seconds
        self._asked.clear()
        write(piece)
        if not self._stopped:
            self._asked.wait(10)


Behaviour = Callable[[http.server.BaseHTTPRequestHandler, str], bool]


class Mirror:
    """Serves a directory like a plain static server, except where `behaviour(handler, path)` answers in its own way."""

    def __init__(self, root: Path) -> None:
        self.behaviour: Behaviour = lambda handler, path: False
        self.requests: list[str] = []
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                mirror.requests.append(path)
                if mirror.behaviour(self, path):
                    return
                file = root / path.strip("/")
                answer(self, file.read_bytes() if file.is_file() else b"", status=200 if file.is_file() else 404)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(
    handler: http.server.BaseHTTPRequestHandler, body: bytes, *, status: int = 200, length: int | None = None
) -> bool:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)
    return True


@pytest.fixture
def make_mirror(origin: Origin) -> Iterator[Callable[..., Mirror]]:
    mirrors: list[Mirror] = []

    def make(behaviour: Behaviour | None = None, root: Path | None = None) -> Mirror:
        mirror = Mirror(root or origin.root)
        if behaviour is not None:
            mirror.behaviour = behaviour
        mirrors.append(mirror)
        return mirror

    yield make
    for mirror in mirrors:
        mirror.close()
