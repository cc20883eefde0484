"""Rollouts in any S3-compatible bucket: presigned URLs (signature version 4), names made by the server.

A worker writes to `incoming/PLACE`, one place per lease, with a URL that is good for one size and until the lease ends. The
coordinator copies the object to `submissions/ID.parquet`, whose name nobody else may write, and hashes the copy: what was
confirmed cannot be changed afterwards. Readers get a URL and hash again. Credentials are AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY of the environment.
"""

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpx
from blake3 import blake3

from shoal.errors import ConfigError, RefusedError

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
OWN_CALLS_S = 300
TIMEOUT_S = 60.0
DEFAULT_REGION = "us-east-1"
AMAZON_REGION = re.compile(r"(?:^|\.)s3[.-]((?!dualstack)[a-z0-9-]+)\.amazonaws\.com$")


@dataclass(frozen=True)
class Credentials:
    key: str
    secret: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Credentials":
        try:
            return cls(environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"])
        except KeyError as missing:
            raise ConfigError(
                f"coordinator.bucket is set, but {missing.args[0]} is not.",
                hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the coordinator's environment.",
            ) from None


class S3Bucket:
    """`url` is endpoint and bucket, as in https://s3.example.org/rollouts; a path behind it becomes a prefix."""

    def __init__(
        self,
        url: str,
        region: str,
        credentials: Credentials,
        *,
        clock: Callable[[], float] = time.time,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._url, self._region, self._credentials, self._clock = urlsplit(url), region, credentials, clock
        self._http = http or httpx.AsyncClient(timeout=TIMEOUT_S)

    def upload_url(self, place: str, size_bytes: int, lasts_s: int) -> str:
        """Where exactly this many bytes may be put."""
        return self._presign("PUT", _incoming(place), lasts_s, {"content-length": str(size_bytes)})

    def download_url(self, submission_id: str, lasts_s: int = OWN_CALLS_S) -> str:
        return self._presign("GET", _final(submission_id), lasts_s)

    def store_url(self, submission_id: str) -> str:
        """Where the owner puts a file back."""
        return self._presign("PUT", _final(submission_id), OWN_CALLS_S)

    def look_url(self, submission_id: str) -> str:
        return self._presign("HEAD", _final(submission_id), OWN_CALLS_S)

    async def take_in(self, place: str, submission_id: str, size_bytes: int, digest: str) -> None:
        """Copies what was uploaded to a name that its sender cannot write. Other bytes than the promised ones are removed, or
        the same ones could be sent here to be hashed again and again."""
        source = f"{self._url.path.rstrip('/')}/{_incoming(place)}"
        headers = {"x-amz-copy-source": quote(source)}
        copied = await self._call("PUT", _final(submission_id), headers)
        if copied.status_code == 404:
            raise RefusedError("not_uploaded", "The file is not in the bucket.", hint="Upload it first.", status=409)
        self._require(copied)
        size_found, found = await self._measure(submission_id, size_bytes)
        if (size_found, found) == (size_bytes, digest):
            return
        await self.delete(submission_id)
        await self.forget_upload(place)
        if size_found != size_bytes:
            raise RefusedError("size", f"The uploaded file does not have the promised {size_bytes} bytes.", status=400)
        raise RefusedError("digest", "The uploaded bytes are not those that were signed.", status=400)

    async def forget_upload(self, place: str) -> None:
        """Removes what was sent, once it is recorded; until then a lost answer can be asked for again."""
        await self._call("DELETE", _incoming(place))

    async def delete(self, submission_id: str) -> None:
        self._require(await self._call("DELETE", _final(submission_id)))

    async def close(self) -> None:
        await self._http.aclose()

    async def _measure(self, submission_id: str, at_most: int) -> tuple[int, str]:
        """Size and digest; of a file that is too large no more is read than shows it."""
        hasher, seen = blake3(), 0
        try:
            async with self._http.stream("GET", self.download_url(submission_id)) as response:
                if response.is_success:
                    async for chunk in response.aiter_bytes():
                        hasher.update(chunk)
                        seen += len(chunk)
                        if seen > at_most:
                            break
        except httpx.TransportError as error:
            raise self._silent(error) from None
        self._require(response)
        return seen, hasher.hexdigest()

    async def _call(self, method: str, name: str, headers: dict[str, str] | None = None) -> httpx.Response:
        try:
            return await self._http.request(
                method, self._presign(method, name, OWN_CALLS_S, headers or {}), headers=headers
            )
        except httpx.TransportError as error:
            raise self._silent(error) from None

    def _require(self, response: httpx.Response) -> None:
        if not response.is_success:
            raise RefusedError(
                "bucket",
                f"The bucket answered {response.status_code}.",
                hint="The owner must check coordinator.bucket and its credentials; your work can be sent again.",
                status=503,
            )

    def _silent(self, error: httpx.TransportError) -> RefusedError:
        message = f"The bucket at {self._url.netloc} does not answer ({type(error).__name__})."
        return RefusedError("bucket", message, hint="Your work can be sent again.", status=503)

    def _presign(self, method: str, name: str, lasts_s: int, headers: Mapping[str, str] | None = None) -> str:
        path = quote(f"{self._url.path.rstrip('/')}/{name}")
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock()))
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        signed = {"host": self._url.netloc} | dict(headers or {})
        query = {
            "X-Amz-Algorithm": ALGORITHM,
            "X-Amz-Credential": f"{self._credentials.key}/{scope}",
            "X-Amz-Date": now,
            "X-Amz-Expires": str(lasts_s),
            "X-Amz-SignedHeaders": ";".join(sorted(signed)),
        }
        text = "&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in sorted(query.items()))
        lines = [f"{key}:{value}\n" for key, value in sorted(signed.items())]
        request = "\n".join([method, path, text, "".join(lines), ";".join(sorted(signed)), UNSIGNED])
        return f"{self._url.scheme}://{self._url.netloc}{path}?{text}&X-Amz-Signature={self._sign(now, scope, request)}"

    def _sign(self, now: str, scope: str, request: str) -> str:
        to_sign = "\n".join([ALGORITHM, now, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{self._credentials.secret}".encode()
        for part in (*scope.split("/"), to_sign):
            key = hmac.digest(key, part.encode(), "sha256")
        return key.hex()


def _incoming(place: str) -> str:
    return f"incoming/{place}"


def _final(submission_id: str) -> str:
    return f"submissions/{submission_id}.parquet"


def open_bucket(url: str, clock: Callable[[], float]) -> S3Bucket | None:
    return S3Bucket(url, region_of(url), Credentials.from_environment(), clock=clock) if url else None


def region_of(url: str) -> str:
    """The region that requests are signed for: Amazon's endpoints name it, most other servers take any."""
    named = AMAZON_REGION.search(urlsplit(url).hostname or "")
    return named[1] if named else DEFAULT_REGION
