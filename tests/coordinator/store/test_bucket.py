"""Rollouts in a bucket: the signatures against a published example, everything else against a real S3-speaking server."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shoal.coordinator.store.bucket import Credentials, S3Bucket, region_of
from shoal.errors import ConfigError, IntegrityError, RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.signing import submission_message
from support.ports import free_port, wait_for
from support.swarm import Swarm, running, small_config

EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
OURS = Credentials("shoalkey", "shoalsecret")
RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
DATA = b"rollouts" * 100
needs_rclone = pytest.mark.skipif(RCLONE is None, reason="rclone is not installed: run `make setup`")


def test_signatures_are_those_of_the_published_example() -> None:
    bucket = S3Bucket("https://examplebucket.s3.amazonaws.com", "us-east-1", EXAMPLE, clock=lambda: 1369353600.0)
    signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    assert bucket._presign("GET", "test.txt", 86400).endswith(f"&X-Amz-Signature={signature}")


def test_missing_credentials_are_named() -> None:
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        Credentials.from_environment({"AWS_ACCESS_KEY_ID": "x"})


@contextmanager
def s3_server(root: Path) -> Iterator[str]:
    (root / "rollouts").mkdir(parents=True)
    port = free_port()
    command = [str(RCLONE), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off"]
    command += ["--config", str(root / "none.conf"), "--auth-key", f"{OURS.key},{OURS.secret}", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for("rclone", port, process)
        yield f"http://127.0.0.1:{port}/rollouts"
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[Swarm, Path]]:
    """A swarm that keeps its rollouts in a bucket, and the directory that the bucket's server keeps them in."""
    with s3_server(tmp_path / "s3") as url, running(tmp_path / "run", small_config()) as swarm:
        swarm.alter(bucket=S3Bucket(url, "us-east-1", OURS))
        swarm.publish(0)
        yield swarm, tmp_path / "s3" / "rollouts"


def announced(swarm: Swarm, data: bytes = DATA) -> tuple[api.UploadBody, str]:
    """What announces the file of a lease, and the URL for it."""
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    digest = digest_bytes(data)
    assert ann.keypair is not None
    signature = ann.keypair.sign(submission_message("run-1", lease.lease_id, digest))
    body = api.UploadBody(lease_id=lease.lease_id, digest=digest, size_bytes=len(data), signature=signature)
    return body, ann.upload_url(body).url


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


@pytest.mark.slow
@needs_rclone
def test_a_file_goes_through_the_bucket_and_back(stored: tuple[Swarm, Path]) -> None:
    swarm, directory = stored
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    assert lease.by_bucket
    ann._http = httpx.Client(mounts={"http://coordinator": ann._http._transport})
    answer = ann.submit(lease.lease_id, DATA, by_bucket=True)
    assert ann.submit(lease.lease_id, DATA, by_bucket=True) == answer
    assert files(directory) == [f"{answer.submission_id}.parquet"]
    assert list(swarm.run.submissions.iterdir()) == []
    claim = swarm.claim()
    validator = swarm.client("validator")
    validator._http = httpx.Client(mounts={"http://coordinator": validator._http._transport})
    assert validator.submission_file(claim.submission_id, claim.digest) == DATA
    (directory / "submissions" / f"{answer.submission_id}.parquet").write_bytes(b"x" * len(DATA))
    with pytest.raises(IntegrityError, match="not those that were signed"):
        validator.submission_file(claim.submission_id, claim.digest)


@pytest.mark.slow
@needs_rclone
def test_a_url_is_good_for_its_name_its_size_and_nothing_else(stored: tuple[Swarm, Path]) -> None:
    swarm, directory = stored
    _, url = announced(swarm)
    assert httpx.put(url, content=DATA + b"more").status_code == 403
    assert httpx.put(url.replace("/incoming/", "/submissions/"), content=DATA).status_code == 403
    assert httpx.get(url).status_code == 403
    assert httpx.put(url.split("&X-Amz-Signature")[0], content=DATA).status_code in (400, 403)
    assert files(directory) == []
    assert httpx.put(url, content=DATA).is_success


@pytest.mark.slow
@needs_rclone
def test_other_bytes_and_missing_ones_are_refused_and_what_was_confirmed_stays(stored: tuple[Swarm, Path]) -> None:
    swarm, directory = stored
    body, url = announced(swarm)
    ann = swarm.client("ann")

    def refusal() -> str:
        with pytest.raises(RefusedError) as caught:
            ann.uploaded(body)
        return caught.value.code

    assert refusal() == "not_uploaded"
    assert httpx.put(url, content=b"?" * len(DATA)).is_success
    assert refusal() == "digest"
    assert swarm.all("SELECT * FROM submissions") == []
    assert httpx.put(url, content=DATA).is_success
    submission = ann.uploaded(body)
    assert httpx.put(url, content=b"!" * len(DATA)).is_success  # the URL still works, for a name that nobody reads
    kept = directory / "submissions" / f"{submission.submission_id}.parquet"
    assert kept.read_bytes() == DATA


@pytest.mark.slow
@needs_rclone
def test_a_lease_fills_one_place_however_many_files_it_announces(stored: tuple[Swarm, Path]) -> None:
    swarm, directory = stored
    body, url = announced(swarm)
    ann = swarm.client("ann")
    assert ann.keypair is not None
    for number in range(5):
        other = bytes([number]) * len(DATA)
        digest = digest_bytes(other)
        signature = ann.keypair.sign(submission_message("run-1", body.lease_id, digest))
        announcement = body.model_copy(update={"digest": digest, "signature": signature})
        assert httpx.put(ann.upload_url(announcement).url, content=other).is_success
    assert len(files(directory)) == 1
    for broken, code in (({"size_bytes": 7}, "size"), ({}, "digest"), ({}, "not_uploaded")):
        with pytest.raises(RefusedError) as caught:
            ann.uploaded(body.model_copy(update=broken))
        assert caught.value.code == code
        if code == "size":
            assert files(directory) == []
            assert httpx.put(url, content=b"?" * len(DATA)).is_success
    assert files(directory) == []


def test_a_url_ends_with_its_lease(swarm: Swarm) -> None:
    swarm.alter(bucket=S3Bucket("http://bucket/rollouts", "us-east-1", OURS, clock=swarm.clock))
    swarm.publish(0)
    body, url = announced(swarm)
    lease = swarm.one("SELECT issued_at, expires_at FROM leases")
    whole_s = float(str(lease["expires_at"])) - float(str(lease["issued_at"]))
    assert f"X-Amz-Expires={whole_s:.0f}&" in url
    swarm.clock.advance(whole_s - 2)
    assert "X-Amz-Expires=2&" in swarm.client("ann").upload_url(body).url


def test_without_a_bucket_the_coordinator_takes_files_itself(swarm: Swarm) -> None:
    swarm.publish(0)
    body, url = announced(swarm)
    assert url == ""
    with pytest.raises(RefusedError) as caught:
        swarm.client("ann").uploaded(body)
    assert caught.value.code == "no_bucket"


def test_a_file_that_is_too_large_or_for_anothers_lease_gets_no_url(swarm: Swarm) -> None:
    swarm.publish(0)
    body, _ = announced(swarm)
    large = body.model_copy(update={"size_bytes": 1 << 30})
    swarm.join("bob")
    for name, announcement, code in [("ann", large, "too_large"), ("bob", body, "unknown_lease")]:
        with pytest.raises(RefusedError) as caught:
            swarm.client(name).upload_url(announcement)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("url", "region"),
    [
        ("https://s3.eu-west-1.amazonaws.com/rollouts", "eu-west-1"),
        ("https://rollouts.s3.ap-southeast-2.amazonaws.com", "ap-southeast-2"),
        ("https://s3.amazonaws.com/rollouts", "us-east-1"),
        ("https://s3.example.org/rollouts", "us-east-1"),
        ("https://s3.eu-west-1.amazonaws.com.example.org/rollouts", "us-east-1"),
    ],
)
def test_the_region_is_read_from_amazons_endpoints(url: str, region: str) -> None:
    assert region_of(url) == region
