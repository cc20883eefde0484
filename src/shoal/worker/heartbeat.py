"""Shows life to the coordinator every few seconds and brings back what it says: standing, credit, relays."""

import threading
from typing import Protocol

from shoal.errors import RefusedError, ShoalError
from shoal.joined import RelayList
from shoal.metrics import EventLog, Report
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.worker.console import WorkerConsole

FIRST_INTERVAL_S = 3.0


class Totals(Protocol):
    tokens: int


class Heartbeat:
    def __init__(
        self,
        client: CoordinatorClient,
        relays: RelayList,
        totals: Totals,
        metrics: EventLog,
        console: WorkerConsole,
        report: Report,
    ) -> None:
        self.activity = "joining"
        self._client, self._relays, self._totals = client, relays, totals
        self._metrics, self._console, self._report = metrics, console, report
        self._interval_s = FIRST_INTERVAL_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def beat(self) -> None:
        received = int(self._metrics.counters["bytes_received"])
        answer = self._client.heartbeat(
            api.HeartbeatBody(
                activity=self.activity[:200], tokens_generated=self._totals.tokens, bytes_received=received
            )
        )
        self._relays.update(answer.relay_urls)
        self._console.standing(answer.worker)
        self._interval_s = answer.interval_s

    def _beat_forever(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.beat()
            except RefusedError:
                continue  # the main loop meets the same refusal, says it and ends
            except ShoalError as error:
                if not self._stopping.is_set():
                    self._report(str(error))
