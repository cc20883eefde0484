"""Files of a model are read through small buffers: no mapped page of them stays with a process."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoal.broadcast import Origin, OriginServer, OriginSettings, Relay, WeightClient, WireTensor

from .conftest import RUN_KEY

MODEL_BYTES, TENSORS = 32 << 20, 4
MakeClient = Callable[..., WeightClient]
MakeRelay = Callable[..., Relay]


class MappedPages:
    """How many bytes of files this process had mapped at most, beyond what it had at the start; used as a context."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._first = self._now()
        self._most = self._first

    @property
    def grown_bytes(self) -> int:
        return self._most - self._first

    def __enter__(self) -> "MappedPages":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssFile")))


def test_neither_full_weights_nor_a_delta_leave_mapped_pages(
    tmp_path: Path, make_relay: MakeRelay, make_client: MakeClient
) -> None:
    """A process that is started again hashes what it finds; that is read, too."""
    weights = np.random.default_rng(0).integers(0, 1 << 16, MODEL_BYTES // 2, dtype=np.uint16)
    settings = OriginSettings(delta_from_bytes=0, remember_bytes=0)
    origin = Origin(tmp_path / "origin", RUN_KEY, settings)

    def publish(version: int) -> str:
        parts = np.split(weights.copy(), TENSORS)
        tensors = [WireTensor(f"w{n}", "bfloat16", (len(part),), part.data) for n, part in enumerate(parts)]
        digest = origin.stage(version, tensors).manifest_digest
        origin.announce(ledger_head="")
        return digest

    # Compiled code and libraries are mapped once, whatever the model.
    publish(0)
    weights[::1000] ^= 1
    publish(1)
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    with MappedPages() as mapped:
        weights[::1001] ^= 1
        newest = publish(2)
        client = make_client(make_relay(server.url).url)
        client.head(newer_than=0, wait_s=20)
        client.fetch_version(2, newest)
        again = make_client("http://127.0.0.1:9")
        again.fetch_version(2, newest)
    server.stop()
    assert mapped.grown_bytes < MODEL_BYTES // 2
