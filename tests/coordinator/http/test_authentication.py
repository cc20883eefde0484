"""Who may change what: signatures, clocks, nonces, roles, and the shape of every refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.http.route import SMALL
from shoal.coordinator.presence import CLOCK_SLACK_S
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.signing import (
    PROTOCOL_HEADER,
    TIME_HEADER,
    RequestStamp,
    RequestTarget,
    stamp_request,
)
from shoal.protocol.verdicts import Reason
from support.samples import descriptor, keypair
from support.swarm import Swarm, registration, running, small_config, verdict_of

WORKER = keypair("ann")
REGISTER = registration("ann").model_dump_json().encode()


def signed(
    swarm: Swarm,
    *,
    key: Keypair = WORKER,
    run_id: str = "run-1",
    audience: str = "",
    path: str = "/v1/workers",
    body: bytes = REGISTER,
    skew_s: float = 0.0,
    method: str = "POST",
) -> dict[str, str]:
    coordinator = audience or descriptor().coordinator_key
    target = RequestTarget(run_id, coordinator, method, path, "", digest_bytes(body))
    stamp = stamp_request(key, target, swarm.clock() + skew_s)
    return stamp.headers() | {"content-type": "application/json"}


def send(swarm: Swarm, headers: dict[str, str], *, path: str = "/v1/workers", body: bytes = REGISTER) -> Any:
    return swarm.http.post(path, content=body, headers=headers)


def assert_refused(answer: Any, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert set(answer.json()) - {"permanent"} == {"code", "message", "hint"}
    assert answer.json()["message"]


def assert_untouched(swarm: Swarm) -> None:
    assert swarm.all("SELECT * FROM workers") == []
    assert swarm.all("SELECT * FROM nonces") == []


def test_a_well_signed_request_is_answered_with_the_servers_time(swarm: Swarm) -> None:
    answer = send(swarm, signed(swarm))
    assert answer.status_code == 200
    assert float(answer.headers[TIME_HEADER]) == swarm.clock()


def test_a_request_that_was_seen_before_is_refused(swarm: Swarm) -> None:
    headers = signed(swarm)
    send(swarm, headers)
    assert_refused(send(swarm, headers), 409, "replay")


def test_nonces_survive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        headers = signed(swarm)
        send(swarm, headers)
        clock = swarm.clock
    clock.advance(200)
    with running(tmp_path, small_config(), clock) as swarm:
        swarm.sweep()
        assert_refused(send(swarm, headers), 409, "replay")


def test_the_same_nonce_of_another_key_or_time_is_another_one(swarm: Swarm) -> None:
    nonce = "ab" * 16
    for key, skew_s in ((WORKER, 0.0), (WORKER, 1.0), (keypair("bob"), 0.0)):
        time = f"{swarm.clock() + skew_s:.3f}"
        digest = digest_bytes(REGISTER)
        target = RequestTarget("run-1", descriptor().coordinator_key, "POST", "/v1/workers", "", digest)
        stamp = RequestStamp(key.public, time, nonce, digest, key.sign(target.message(time, nonce)))
        assert send(swarm, stamp.headers()).status_code == 200
        assert_refused(send(swarm, stamp.headers()), 409, "replay")


def test_a_heartbeat_that_is_shown_again_keeps_nobody_alive(swarm: Swarm) -> None:
    swarm.join("ann")
    body = api.HeartbeatBody(activity="working").model_dump_json().encode()
    headers = signed(swarm, path="/v1/heartbeat", body=body)
    assert send(swarm, headers, path="/v1/heartbeat", body=body).status_code == 200
    swarm.clock.advance(20)
    assert send(swarm, headers, path="/v1/heartbeat", body=body).status_code == 200
    swarm.clock.advance(11)
    swarm.sweep()
    assert swarm.state_of("ann") == "gone"


def test_an_announcement_of_a_relay_that_is_shown_again_does_not_undo_a_newer_one(swarm: Swarm) -> None:
    old, new = (api.RelayBody(url=url).model_dump_json().encode() for url in ("http://old", "http://new"))
    replayed = signed(swarm, path="/v1/relays", body=old)
    assert send(swarm, replayed, path="/v1/relays", body=old).status_code == 200
    swarm.clock.advance(1)
    assert send(swarm, signed(swarm, path="/v1/relays", body=new), path="/v1/relays", body=new).status_code == 200
    answer = send(swarm, replayed, path="/v1/relays", body=old)
    assert [relay["url"] for relay in answer.json()["relays"]] == ["http://new"]


def test_nonces_are_kept_exactly_as_long_as_their_request_could_be_accepted(swarm: Swarm) -> None:
    headers = signed(swarm, skew_s=299)
    assert send(swarm, headers).status_code == 200
    swarm.clock.advance(599)
    swarm.sweep()
    assert_refused(send(swarm, headers), 409, "replay")
    swarm.clock.advance(
        2 + (CLOCK_SLACK_S if swarm.run.presence.is_shared else 0)
    )  # the clocks of several hosts differ
    swarm.sweep()
    assert swarm.all("SELECT * FROM nonces") == []
    assert_refused(send(swarm, headers), 401, "clock")


def test_a_refused_request_spends_no_nonce_and_changes_nothing(swarm: Swarm) -> None:
    body = registration("ann", numerics_class="unknown").model_dump_json().encode()
    assert_refused(send(swarm, signed(swarm, body=body), body=body), 422, "numerics_class")
    assert_untouched(swarm)


@pytest.mark.parametrize("skew_s", [-301, 301, -1e6, 1e6])
def test_an_old_or_early_clock_is_refused(swarm: Swarm, skew_s: float) -> None:
    assert_refused(send(swarm, signed(swarm, skew_s=skew_s)), 401, "clock")
    assert_untouched(swarm)


def test_a_clock_inside_the_window_is_accepted(swarm: Swarm) -> None:
    assert send(swarm, signed(swarm, skew_s=-299)).status_code == 200


def test_a_wrong_local_clock_is_cured_by_one_more_try(swarm: Swarm) -> None:
    client = swarm.client("ann", clock=lambda: 5.0)
    assert client.register(registration("ann")).state == "registered"
    assert client.server_time() == swarm.clock()


def test_a_forged_signature_is_refused(swarm: Swarm) -> None:
    headers = signed(swarm)
    flipped = ("0" if headers["x-shoal-signature"][0] != "0" else "1") + headers["x-shoal-signature"][1:]
    assert_refused(send(swarm, headers | {"x-shoal-signature": flipped}), 401, "bad_signature")
    assert_untouched(swarm)


def test_nobody_speaks_with_anothers_key(swarm: Swarm) -> None:
    headers = signed(swarm, key=keypair("eve")) | {"x-shoal-key": WORKER.public}
    assert_refused(send(swarm, headers), 401, "bad_signature")
    assert_untouched(swarm)


def test_a_key_in_capitals_is_not_another_identity(swarm: Swarm) -> None:
    headers = signed(swarm)
    assert_refused(send(swarm, headers | {"x-shoal-key": WORKER.public.upper()}), 401, "bad_signature")
    assert_untouched(swarm)


def test_a_changed_body_is_refused(swarm: Swarm) -> None:
    changed = REGISTER.replace(b"ann", b"bob")
    assert_refused(send(swarm, signed(swarm), body=changed), 401, "bad_signature")
    assert_untouched(swarm)


@pytest.mark.parametrize("other", [{"run_id": "run-2"}, {"audience": "ab" * 32}, {"method": "PUT"}])
def test_a_signature_for_another_run_server_or_method_is_refused(swarm: Swarm, other: dict[str, str]) -> None:
    assert_refused(send(swarm, signed(swarm, **other)), 401, "bad_signature")  # type: ignore[arg-type]
    assert_untouched(swarm)


def test_a_signature_for_another_path_is_refused_whatever_the_host_header_says(swarm: Swarm) -> None:
    headers = signed(swarm, path="/v1/heartbeat")
    assert_refused(send(swarm, headers), 401, "bad_signature")
    assert_refused(send(swarm, headers | {"host": "coordinator/v1/heartbeat#"}), 401, "bad_signature")
    assert_untouched(swarm)


def test_the_query_is_part_of_the_signature(swarm: Swarm) -> None:
    answer = swarm.http.post("/v1/workers?admin=1", content=REGISTER, headers=signed(swarm))
    assert_refused(answer, 401, "bad_signature")


def test_an_unsigned_request_is_asked_to_sign(swarm: Swarm) -> None:
    answer = send(swarm, {"content-type": "application/json"})
    assert_refused(answer, 401, "bad_signature")
    assert "must be signed" in answer.json()["message"]


def refused_with(code: str, call: Callable[[], object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_an_unknown_numerics_class_is_refused_with_the_known_ones(swarm: Swarm) -> None:
    body = registration("ann", numerics_class="abacus/oak")
    error = refused_with("numerics_class", lambda: swarm.client("ann").register(body))
    assert "torch/float32/cpu" in error.hint


def test_keys_that_never_registered_get_no_work(swarm: Swarm) -> None:
    swarm.publish(0)
    stranger = swarm.client("stranger")
    refused_with("unknown_worker", lambda: swarm.ask(stranger, 0))
    refused_with("unknown_worker", lambda: stranger.heartbeat(api.HeartbeatBody(activity="lurking")))
    refused_with("unknown_worker", lambda: stranger.submit("0" * 32, b"x"))


def test_keys_of_the_owner_cannot_work(swarm: Swarm) -> None:
    refused_with("role_key", lambda: swarm.client("trainer").register(registration("trainer")))


def owner_calls(client: CoordinatorClient, claim: api.Claim) -> dict[str, Callable[[], object]]:
    version = api.VersionBody(version=1, manifest_digest="a" * 64, weights_digest="b" * 64, bytes_total=1)
    evaluation = api.EvaluationBody(version=0, accuracy=1, problems=1, samples=1, mean_tokens=1, seconds=1)
    return {
        "claim": lambda: client.claim(api.ClaimBody(request_id="request-x", wait_s=0)),
        "verdict": lambda: client.verdict(verdict_of(claim)),
        "publish": lambda: client.publish(version),
        "evaluate": lambda: client.report_evaluation(evaluation),
        "batch": lambda: client.batch(0, wait_s=0),
        "file": lambda: client.submission_file(claim.submission_id, claim.digest),
    }


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("ann", set()),
        ("stranger", set()),
        ("trainer", {"publish", "batch", "file"}),
        ("validator", {"claim", "verdict", "file"}),
        ("evaluator", {"evaluate", "file"}),
        ("coordinator", {"file"}),
    ],
)
def test_each_role_does_its_own_work_only(swarm: Swarm, name: str, allowed: set[str]) -> None:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    claim = swarm.claim()
    for operation, call in owner_calls(swarm.client(name), claim).items():
        if operation not in allowed:
            assert refused_with("role", call).status == 403


def test_a_banned_key_is_refused_everywhere_and_for_good(swarm: Swarm) -> None:
    swarm.publish(0)
    (eve,) = swarm.join("eve")
    lease = swarm.lease(eve)
    swarm.work(eve)
    swarm.reject(Reason.REWARD)
    for call in (
        lambda: eve.register(registration("eve")),
        lambda: eve.heartbeat(api.HeartbeatBody(activity="sorry")),
        lambda: swarm.ask(eve, 0),
        lambda: eve.submit(lease.lease_id, b"more"),
    ):
        error = refused_with("banned", call)
        assert "reward" in error.message
    assert swarm.state_of("eve") == "banned"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'{"name": "x"}',
        b'{"\\ud800": 1}',
        b'{"name": "\\ud800", "numerics_class": "", "tokens_per_s": 1}',
        b"[" * SMALL.max_bytes,
        b"\xff\xfe",
    ],
)
def test_malformed_bodies_are_refused_in_the_usual_shape(swarm: Swarm, body: bytes) -> None:
    assert_refused(send(swarm, signed(swarm, body=body), body=body), 422, "malformed")
    assert_untouched(swarm)


def test_a_body_that_is_too_large_is_refused_with_and_without_its_length(swarm: Swarm) -> None:
    large = b" " * (SMALL.max_bytes + 1)
    assert_refused(send(swarm, signed(swarm, body=large), body=large), 413, "too_large")
    chunks = (b" " * (1 << 20) for _ in range(6))
    assert_refused(swarm.http.post("/v1/workers", content=chunks, headers=signed(swarm)), 413, "too_large")
    assert_refused(send(swarm, {}, body=large), 401, "bad_signature")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("PATCH", "/v1/workers", 405, "method"),
        ("GET", "/v1/batches/99999999999999999999999", 422, "malformed"),
        ("GET", "/v1/batches/-1", 422, "malformed"),
        ("GET", "/v1/batches/x", 422, "malformed"),
        ("GET", "/v1/batches/0?wait_s=nan", 422, "malformed"),
        ("GET", "/v1/batches/0?wait_s=1e9", 422, "malformed"),
        ("GET", "/v1/batches/0?wait_s=0&admin=1", 422, "malformed"),
    ],
)
def test_strange_addresses_are_refused_in_the_usual_shape(
    swarm: Swarm, method: str, path: str, status: int, code: str
) -> None:
    headers = swarm.client("trainer")._headers(method, path, b"", None)
    assert_refused(swarm.http.request(method, path, headers=headers), status, code)


@pytest.mark.parametrize("name", ["..%2f..%2fstore.db", "x" * 5000, "%00", "a.b", "ünïcode"])
def test_files_are_named_by_the_server_only(swarm: Swarm, name: str) -> None:
    target = f"/v1/submissions/{name}/file"
    answer = swarm.http.get(target, headers=swarm.client("trainer")._headers("GET", target, b"", None))
    assert answer.status_code in (401, 404)
    assert answer.json()["code"] in ("bad_signature", "unknown_submission", "not_found")


def test_the_api_describes_itself(swarm: Swarm) -> None:
    schema = swarm.http.get("/openapi.json").json()
    assert {"/v1/workers", "/v1/leases", "/v1/claims", "/v1/verdicts", "/v1/batches/{step}"} <= set(schema["paths"])
    assert swarm.http.get("/docs").status_code == 200


def test_a_bug_is_reported_as_ours(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.views.status", lambda connection, run: 1 // 0)
    assert_refused(swarm.http.get("/v1/status"), 500, "internal")


def test_a_key_that_asks_too_often_learns_when_to_come_back_and_others_are_not_touched(tmp_path: Path) -> None:
    with running(tmp_path, small_config(coordinator={"requests_per_s_key": 1.0})) as swarm:
        answers = [send(swarm, signed(swarm)) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert_refused(answers[-1], 429, "rate_limited")
        assert answers[-1].headers["retry-after"] == "1"
        assert len(swarm.all("SELECT * FROM nonces")) == 3
        swarm.join("bob")
        for _ in range(5):
            assert swarm.client("validator").claim(api.ClaimBody(request_id=swarm.new_id(), wait_s=0)).claim is None
        swarm.clock.advance(1)
        assert send(swarm, signed(swarm)).status_code == 200


def test_a_key_is_not_too_fast_by_working(tmp_path: Path) -> None:
    config = small_config(run={"steps": 50}, coordinator={"requests_per_s_key": 1.0})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        waits: list[float] = []
        swarm.join("ann")
        ann = swarm.client("ann", sleep=waits.append, deadline_s=60.0)
        for _ in range(6):  # a lease and an upload each, without a second between them
            swarm.produce(ann, useful=0)
        assert waits == []


def test_a_key_whose_files_are_rejected_is_limited_as_before(tmp_path: Path) -> None:
    config = small_config(run={"steps": 50}, coordinator={"requests_per_s_key": 1.0})
    with running(tmp_path, config) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.work(ann)
        swarm.reject(Reason.REWARD_TOLERANT)
        answers = [send(swarm, signed(swarm, key=keypair("ann"))) for _ in range(4)]
        assert [answer.status_code for answer in answers][-1] == 429


def test_forged_requests_do_not_use_up_the_patience_with_a_key(tmp_path: Path) -> None:
    with running(tmp_path, small_config(coordinator={"requests_per_s_key": 1.0})) as swarm:
        forged = signed(swarm, key=keypair("eve")) | {"x-shoal-key": WORKER.public}
        assert {send(swarm, forged).status_code for _ in range(10)} == {401}
        assert send(swarm, signed(swarm)).status_code == 200


def test_an_address_that_asks_too_often_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    with running(tmp_path, small_config(coordinator={"requests_per_s_address": 1.0})) as swarm:
        answers = [swarm.http.get("/v1/descriptor") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        refused = swarm.http.get("/v1/status")
        assert_refused(refused, 429, "rate_limited")
        assert (refused.headers["retry-after"], TIME_HEADER in refused.headers) == ("1", True)


def test_the_client_waits_as_long_as_it_is_asked_to(tmp_path: Path) -> None:
    with running(tmp_path, small_config(coordinator={"requests_per_s_key": 0.25})) as swarm:
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            swarm.clock.advance(seconds)

        client = swarm.client("ann", sleep=sleep, deadline_s=60.0)
        for _ in range(3):
            client.register(registration("ann"))
        assert len(slept) == 2
        assert all(4 <= seconds <= 5 for seconds in slept)


def test_another_protocol_version_is_refused_with_a_hint(swarm: Swarm) -> None:
    answer = send(swarm, signed(swarm) | {PROTOCOL_HEADER: "2"})
    assert_refused(answer, 426, "protocol_version")
    assert "Install" in answer.json()["hint"]
    assert_untouched(swarm)
