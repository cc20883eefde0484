"""Rollouts of a run with a bucket are in its backup, hashed, and back in the bucket after a restore."""

from pathlib import Path

import httpx
import pytest

from shoal.config import CoordinatorConfig
from shoal.coordinator.store.bucket import Credentials, S3Bucket
from shoal.coordinator.store.records import KeptRollout
from shoal.errors import ConfigError, IntegrityError, UnavailableError
from shoal.files import digest_bytes
from shoal.owner.bucket import BucketError, BucketRollouts

FIRST, SECOND = b"first rollouts", b"second rollouts"


class MemoryBucket:
    """Objects in memory behind an HTTP transport."""

    def __init__(self, **objects: bytes) -> None:
        self.objects, self.sent, self.status = objects, 0, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert "X-Amz-Signature" in request.url.params
        name = Path(request.url.path).stem
        if self.status:
            return httpx.Response(self.status)
        if request.method == "PUT":
            self.objects[name] = request.content
            self.sent += 1
            return httpx.Response(200)
        return httpx.Response(200, content=self.objects[name]) if name in self.objects else httpx.Response(404)

    def rollouts(self) -> BucketRollouts:
        bucket = S3Bucket("http://s3/rollouts", "us-east-1", Credentials("key", "secret"))
        return BucketRollouts(bucket, httpx.Client(transport=httpx.MockTransport(self)))


def stored(name: str, data: bytes) -> KeptRollout:
    return KeptRollout(name, digest_bytes(data), len(data))


BOTH = (stored("a", FIRST), stored("b", SECOND))


def test_what_the_run_forgot_since_the_backup_is_put_back(tmp_path: Path) -> None:
    memory = MemoryBucket(a=FIRST, b=SECOND)
    memory.rollouts().copy_to(tmp_path, BOTH)
    assert (tmp_path / "a.parquet").read_bytes() == FIRST
    del memory.objects["b"]
    assert memory.rollouts().put_back(tmp_path, BOTH) == 1
    assert memory.objects == {"a": FIRST, "b": SECOND}
    assert memory.sent == 1, "what is there is not sent again"


def test_a_file_of_another_size_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(FIRST)
    memory = MemoryBucket(a=b"cut off")
    assert memory.rollouts().put_back(tmp_path, BOTH[:1]) == 1
    assert memory.objects == {"a": FIRST}


def test_a_restore_without_the_files_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(FIRST)
    memory = MemoryBucket()
    with pytest.raises(BucketError, match=r"1 rollout files .* neither in its bucket nor in the backup.*--references"):
        memory.rollouts().put_back(tmp_path, BOTH)
    assert memory.sent == 0


def test_other_bytes_in_the_bucket_are_not_backed_up(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="not the file that was signed"):
        MemoryBucket(a=SECOND).rollouts().copy_to(tmp_path, BOTH[:1])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_just_removed_is_distinguished_from_a_bucket_that_refuses(tmp_path: Path) -> None:
    memory = MemoryBucket()
    with pytest.raises(FileNotFoundError, match=r"a\.parquet"):
        memory.rollouts().copy_to(tmp_path, BOTH)
    memory.status = 403
    with pytest.raises(BucketError, match=r"answered 403\. .*credentials"):
        memory.rollouts().copy_to(tmp_path, BOTH)
    with pytest.raises(BucketError, match="answered 403"):
        memory.rollouts().put_back(tmp_path, BOTH)


def test_a_bucket_that_is_away_is_named(tmp_path: Path) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    bucket = S3Bucket("http://s3/rollouts", "us-east-1", Credentials("key", "secret"))
    rollouts = BucketRollouts(bucket, httpx.Client(transport=httpx.MockTransport(refuse)))
    with pytest.raises(UnavailableError, match=r"bucket at s3 does not answer \(ConnectError\)"):
        rollouts.copy_to(tmp_path, BOTH)


def test_a_run_without_a_bucket_has_none_and_one_with_it_needs_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert BucketRollouts.of(CoordinatorConfig()) is None
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        BucketRollouts.of(CoordinatorConfig(bucket="http://s3/rollouts"))
