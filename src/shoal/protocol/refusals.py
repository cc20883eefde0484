"""Every code with which the coordinator refuses a request, with its HTTP statuses and its meaning.

A test holds the table against the code that refuses; docs/reference/codes.md is generated from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusalCode:
    statuses: tuple[int, ...]
    meaning: str


REFUSALS: dict[str, RefusalCode] = {
    "all_audited": RefusalCode((409,), "every group of the batch was audited before"),
    "already_submitted": RefusalCode((409,), "another file was submitted for this lease"),
    "bad_signature": RefusalCode(
        (401,),
        "not signed, malformed headers, or not the signature of this key for this run, server, method, path, query and body",
    ),
    "banned": RefusalCode((403,), "the key is banned; the message says why"),
    "batch_trained": RefusalCode((409,), "a version that was trained on the batch is published"),
    "bucket": RefusalCode((503,), "the bucket does not answer; nothing is lost, try again"),
    "clock": RefusalCode((401,), "signed too long ago or in the future; sign again with the server's time"),
    "digest": RefusalCode((400,), "the uploaded bytes are not those that were signed"),
    "disk_full": RefusalCode((503,), "the coordinator's disk has too little free space; nothing is lost, try again"),
    "epoch": RefusalCode((409,), "signed for another epoch than the next one; look at the run again"),
    "finished": RefusalCode((409,), "the run is over"),
    "internal": RefusalCode((500,), "a bug of the coordinator; its log has the details"),
    "lease_expired": RefusalCode((409,), "the lease ended before the upload"),
    "length": RefusalCode((411,), "a body without `content-length`"),
    "malformed": RefusalCode((400, 422), "no HTTP, or body, path or query do not fit the schema"),
    "method": RefusalCode((405,), "the route exists, but not with this method"),
    "no_bucket": RefusalCode((409,), "the run takes rollouts itself; upload to the coordinator"),
    "no_rollouts": RefusalCode((404,), "this process cannot read rollout files"),
    "not_banned": RefusalCode((409,), "the key is not banned"),
    "not_found": RefusalCode((404,), "no such route"),
    "not_uploaded": RefusalCode((409,), "the file is not in the bucket yet"),
    "nothing_to_rewind": RefusalCode((409,), "no version follows the one that the run should return to"),
    "numerics_class": RefusalCode((422,), "the run cannot verify this kind of machine"),
    "owner": RefusalCode((403,), "only the run's owner may do this"),
    "protocol_version": RefusalCode((426,), "another protocol version; install the release that the run uses"),
    "rate_limited": RefusalCode(
        (429,), "this key or address sends too many requests; `retry-after` says how long to wait"
    ),
    "relay_url": RefusalCode((409,), "another relay has announced this address"),
    "replay": RefusalCode((409,), "this signed request was received before"),
    "rewound": RefusalCode((409,), "the run was rewound; the request belongs to an earlier epoch"),
    "role": RefusalCode((403,), "only a role of the owner may do this"),
    "role_key": RefusalCode((403,), "a key of the owner's roles cannot work"),
    "size": RefusalCode((400,), "the upload has another size than announced"),
    "storage": RefusalCode((503,), "the disk fails; nothing is lost, try again"),
    "store": RefusalCode((503,), "the database fails; nothing is lost, try again"),
    "superseded": RefusalCode((409,), "a newer upload of the same lease has begun"),
    "timed_out": RefusalCode((408,), "the body did not arrive in time; send it again"),
    "too_large": RefusalCode((413, 431), "body, upload or head of a request over its limit"),
    "too_many_relays": RefusalCode((409,), "this address, or all together, announced too many relays"),
    "too_many_streams": RefusalCode((503,), "too many pages are open; the browser tries again"),
    "too_slow": RefusalCode((422,), "the machine is too slow for the run's slots"),
    "unknown_batch": RefusalCode((404,), "the step has no batch yet"),
    "unknown_lease": RefusalCode((404,), "this key holds no such lease"),
    "unknown_group": RefusalCode((404,), "no file of this group has arrived, or the file does not hold it"),
    "unknown_submission": RefusalCode((404,), "no such submission"),
    "unknown_version": RefusalCode((404,), "the version is not published"),
    "unknown_worker": RefusalCode((403, 404), "the key has not registered"),
    "version_conflict": RefusalCode((409,), "the version was published before with other weights"),
    "version_order": RefusalCode((409,), "not the next version"),
}
