"""The signed HTTP client that every role uses to speak to the coordinator.

Each call is idempotent by a client-made id, so a lost answer is simply asked for again until the deadline; then
UnavailableError names the coordinator and how long it was waited for. A refusal becomes RefusedError with the server's code.
The server's clock counts: its time is learned from every answer, so a wrong local clock does not matter.
"""

import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import BaseModel

from shoal.errors import ConfigError, IntegrityError, RefusedError, UnavailableError
from shoal.files import digest_bytes
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.protocol.signing import TIME_HEADER, TIME_PATTERN, RequestTarget, stamp_request, submission_message

AnswerT = TypeVar("AnswerT", bound=BaseModel)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 3.0
LONGEST_PAUSE_S = 60.0
"""Whoever asks for more patience than this is asked again anyway."""
SUBMISSION_SIGNATURE_HEADER = "x-shoal-submission-signature"
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
RETRIED_STATUS = {429, 502, 503, 504}
RETRIED_CODES = {"clock", "replay"}
"""Cured by signing again: with the server's time, or after a network that delivered one request twice."""


def fetch_descriptor(
    url: str, run_key: str | None, *, deadline_s: float = 30.0, http: httpx.Client | None = None
) -> tuple[bytes, RunDescriptor]:
    """The signed descriptor served at this address, its signature checked."""
    with CoordinatorClient(url, None, deadline_s=deadline_s, http=http) as client:
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
        http: httpx.Client | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self.keypair = keypair
        self.deadline_s = deadline_s
        self._run_id, self._audience = run_id, audience
        self._owns_http = http is None
        self._http = http or httpx.Client()
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._clock_offset_s = 0.0
        self._answered = False

    @classmethod
    def for_run(
        cls, descriptor: RunDescriptor, keypair: Keypair, url: str = "", **options: object
    ) -> "CoordinatorClient":
        return cls(
            url or descriptor.coordinator_url,
            keypair,
            run_id=descriptor.run_id,
            audience=descriptor.coordinator_key,
            **options,  # type: ignore[arg-type]  # checked by the constructor
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

    def server_time(self) -> float:
        return self._clock() + self._clock_offset_s

    def register(self, body: api.RegisterBody) -> api.WorkerView:
        return self._post("/v1/workers", body, api.WorkerView)

    def heartbeat(self, body: api.HeartbeatBody) -> api.HeartbeatAnswer:
        return self._post("/v1/heartbeat", body, api.HeartbeatAnswer)

    def lease(self, body: api.LeaseBody) -> api.LeaseAnswer:
        return self._post("/v1/leases", body, api.LeaseAnswer)

    def give_back(self, lease_id: str) -> None:
        self.raw("DELETE", f"/v1/leases/{lease_id}")

    def submit(self, lease_id: str, data: bytes, *, by_bucket: bool = False) -> api.SubmissionAnswer:
        """Hands in the file of a lease, through the run's bucket if the lease asks for it."""
        assert self.keypair is not None
        digest = digest_bytes(data)
        signature = self.keypair.sign(submission_message(self._run_id, lease_id, digest))
        if by_bucket:
            body = api.UploadBody(lease_id=lease_id, digest=digest, size_bytes=len(data), signature=signature)
            return self._submit_by_bucket(body, data)
        headers = {SUBMISSION_SIGNATURE_HEADER: signature, "content-type": "application/vnd.apache.parquet"}
        answer = self.raw("PUT", f"/v1/submissions/{lease_id}", content=data, headers=headers)
        return _parse(answer, api.SubmissionAnswer)

    def _submit_by_bucket(self, body: api.UploadBody, data: bytes) -> api.SubmissionAnswer:
        place = self.upload_url(body)
        stored = self._repeat("PUT", place.url, dict, data)
        if not stored.is_success:
            hint = "The run's owner must look at the bucket."
            raise RefusedError("bucket", f"The bucket answered {stored.status_code}.", hint=hint, status=503)
        return self.uploaded(body)

    def upload_url(self, body: api.UploadBody) -> api.UploadAnswer:
        return self._post("/v1/uploads", body, api.UploadAnswer)

    def uploaded(self, body: api.UploadBody) -> api.SubmissionAnswer:
        return self._post("/v1/uploads/done", body, api.SubmissionAnswer)

    def announce_relay(self, body: api.RelayBody) -> api.RelaysAnswer:
        return self._post("/v1/relays", body, api.RelaysAnswer)

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

    def batch(self, step: int, wait_s: float = 20.0) -> api.BatchAnswer:
        return self._get(f"/v1/batches/{step}?wait_s={wait_s:g}", api.BatchAnswer)

    def publish(self, body: api.VersionBody) -> api.VersionAnswer:
        return self._post("/v1/versions", body, api.VersionAnswer)

    def report_evaluation(self, body: api.EvaluationBody) -> api.EvaluationAnswer:
        return self._post("/v1/evaluations", body, api.EvaluationAnswer)

    def set_run_state(self, body: api.RunStateBody) -> api.RunStateAnswer:
        return self._post("/v1/run/state", body, api.RunStateAnswer)

    def ban(self, body: api.BanBody) -> api.WorkerView:
        return self._post("/v1/bans", body, api.WorkerView)

    def unban(self, body: api.BanBody) -> api.WorkerView:
        return self._post("/v1/bans/lift", body, api.WorkerView)

    def status(self) -> api.StatusView:
        return self._get("/v1/status", api.StatusView)

    def history(self) -> api.HistoryView:
        return self._get("/v1/history", api.HistoryView)

    def ledger_export(self) -> bytes:
        return self.raw("GET", "/v1/ledger").content

    def raw(
        self, method: str, target: str, *, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """One request, signed afresh for every try, repeated until it is answered or the deadline has passed."""
        response = self._repeat(
            method, self.url + target, lambda: self._headers(method, target, content, headers), content
        )
        if response.is_success or response.is_redirect:
            return response
        raise _refusal(response)

    def _repeat(self, method: str, url: str, headers: Callable[[], dict[str, str]], content: bytes) -> httpx.Response:
        """The first answer that asking again would not improve."""
        started, backoff_s = self._monotonic(), FIRST_BACKOFF_S
        while True:
            pause_s = backoff_s * random.uniform(0.5, 1.0)
            try:
                response = self._http.request(
                    method,
                    url,
                    content=content,
                    headers=headers(),
                    timeout=self._timeout(self._monotonic() - started),
                )
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
                if not self._answered and UNTRUSTED in problem:
                    raise _untrusted(url, problem) from None
            else:
                self._answered = True
                self._learn_clock(response)
                if response.is_success or response.is_redirect:
                    return response
                refusal = _refusal(response)
                if response.status_code not in RETRIED_STATUS and refusal.code not in RETRIED_CODES:
                    return response
                problem = f"{response.status_code}: {refusal.message.rstrip('.')}"
                if refusal.retry_after_s is not None:
                    pause_s = max(pause_s, refusal.retry_after_s * random.uniform(1.0, 1.25))
            if self._monotonic() - started + max(pause_s, backoff_s) > self.deadline_s:
                address = f"{httpx.URL(url).scheme}://{httpx.URL(url).netloc.decode()}"
                who = f"The coordinator at {self.url}" if url.startswith(self.url) else f"The bucket at {address}"
                raise UnavailableError(
                    f"{who} did not answer for {self.deadline_s:.0f} s ({problem}).",
                    hint="Check the address and that it is running; this command can simply be started again.",
                )
            self._sleep(pause_s)
            backoff_s = min(backoff_s * 2, LAST_BACKOFF_S)

    def _timeout(self, elapsed_s: float) -> httpx.Timeout:
        left_s = max(self.deadline_s - elapsed_s, FIRST_BACKOFF_S)
        return httpx.Timeout(min(READ_TIMEOUT_S, left_s), connect=min(CONNECT_TIMEOUT_S, left_s))

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
        told = response.headers.get(TIME_HEADER, "")
        if TIME_PATTERN.fullmatch(told):  # else a proxy answered, not the coordinator
            self._clock_offset_s = float(told) - self._clock()

    def _post(self, path: str, body: BaseModel, answer: type[AnswerT]) -> AnswerT:
        return _parse(self.raw("POST", path, content=body.model_dump_json().encode()), answer)

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


def _untrusted(url: str, problem: str) -> ConfigError:
    """Told at the first contact; later it is an outage like any other, such as a certificate that is being renewed."""
    reason = problem.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or problem
    return ConfigError(
        f"The certificate of {httpx.URL(url).netloc.decode()} is not trusted here: {reason}.",
        hint="If it comes from a private authority, name the authority's file with --ca or SSL_CERT_FILE.",
    )


def _retry_after_s(response: httpx.Response) -> float | None:
    told = response.headers.get("retry-after", "")
    return min(float(told), LONGEST_PAUSE_S) if told.isdecimal() else None
