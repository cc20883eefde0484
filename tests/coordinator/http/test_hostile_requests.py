"""Random requests with good signatures: no failure of the server, and no change of state by a refused one."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.store.database import Connection
from shoal.files import digest_bytes
from shoal.protocol.signing import RequestTarget, stamp_request
from support.samples import keypair
from support.swarm import Swarm, registration, verdict_of

Bodies = dict[str, tuple[str, dict[str, Any]]]
TABLES = ("meta", "workers", "nonces", "slots", "leases", "submissions", "groups", "batches", "versions", "evaluations")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["a" * 8, "a" * 64, "x" * 300, "\x00", "' OR 1=1 --", "../../etc/passwd", "1e999"])
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@pytest.fixture
def bodies(swarm: Swarm) -> Bodies:
    """Path → whose request it is, and a body that would be accepted."""
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    verdict = verdict_of(swarm.claim())
    version = {"version": 1, "manifest_digest": "a" * 64, "weights_digest": "b" * 64, "bytes_total": 1, "report": {}}
    evaluation = {"version": 0, "accuracy": 0.5, "problems": 1, "samples": 1, "mean_tokens": 1.0, "seconds": 1.0}
    return {
        "/v1/workers": ("ann", registration("ann").model_dump()),
        "/v1/heartbeat": ("ann", {"activity": "x", "tokens_generated": 1, "bytes_received": 1}),
        "/v1/leases": ("ann", {"request_id": "request-1", "held_versions": [0]}),
        "/v1/relays": ("relay", {"url": "http://relay", "newest_version": 0, "bytes_sent": 0, "bytes_received": 0}),
        "/v1/claims": ("validator", {"request_id": "request-1", "wait_s": 0}),
        "/v1/verdicts": ("validator", verdict.model_dump(mode="json")),
        "/v1/versions": ("trainer", version),
        "/v1/evaluations": ("evaluator", evaluation),
    }


def dump(connection: Connection) -> str:
    return json.dumps(
        [[list(dict(row).values()) for row in connection.execute(f"SELECT * FROM {table}")] for table in TABLES]
    )


def send(swarm: Swarm, name: str, method: str, path: str, body: bytes) -> Any:
    audience = swarm.run.descriptor.coordinator_key
    target = RequestTarget("run-1", audience, method, path, "", digest_bytes(body))
    stamp = stamp_request(keypair(name), target, swarm.clock())
    headers = stamp.headers() | {"content-type": "application/json"}
    return swarm.http.request(method, path, content=body, headers=headers)


def assert_sane(swarm: Swarm, name: str, method: str, path: str, body: bytes) -> None:
    before = swarm.read(dump)
    answer = send(swarm, name, method, path, body)
    assert answer.status_code < 500, (path, body, answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()) - {"permanent"} == {"code", "message", "hint"}
        assert swarm.read(dump) == before, (path, body, answer.text)


@settings(max_examples=80)
@given(data=st.data())
def test_bodies_with_strange_fields_break_nothing(swarm: Swarm, bodies: Bodies, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(bodies)))
    name, valid = bodies[path]
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(valid)) | st.text(max_size=8), values, max_size=3))
    name = data.draw(st.sampled_from([name, name, name, "stranger", "ann"]))
    assert_sane(swarm, name, "POST", path, json.dumps(valid | changes).encode())


@settings(max_examples=40)
@given(
    body=st.binary(max_size=100) | values.map(lambda value: json.dumps(value).encode()),
    path=st.sampled_from(["/v1/workers", "/v1/leases", "/v1/verdicts", "/v1/versions"]),
)
def test_bodies_of_any_kind_break_nothing(swarm: Swarm, body: bytes, path: str) -> None:
    assert_sane(swarm, "validator", "POST", path, body)


@settings(max_examples=15)
@given(tail=st.text("abcdef0123456789/.?&=", max_size=40), method=st.sampled_from(["GET", "PUT", "DELETE", "POST"]))
def test_addresses_of_any_kind_break_nothing(swarm: Swarm, tail: str, method: str) -> None:
    for stem in ("/v1/submissions/", "/v1/leases/", "/v1/batches/", "/v1/"):
        assert_sane(swarm, "trainer", method, stem + tail, b"{}")
