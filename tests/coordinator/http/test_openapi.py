"""Requests made from the published schema, fit and unfit: no failure of the server, answers as the schema promises, and no change
of state by a refused one. Signed ones get behind the signature; who signs, and whether the ids are real, is drawn too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import requests
import schemathesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shoal.coordinator.http.route import PARQUET
from shoal.coordinator.http.table import ROUTES
from shoal.coordinator.store.database import Connection
from shoal.files import digest_bytes
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER
from shoal.protocol.signing import BODY_HEADER, RequestTarget, stamp_request, submission_message
from support.samples import keypair
from support.swarm import Swarm, running, small_config

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
TABLES = (
    *("meta", "workers", "nonces", "slots", "leases", "submissions", "groups", "batches", "versions", "evaluations"),
    *("ledger", "tallies", "waiting", "task_stats"),
)
Case = schemathesis.Case[Any]
Operation = schemathesis.APIOperation[Any, Any, Any, Any]
schemathesis.serializer.alias(PARQUET, "application/octet-stream")
SIGNERS = ("ann", "ann", "validator", "trainer", "evaluator", "run", "stranger")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """In the middle of its work: something is leased, claimed, decided and published."""
    with running(tmp_path, small_config(run={"steps": 50}, coordinator={"requests_per_s_key": 0})) as swarm:
        swarm.publish(0)
        ann, bob = swarm.join("ann", "bob")
        swarm.produce(bob)
        swarm.work(bob)
        swarm.claim()
        swarm.lease(ann)
        yield swarm


def operations(swarm: Swarm) -> list[Operation]:
    published = swarm.http.get("/openapi.json").json()
    del published["paths"]["/v1/events"]  # it never ends
    for methods in published["paths"].values():
        for operation in methods.values():  # headers are signed here, and forged in test_authentication
            operation["parameters"] = [entry for entry in operation.get("parameters", []) if "$ref" not in entry]
    found = schemathesis.openapi.from_dict(published).get_all_operations()
    return [operation.ok() for operation in found if isinstance(operation, Ok)]


def dump(connection: Connection) -> str:
    return json.dumps(
        [[list(dict(row).values()) for row in connection.execute(f"SELECT * FROM {table}")] for table in TABLES]
    )


def real_ids(swarm: Swarm, body: Any) -> Any:
    """The body, with the ids of a claim that is under way."""
    claimed = swarm.all("SELECT claim_id, submission_id FROM submissions WHERE state='claimed'")
    if not isinstance(body, dict) or "claim_id" not in body or not claimed:
        return body
    return body | claimed[0]


def draw_case(data: st.DataObject, swarm: Swarm, operation: Operation) -> Case:
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    case = data.draw(operation.as_strategy(generation_mode=mode))
    if "lease_id" in case.path_parameters and data.draw(st.booleans()):
        leases = [str(row["lease_id"]) for row in swarm.all("SELECT lease_id FROM leases ORDER BY slot")]
        case.path_parameters["lease_id"] = data.draw(st.sampled_from(leases))
    if "submission_id" in case.path_parameters and data.draw(st.booleans()):
        names = [str(row["submission_id"]) for row in swarm.all("SELECT submission_id FROM submissions")]
        case.path_parameters["submission_id"] = data.draw(st.sampled_from(names))
    case.body = real_ids(swarm, case.body)
    if isinstance(case.body, dict) and case.path == "/v1/claims":
        case.body["wait_s"] = 0  # nobody sits through a long poll here
    if "wait_s" in case.query:
        case.query["wait_s"] = 0
    return case


def send(swarm: Swarm, case: Case, signer: str | None) -> Any:
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://coordinator")).prepare()
    assert prepared.url is not None
    assert prepared.method is not None
    body = prepared.body or b""
    content = body if isinstance(body, bytes) else str(body).encode()
    headers = {name: str(value) for name, value in prepared.headers.items() if name.lower() != "content-length"}
    if signer is not None:
        headers |= signature(swarm, signer, prepared.method, prepared.url, content)
    return swarm.http.request(prepared.method, prepared.url, content=content, headers=headers, follow_redirects=False)


def signature(swarm: Swarm, signer: str, method: str, url: str, content: bytes) -> dict[str, str]:
    parts, key, digest = urlsplit(url), keypair(signer), digest_bytes(content)
    path, audience = unquote(parts.path), swarm.run.descriptor.coordinator_key
    target = RequestTarget("run-1", audience, method, path, parts.query, digest)
    stamp = stamp_request(key, target, swarm.clock())
    evidence = key.sign(submission_message("run-1", path.rsplit("/", 1)[1], digest))
    return stamp.headers() | {BODY_HEADER: digest, SUBMISSION_SIGNATURE_HEADER: evidence}


def assert_sane(swarm: Swarm, case: Case, signer: str | None) -> int:
    before = swarm.read(dump)
    answer = send(swarm, case, signer)
    case.validate_response(answer, checks=CHECKS)
    status = int(answer.status_code)
    if status >= 400:
        assert set(answer.json()) - {"permanent"} == {"code", "message", "hint"}
    if status >= 400 or case.method == "GET":
        assert swarm.read(dump) == before, (case.as_curl_command(), answer.text)
    return status


def fuzz_signed(swarm: Swarm, max_examples: int) -> dict[int, int]:
    known, statuses = operations(swarm), dict[int, int]()

    @settings(max_examples=max_examples, database=None, phases=[Phase.generate])  # a changing state cannot be shrunk
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        case = draw_case(data, swarm, data.draw(st.sampled_from(known)))
        status = assert_sane(swarm, case, data.draw(st.sampled_from(SIGNERS)))
        statuses[status] = statuses.get(status, 0) + 1

    fuzz()
    return statuses


def test_signed_requests_of_every_shape_are_answered_as_the_schema_says(swarm: Swarm) -> None:
    statuses = fuzz_signed(swarm, 200)
    assert {200, 403, 404, 422} <= set(statuses), statuses


@pytest.mark.slow
def test_thousands_of_signed_requests_are_answered_as_the_schema_says(swarm: Swarm) -> None:
    statuses = fuzz_signed(swarm, 5000)
    assert {200, 403, 404, 409, 422} <= set(statuses), statuses


def test_a_request_without_a_signature_changes_nothing(swarm: Swarm) -> None:
    known = operations(swarm)

    @settings(max_examples=60, database=None, phases=[Phase.generate])
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        case = draw_case(data, swarm, data.draw(st.sampled_from(known)))
        status = assert_sane(swarm, case, None)
        assert status >= 400 or case.method == "GET"

    fuzz()


def test_every_operation_that_changes_state_says_how_to_sign(swarm: Swarm) -> None:
    schema = swarm.http.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            names = {entry.get("$ref", "").rsplit("/", 1)[-1] for entry in operation.get("parameters", [])}
            is_signed = {"x-shoal-key", "x-shoal-time", "x-shoal-nonce", "x-shoal-signature"} <= names
            needs_signature = method != "get" or path.endswith("/file") or "/batches/" in path
            assert is_signed == (needs_signature and path != "/v1/owner/session"), (method, path)
    upload = schema["paths"]["/v1/submissions/{lease_id}"]["put"]
    assert upload["requestBody"]["required"]
    assert any(entry.get("$ref", "").endswith("/x-shoal-body") for entry in upload["parameters"])


def test_the_schema_lists_every_route_of_the_table_and_says_who_may_call_it(swarm: Swarm) -> None:
    schema = swarm.http.get("/openapi.json").json()
    listed = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    shown = [route for route in ROUTES if route.is_listed]
    assert listed == {(route.method, route.path) for route in shown}
    assert {route.path for route in ROUTES if not route.is_listed} == {"/", "/worker/{key}", "/page/{name}"}
    for route in shown:
        assert route.access.describe() in schema["paths"][route.path][route.method.lower()]["description"]


def test_the_api_page_shows_everything_and_needs_no_other_host(swarm: Swarm) -> None:
    answer = swarm.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = answer.text
    schema = swarm.http.get("/openapi.json").json()
    for name in (*schema["components"]["schemas"], *schema["components"]["parameters"]):
        assert f'id="{name}"' in page
    for path in schema["paths"]:
        assert f"</span> {path}</h3>" in page
    targets = re.findall(r"""(?:src|href|action|url|@import)\s*[=(]\s*["']?([^"'\s>)]+)""", page)
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert {target for target in targets if not target.startswith("#")} == {"openapi.json"}
    assert {target[1:] for target in targets if target.startswith("#")} <= ids
    assert "<script" not in page
