"""The rollouts of a run that keeps them in a bucket: copied into its backup, put back by a restore.

The run goes on after a backup, and its retention forgets files that the backup still needs, so a whole backup holds them. Every
copy is hashed. What is already in the bucket is not sent again; what is neither there nor in the backup refuses the restore.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import httpx

from shoal.config import CoordinatorConfig
from shoal.coordinator.store.bucket import S3Bucket, open_bucket
from shoal.coordinator.store.records import KeptRollout
from shoal.errors import IntegrityError, ShoalError, UnavailableError
from shoal.files import digest_bytes, write_atomic

TIMEOUT_S = 60.0


class BucketError(ShoalError):
    """A bucket that does not do what is asked of it."""

    code = "bucket"
    permanent = False


class BucketRollouts:
    def __init__(self, bucket: S3Bucket, http: httpx.Client | None = None) -> None:
        self._bucket, self._http = bucket, http or httpx.Client(timeout=TIMEOUT_S)

    @classmethod
    def of(cls, settings: CoordinatorConfig) -> "BucketRollouts | None":
        bucket = open_bucket(settings.bucket, time.time)
        return None if bucket is None else cls(bucket)

    def copy_to(self, folder: Path, rollouts: Iterable[KeptRollout]) -> None:
        """Raises FileNotFoundError for a file that retention has just removed."""
        for rollout in rollouts:
            answer = self._ask("GET", self._bucket.download_url(rollout.submission_id))
            if answer.status_code == 404:
                raise FileNotFoundError(f"{rollout.file_name} is not in the bucket")
            _require(answer)
            if digest_bytes(answer.content) != rollout.digest:
                raise IntegrityError(f"{rollout.file_name} in the bucket is not the file that was signed.")
            write_atomic(folder / rollout.file_name, answer.content)

    def put_back(self, folder: Path, rollouts: Iterable[KeptRollout]) -> int:
        """How many were missing and have been sent."""
        missing = [rollout for rollout in rollouts if not self._has(rollout)]
        if lost := [rollout for rollout in missing if not (folder / rollout.file_name).is_file()]:
            raise BucketError(
                f"{len(lost)} rollout files of this run are neither in its bucket nor in the backup.",
                hint="The run has forgotten them since. Use a later backup, or one made without --references.",
            )
        for rollout in missing:
            data = (folder / rollout.file_name).read_bytes()
            _require(self._ask("PUT", self._bucket.store_url(rollout.submission_id), data))
        return len(missing)

    def _has(self, rollout: KeptRollout) -> bool:
        answer = self._ask("HEAD", self._bucket.look_url(rollout.submission_id))
        if answer.status_code == 404:
            return False
        _require(answer)
        return int(answer.headers.get("content-length", -1)) == rollout.size_bytes

    def _ask(self, method: str, url: str, data: bytes = b"") -> httpx.Response:
        try:
            return self._http.request(method, url, content=data)
        except httpx.TransportError as error:
            address = httpx.URL(url).netloc.decode()
            raise UnavailableError(f"The bucket at {address} does not answer ({type(error).__name__}).") from None


def _require(answer: httpx.Response) -> None:
    if not answer.is_success:
        hint = "Check coordinator.bucket and its credentials."
        raise BucketError(f"The bucket answered {answer.status_code}.", hint=hint)
