"""Shows life to the coordinator every few seconds and brings back what it says: state, credit, relays."""

import threading
from collections.abc import Callable
from typing import Protocol

from shoal.errors import RefusedError, ShoalError
from shoal.metrics import Metrics
from shoal.policy.joined import RelayList
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient

FIRST_INTERVAL_S = 3.0


class Totals(Protocol):
    tokens: int


class Heartbeat:
    def __init__(
        self,
        client: CoordinatorClient,
        relays: RelayList,
        totals: Totals,
        metrics: Metrics,
        report: Callable[[str], None],
    ) -> None:
        self.activity = "joining"
        self.last: api.HeartbeatAnswer | None = None
        self._client, self._relays, self._totals = client, relays, totals
        self._metrics, self._report = metrics, report
        self._interval_s = FIRST_INTERVAL_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _beat_forever(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._beat()
            except RefusedError as refusal:
                self._report(str(refusal))  # the main loop meets the same refusal and ends
                return
            except ShoalError as error:
                self._report(str(error))

    def _beat(self) -> None:
        received = int(self._metrics.counters["bytes_received"])
        self.last = self._client.heartbeat(
            api.HeartbeatBody(
                activity=self.activity[:200], tokens_generated=self._totals.tokens, bytes_received=received
            )
        )
        self._relays.update(self.last.relay_urls)
        self._interval_s = self.last.interval_s
