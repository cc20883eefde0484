"""A coordinator that answers from a script, behind the real client: bodies are parsed and answers built by the API's own models."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import httpx
from pydantic import BaseModel

from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from support.samples import descriptor
from support.tiny_run import WORKER

NOW = 1_000_000.0


class Refuse(Exception):
    def __init__(self, code: str, message: str = "No.", status: int = 403) -> None:
        self.answer = httpx.Response(status, json={"code": code, "message": message, "hint": "Do otherwise."})


class FakeCoordinator:
    """Leases, claims and refusals come from lists that the test fills; everything that is sent is kept."""

    def __init__(self) -> None:
        self.leases: list[api.LeaseAnswer | Refuse] = []
        self.claims: list[api.ClaimAnswer] = []
        self.batches: dict[int, api.BatchAnswer] = {}
        self.screenings: list[api.BatchRecord] = []
        """Answers to the statistics of proposed batches."""
        self.screened: list[api.ScreeningBody] = []
        self.audited_batches: list[api.BatchRecord] = []
        """What is left of batches that a trainer has recalled."""
        self.recall: list[api.RecallBody] = []
        self.files: dict[str, bytes] = {}
        self.refusals: dict[str, Refuse] = {}
        """Path prefix → refusal."""
        self.away: dict[str, int] = {}
        """Path prefix → how many of the next requests are lost."""
        self.tries: list[tuple[str, bytes]] = []
        """Path and body of every request, lost ones included."""
        self.now = NOW
        self._time = threading.local()
        self.account = api.WorkerView(key=WORKER.public, name="worker", state="probation")
        self.history = api.HistoryView(versions=[], evaluations=[], batches=[], bans=[])
        self.relay_urls: list[str] = ["http://relay-of-the-coordinator"]
        self.registered: list[api.RegisterBody] = []
        self.heartbeats: list[api.HeartbeatBody] = []
        self.lease_bodies: list[api.LeaseBody] = []
        self.returned: list[str] = []
        self.submitted: dict[str, bytes] = {}
        self.verdicts: list[api.VerdictBody] = []
        self.versions: list[api.VersionBody] = []
        self.evaluations: list[api.EvaluationBody] = []
        self.line = api.LineAnswer()
        """What the trainer hears of rewinds; calls of another epoch are refused as the coordinator does."""
        self.lock = threading.Lock()

    def client(self, keypair: Keypair = WORKER, **options: Any) -> CoordinatorClient:
        http = httpx.Client(transport=httpx.MockTransport(self._answer))
        options = {"clock": lambda: self.now, "monotonic": self._waited_s, "sleep": self._sleep, **options}
        return CoordinatorClient.for_run(descriptor(), keypair, http=http, **options)

    def _waited_s(self) -> float:
        """Each thread has a time of its own, which only its sleep moves."""
        return float(getattr(self._time, "now", 0.0))

    def _sleep(self, seconds: float) -> None:
        self._time.now = self._waited_s() + seconds

    def grant(self, *leases: api.Lease) -> None:
        self.leases += [api.LeaseAnswer(lease=lease) for lease in leases]

    def wait(self, reason: str, *, times: int = 1, retry_after_s: float = 0.0) -> None:
        answer = {"reason": reason, "retry_after_s": retry_after_s, "wanted_version": 1}
        self.leases += [api.LeaseAnswer.model_validate(answer)] * times

    def finish(self) -> None:
        self.leases.append(api.LeaseAnswer(reason="finished"))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        try:
            with self.lock:
                self.tries.append((request.url.path, request.content))
                self._lose(request)
                query = f"?{request.url.query.decode()}" if request.url.path.startswith("/v1/batches/") else ""
                return self._route(request.method, request.url.path + query, request.content)
        except Refuse as refusal:
            return refusal.answer

    def _lose(self, request: httpx.Request) -> None:
        for prefix, times in self.away.items():
            if times and request.url.path.startswith(prefix):
                self.away[prefix] -= 1
                raise httpx.ConnectError("connection refused", request=request)

    def _route(self, method: str, path: str, content: bytes) -> httpx.Response:
        for prefix, refusal in self.refusals.items():
            if path.startswith(prefix):
                raise refusal
        for route, handle in self._routes().items():
            wanted, prefix = route.split(" ")
            if method == wanted and path.startswith(prefix):
                answer = handle(path.removeprefix(prefix), content)
                if isinstance(answer, BaseModel):
                    return httpx.Response(200, content=answer.model_dump_json())
                return httpx.Response(200, content=answer)
        raise AssertionError(f"nobody should ask for {method} {path}")

    def _routes(self) -> dict[str, Callable[[str, bytes], BaseModel | bytes]]:
        return {
            "POST /v1/workers": self._register,
            "POST /v1/heartbeat": self._heartbeat,
            "POST /v1/leases": self._lease,
            "DELETE /v1/leases/": self._return,
            "PUT /v1/submissions/": self._submit,
            "POST /v1/claims": self._claim,
            "GET /v1/submissions/": lambda name, content: self.files[name.removesuffix("/file")],
            "POST /v1/relays/reports": lambda rest, content: api.RelaysAnswer(relays=[], origin_url=""),
            "POST /v1/verdicts": self._verdict,
            "POST /v1/traces": lambda rest, content: b"",
            "GET /v1/batches/": self._batch,
            "POST /v1/batches/screening": self._screen,
            "POST /v1/batches/recall": self._recall,
            "POST /v1/versions": self._version,
            "GET /v1/epochs": lambda rest, content: self.line,
            "GET /v1/history": lambda rest, content: self.history,
            "POST /v1/evaluations": self._evaluation,
        }

    def _register(self, rest: str, content: bytes) -> BaseModel:
        self.registered.append(api.RegisterBody.model_validate_json(content))
        return self.account

    def _heartbeat(self, rest: str, content: bytes) -> BaseModel:
        self.heartbeats.append(api.HeartbeatBody.model_validate_json(content))
        return api.HeartbeatAnswer(worker=self.account, relay_urls=self.relay_urls, interval_s=0.001)

    def _lease(self, rest: str, content: bytes) -> BaseModel:
        self.lease_bodies.append(api.LeaseBody.model_validate_json(content))
        nothing_left = api.LeaseAnswer(reason="no_work", retry_after_s=0.01)
        answer = self.leases.pop(0) if self.leases else nothing_left
        if isinstance(answer, Refuse):
            raise answer
        return answer

    def _return(self, rest: str, content: bytes) -> bytes:
        self.returned.append(rest)
        return b""

    def _submit(self, lease_id: str, content: bytes) -> BaseModel:
        self.submitted[lease_id] = content
        return api.SubmissionAnswer(submission_id=f"submission-{lease_id}", state="pending")

    def _claim(self, rest: str, content: bytes) -> BaseModel:
        api.ClaimBody.model_validate_json(content)
        return self.claims.pop(0)

    def _verdict(self, rest: str, content: bytes) -> BaseModel:
        self.verdicts.append(api.VerdictBody.model_validate_json(content))
        return api.VerdictAnswer(recorded=True)

    def _screen(self, rest: str, content: bytes) -> BaseModel:
        body = api.ScreeningBody.model_validate_json(content)
        self._require_epoch(body.epoch)
        self.screened.append(body)
        return self.screenings.pop(0)

    def _recall(self, rest: str, content: bytes) -> BaseModel:
        """The next list of the script replaces the batch; without one every group was audited."""
        body = api.RecallBody.model_validate_json(content)
        self.recall.append(body)
        if not self.audited_batches:
            raise Refuse("all_audited", status=409)
        self.batches[body.step] = api.BatchAnswer(batch=self.audited_batches.pop(0))
        return api.RecallAnswer(groups=1)

    def _batch(self, rest: str, content: bytes) -> BaseModel:
        self._require_epoch(int(rest.partition("epoch=")[2]))
        return self.batches[int(rest.partition("?")[0])]

    def _require_epoch(self, epoch: int) -> None:
        if epoch != self.line.epoch:
            raise Refuse("rewound", "The run was rewound.", status=409)

    def _version(self, rest: str, content: bytes) -> BaseModel:
        body = api.VersionBody.model_validate_json(content)
        self._require_epoch(body.epoch)
        self.versions.append(body)
        return api.VersionAnswer(ledger_head="ab" * 32)

    def _evaluation(self, rest: str, content: bytes) -> bytes:
        self.evaluations.append(api.EvaluationBody.model_validate_json(content))
        return b""


def request_ids(bodies: Iterable[api.LeaseBody]) -> set[str]:
    return {body.request_id for body in bodies}
