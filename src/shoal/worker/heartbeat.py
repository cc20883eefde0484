"""Sends a heartbeat to the coordinator every few seconds and takes in the answer: trust state, credit, relays, ledger head."""

import threading

from shoal.errors import RefusedError, ShoalError, UnavailableError
from shoal.joined import RelayList, RelayReports
from shoal.metrics import EventLog, Report
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.evidence_store import KeptHeads
from shoal.worker.console import WorkerConsole
from shoal.worker.totals import WorkerTotals

FIRST_INTERVAL_S = 3.0


class Heartbeat:
    def __init__(
        self,
        client: CoordinatorClient,
        relays: RelayList,
        reports: RelayReports,
        totals: WorkerTotals,
        metrics: EventLog,
        console: WorkerConsole,
        report: Report,
        heads: KeptHeads | None = None,
    ) -> None:
        self._client, self._relays, self._reports, self._totals = client, relays, reports, totals
        self._heads, self._warned = heads, ""
        self._metrics, self._console, self._report = metrics, console, report
        self._interval_s = FIRST_INTERVAL_S
        self.epoch = 0
        """Of the run, as last heard; leases of earlier ones are void."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._heads is not None:
            self._heads.save()

    def beat(self) -> None:
        received = int(self._metrics.counters["bytes_received"])
        answer = self._client.heartbeat(
            api.HeartbeatBody(
                activity=self._console.activity[:200],
                tokens_generated=self._totals.tokens,
                bytes_received=received,
                ledger_head=self._heads.newest if self._heads else "",
            )
        )
        self._keep_head(answer)
        self._relays.update(answer.relay_urls)
        if news := self._reports.news():
            self._client.report_relays(api.RelayReportBody(relays=news))
        self._console.update_account(answer.worker)
        self._interval_s, self.epoch = answer.interval_s, answer.epoch

    def _keep_head(self, answer: api.HeartbeatAnswer) -> None:
        """Keeps the head of the ledger, and warns its operator once of one that does not extend what was seen before."""
        if self._heads is None:
            return
        problem = self._heads.keep(answer.ledger_head)
        if answer.kept_head == "restored":
            problem = (
                "the run was restored from a backup; the ledger lost entries that this worker had seen the head of"
            )
        elif answer.kept_head == "unknown" or problem:
            why = problem or "it does not know a head that it signed"
            problem = f"warning: {why}. Its ledger was rewritten or forked; the heads in your directory prove it"
        if problem and problem != self._warned:
            self._warned = problem
            self._report(problem)

    def _beat_forever(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.beat()
            except (RefusedError, UnavailableError):
                continue  # the main loop meets the same, reports it, and waits or ends
            except ShoalError as error:
                if not self._stopping.is_set():
                    self._report(str(error))
