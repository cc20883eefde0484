"""The signed HTTP client that every role uses to speak to the coordinator.

Each call is idempotent by a client-made id, so a lost answer is asked for again until the deadline; then UnavailableError names
the coordinator and how long the client waited. A refusal becomes RefusedError with the server's code. The server's clock counts:
its time is learned from every answer, so a wrong local clock does not matter.
"""

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypedDict, TypeVar, Unpack

import httpx
from pydantic import BaseModel

from shoal.errors import ConfigError, IntegrityError, RefusedError
from shoal.files import digest_bytes
from shoal.identity import Keypair
from shoal.metrics import Report, silent
from shoal.protocol import api
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.protocol.page_views import AuditTrace, LinkAnswer
from shoal.protocol.signing import TIME_HEADER, TIME_PATTERN, RequestTarget, stamp_request, submission_message
from shoal.protocol.waiting import Wait, Waiting

AnswerT = TypeVar("AnswerT", bound=BaseModel)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
SHORTEST_TIMEOUT_S = 0.1
HEARTBEAT_DEADLINE_S = 30.0
"""A heartbeat says that its sender is alive now; later ones replace it."""
LONGEST_PAUSE_S = 60.0
"""A longer `retry-after` of a server is cut to this."""
SUBMISSION_SIGNATURE_HEADER = "x-shoal-submission-signature"
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
RETRIED_STATUS = {408, 429, 502, 503, 504}
RETRIED_CODES = {"clock", "replay"}
"""Cured by signing again: with the server's time, or after a network that delivered one request twice."""


class ClientOptions(TypedDict, total=False):
    """How a client waits, and what tests replace."""

    deadline_s: float
    on_wait: Report
    http: httpx.Client
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]


def fetch_descriptor(url: str, run_key: str | None, **options: Unpack[ClientOptions]) -> tuple[bytes, RunDescriptor]:
    """The signed descriptor served at this address, its signature checked."""
    with CoordinatorClient(url, None, **options) as client:
        data = client.raw("GET", "/v1/descriptor").content
    return data, open_descriptor(data, run_key)


class CoordinatorClient:
    def __init__(
        self,
        url: str,
        keypair: Keypair | None,
        *,
        run_id: str = "",
        audience: str = "",
        deadline_s: float = 60.0,
        on_wait: Report = silent,
        http: httpx.Client | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self.keypair = keypair
        self._deadline_s, self._waiting = deadline_s, Waiting(on_wait, monotonic, sleep)
        self._run_id, self._audience = run_id, audience
        self._owns_http = http is None
        self._http = http or httpx.Client()
        self._clock, self._clock_offset_s = clock, 0.0
        self._answered = False

    @classmethod
    def for_run(
        cls, descriptor: RunDescriptor, keypair: Keypair, url: str = "", **options: Unpack[ClientOptions]
    ) -> "CoordinatorClient":
        return cls(
            url or descriptor.coordinator_url,
            keypair,
            run_id=descriptor.run_id,
            audience=descriptor.coordinator_key,
            **options,
        )

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_http:
            self._http.close()

    def limit_waits(self, limit_s: float) -> None:
        """From now on no call, running or new, waits longer than this for a coordinator that is away."""
        self._waiting.limit(limit_s)

    def server_time(self) -> float:
        return self._clock() + self._clock_offset_s

    def register(self, body: api.RegisterBody) -> api.WorkerView:
        return self._post("/v1/workers", body, api.WorkerView)

    def heartbeat(self, body: api.HeartbeatBody) -> api.HeartbeatAnswer:
        return self._post("/v1/heartbeat", body, api.HeartbeatAnswer, HEARTBEAT_DEADLINE_S)

    def lease(self, body: api.LeaseBody) -> api.LeaseAnswer:
        return self._post("/v1/leases", body, api.LeaseAnswer)

    def give_back(self, lease_id: str) -> None:
        self.raw("DELETE", f"/v1/leases/{lease_id}")

    def submit(
        self, lease_id: str, data: bytes, *, by_bucket: bool = False, deadline_s: float | None = None
    ) -> api.SubmissionAnswer:
        """Uploads the file of a lease, through the run's bucket if the lease asks for it."""
        assert self.keypair is not None
        digest = digest_bytes(data)
        signature = self.keypair.sign(submission_message(self._run_id, lease_id, digest))
        if by_bucket:
            body = api.UploadBody(lease_id=lease_id, digest=digest, size_bytes=len(data), signature=signature)
            return self._submit_by_bucket(body, data, deadline_s)
        headers = {SUBMISSION_SIGNATURE_HEADER: signature, "content-type": "application/vnd.apache.parquet"}
        answer = self.raw("PUT", f"/v1/submissions/{lease_id}", content=data, headers=headers, deadline_s=deadline_s)
        return _parse(answer, api.SubmissionAnswer)

    def _submit_by_bucket(self, body: api.UploadBody, data: bytes, deadline_s: float | None) -> api.SubmissionAnswer:
        place = self.upload_url(body, deadline_s=deadline_s)
        stored = self._repeat("PUT", place.url, dict, data, deadline_s)
        if not stored.is_success:
            hint = "The run's owner must look at the bucket."
            raise RefusedError("bucket", f"The bucket answered {stored.status_code}.", hint=hint, status=503)
        return self.uploaded(body, deadline_s=deadline_s)

    def upload_url(self, body: api.UploadBody, *, deadline_s: float | None = None) -> api.UploadAnswer:
        return self._post("/v1/uploads", body, api.UploadAnswer, deadline_s)

    def uploaded(self, body: api.UploadBody, *, deadline_s: float | None = None) -> api.SubmissionAnswer:
        return self._post("/v1/uploads/done", body, api.SubmissionAnswer, deadline_s)

    def announce_relay(self, body: api.RelayBody) -> api.RelaysAnswer:
        return self._post("/v1/relays", body, api.RelaysAnswer)

    def report_relays(self, body: api.RelayReportBody) -> api.RelaysAnswer:
        return self._post("/v1/relays/reports", body, api.RelaysAnswer, HEARTBEAT_DEADLINE_S)

    def relays(self) -> api.RelaysAnswer:
        return self._get("/v1/relays", api.RelaysAnswer)

    def claim(self, body: api.ClaimBody) -> api.ClaimAnswer:
        return self._post("/v1/claims", body, api.ClaimAnswer)

    def verdict(self, body: api.VerdictBody) -> api.VerdictAnswer:
        return self._post("/v1/verdicts", body, api.VerdictAnswer)

    def submission_file(self, submission_id: str, digest: str) -> bytes:
        answer = self.raw("GET", f"/v1/submissions/{submission_id}/file")
        if answer.is_redirect:  # the run keeps its rollouts in a bucket
            answer = self._repeat("GET", answer.headers["location"], dict, b"")
        data = answer.content
        if digest_bytes(data) != digest:
            raise IntegrityError(f"The stored bytes of submission {submission_id} are not those that were signed.")
        return data

    def batch(self, step: int, wait_s: float = 20.0, epoch: int = 0) -> api.BatchAnswer:
        return self._get(f"/v1/batches/{step}?wait_s={wait_s:g}&epoch={epoch}", api.BatchAnswer)

    def screen(self, body: api.ScreeningBody) -> api.BatchRecord:
        return self._post("/v1/batches/screening", body, api.BatchRecord)

    def recall(self, body: api.RecallBody) -> api.RecallAnswer:
        return self._post("/v1/batches/recall", body, api.RecallAnswer)

    def recall_by_hand(self, body: api.RecallBody) -> api.RecallAnswer:
        return self._post("/v1/run/recall", body, api.RecallAnswer)

    def publish(self, body: api.VersionBody) -> api.VersionAnswer:
        return self._post("/v1/versions", body, api.VersionAnswer)

    def report_evaluation(self, body: api.EvaluationBody) -> None:
        self.raw("POST", "/v1/evaluations", content=body.model_dump_json().encode())

    def set_run_state(self, body: api.RunStateBody) -> api.RunStateAnswer:
        return self._post("/v1/run/state", body, api.RunStateAnswer)

    def line(self) -> api.LineAnswer:
        return self._get("/v1/epochs", api.LineAnswer)

    def rewind(self, body: api.RewindBody) -> api.RewindView:
        return self._post("/v1/run/rewind", body, api.RewindView)

    def ban(self, body: api.BanBody) -> api.WorkerView:
        return self._post("/v1/bans", body, api.WorkerView)

    def unban(self, body: api.BanBody) -> api.WorkerView:
        return self._post("/v1/bans/lift", body, api.WorkerView)

    def send_trace(self, body: AuditTrace, deadline_s: float) -> None:
        self.raw("POST", "/v1/traces", content=body.model_dump_json().encode(), deadline_s=deadline_s)

    def rotate_link(self) -> LinkAnswer:
        return _parse(self.raw("POST", "/v1/owner/link", content=b""), LinkAnswer)

    def status(self) -> api.StatusView:
        return self._get("/v1/status", api.StatusView)

    def history(self) -> api.HistoryView:
        return self._get("/v1/history", api.HistoryView)

    def ledger_export(self) -> bytes:
        return self.raw("GET", "/v1/ledger").content

    def raw(
        self,
        method: str,
        target: str,
        *,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> httpx.Response:
        """One request, signed again for every try, repeated until it is answered or the deadline has passed."""

        def signed() -> dict[str, str]:
            return self._headers(method, target, content, headers)

        response = self._repeat(method, self.url + target, signed, content, deadline_s)
        if response.is_success or response.is_redirect:
            return response
        raise _refusal(response)

    def _repeat(
        self,
        method: str,
        url: str,
        headers: Callable[[], dict[str, str]],
        content: bytes,
        deadline_s: float | None = None,
    ) -> httpx.Response:
        """The first answer that asking again would not improve."""
        wait = self._waiting.start(self._deadline_s if deadline_s is None else deadline_s)
        while True:
            try:
                response = self._http.request(method, url, content=content, headers=headers(), timeout=_timeout(wait))
            except httpx.TransportError as error:
                if not self._answered:
                    _check_first_contact(url, error)
                wait.pause(self._who(url), str(error) or type(error).__name__)
                continue
            self._answered = True
            self._learn_clock(response)
            refusal = None if response.is_success or response.is_redirect else _refusal(response)
            if refusal is None or not (refusal.status in RETRIED_STATUS or refusal.code in RETRIED_CODES):
                wait.end()
                return response
            problem = f"{refusal.status}: {refusal.message.rstrip('.')}"
            wait.pause(self._who(url), problem, refusal.retry_after_s)

    def _who(self, url: str) -> str:
        if url.startswith(self.url):
            return f"the coordinator at {self.url}"
        return f"the bucket at {httpx.URL(url).scheme}://{httpx.URL(url).netloc.decode()}"

    def _headers(self, method: str, address: str, content: bytes, extra: dict[str, str] | None) -> dict[str, str]:
        headers = dict(extra or {})
        if content:
            headers.setdefault("content-type", "application/json")
        if self.keypair is not None:
            path, _, query = address.partition("?")
            target = RequestTarget(self._run_id, self._audience, method, path, query, digest_bytes(content))
            headers |= stamp_request(self.keypair, target, self.server_time()).headers()
        return headers

    def _learn_clock(self, response: httpx.Response) -> None:
        server_time = response.headers.get(TIME_HEADER, "")
        if TIME_PATTERN.fullmatch(server_time):  # else a proxy answered, not the coordinator
            self._clock_offset_s = float(server_time) - self._clock()

    def _post(self, path: str, body: BaseModel, answer: type[AnswerT], deadline_s: float | None = None) -> AnswerT:
        content = body.model_dump_json().encode()
        return _parse(self.raw("POST", path, content=content, deadline_s=deadline_s), answer)

    def _get(self, target: str, answer: type[AnswerT]) -> AnswerT:
        return _parse(self.raw("GET", target), answer)


def _parse(response: httpx.Response, answer: type[AnswerT]) -> AnswerT:
    try:
        return answer.model_validate_json(response.content)
    except ValueError:
        message = f"{response.request.url} answered something that is not a {answer.__name__}."
        raise IntegrityError(message, hint="Is this the address of a Shoal coordinator?") from None


def _refusal(response: httpx.Response) -> RefusedError:
    try:
        refusal = api.Refusal.model_validate_json(response.content)
    except ValueError:
        message = f"{response.request.url} answered {response.status_code}."
        return RefusedError(
            "http", message, hint="Is this the address of a Shoal coordinator?", status=response.status_code
        )
    return RefusedError(
        refusal.code,
        refusal.message,
        hint=refusal.hint,
        status=response.status_code,
        permanent=refusal.permanent,
        retry_after_s=_retry_after_s(response),
    )


def _timeout(wait: Wait) -> httpx.Timeout:
    left_s = max(wait.left_s(), SHORTEST_TIMEOUT_S)
    return httpx.Timeout(min(READ_TIMEOUT_S, left_s), connect=min(CONNECT_TIMEOUT_S, left_s))


def _check_first_contact(url: str, error: httpx.TransportError) -> None:
    """Errors that waiting does not cure. After the first answer they are outages: a certificate or a name that is being changed."""
    host, problem = httpx.URL(url).netloc.decode(), str(error)
    if UNTRUSTED in problem:
        reason = problem.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or problem
        raise ConfigError(
            f"The certificate of {host} is not trusted here: {reason}.",
            hint="If it comes from a private authority, name the authority's file with --ca or SSL_CERT_FILE.",
        ) from None
    if _is_unknown_host(error):
        raise ConfigError(f"There is no host {httpx.URL(url).host}.", hint="Check the address.") from None


def _is_unknown_host(error: BaseException | None) -> bool:
    """Whether the name does not exist; a name that cannot be looked up right now is another error."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None and error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)


def _retry_after_s(response: httpx.Response) -> float | None:
    seconds = response.headers.get("retry-after", "")
    return min(float(seconds), LONGEST_PAUSE_S) if seconds.isdecimal() else None
