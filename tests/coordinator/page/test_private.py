"""The owner's browser: the secret of the link becomes a cookie, and only with it anything private is answered."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.coordinator.http.auth import OwnerCookie
from shoal.coordinator.http.table import ROUTES
from shoal.coordinator.page.rollouts import GroupText
from shoal.coordinator.page.session import cookie_value, link_secret
from shoal.coordinator.page.timeline import LeaseSpan, backups, late_spans
from shoal.coordinator.states import LeaseState
from shoal.metrics import EventLog
from shoal.protocol.page_views import AuditTrace, OwnerCompletion, OwnerToken, OwnerTurn, TraceRow
from support.samples import RUN_SECRET, keypair
from support.swarm import Swarm

SECRET = link_secret(RUN_SECRET, "run-1", 0)
PRIVATE = [route.path for route in ROUTES if isinstance(route.access, OwnerCookie)]
TEXT = "<img src=x onerror=alert(1)> rollout text"
OBSERVATION = "<script>alert('environment')</script> a wall"


class FakeReader:
    def read(self, submission_id: str, number: int) -> GroupText:
        """A plain completion, and an episode of two turns; both try to be markup."""
        plain = [OwnerTurn(speaker="policy", text=TEXT, tokens=[])]
        tokens = [OwnerToken(text=f"<b>{number}</b>", logprob=-1.0, entropy=0.5) for number in range(3)]
        episode = [
            OwnerTurn(speaker="prompt", text="<u>maze</u>", tokens=[]),
            OwnerTurn(speaker="policy", text="", tokens=tokens[:2]),
            OwnerTurn(speaker="environment", text=OBSERVATION, tokens=[]),
            OwnerTurn(speaker="policy", text="", tokens=tokens[2:]),
        ]
        completions = [
            OwnerCompletion(
                sample=sample, reward=9.0, task_reward=9.0, reward_from="worker", why="", length=3, target_length=0,
                finish_reason="stop", turns=turns,
            )
            for sample, turns in enumerate((plain, episode))
        ]  # fmt: skip
        return GroupText("task-0", completions, "")


def log_in(swarm: Swarm, secret: str = SECRET) -> int:
    answer = swarm.http.post("/v1/owner/session", json={"secret": secret})
    return answer.status_code


def addresses() -> Sequence[str]:
    names = {"{step}": "0", "{slot}": "0", "{number}": "0", "{key}": keypair("ann").public}
    found = []
    for path in PRIVATE:
        for name, value in names.items():
            path = path.replace(name, value)
        found.append(path)
    return found


@pytest.fixture
def worked(swarm: Swarm) -> Swarm:
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    swarm.app.service.rollouts = FakeReader()
    return swarm


@pytest.mark.parametrize("path", addresses())
def test_without_the_cookie_nothing_private_is_answered(worked: Swarm, path: str) -> None:
    wrong = cookie_value(RUN_SECRET, "run-1", 1)
    name = worked.app.service.session.cookie_name
    for cookie in (
        "",
        f"{name}=",
        f"{name}={wrong}",
        f"{name}={SECRET}",
        f"{name}=ü",
        "a=b; ;;=",
        f"{name}={'0' * 64}",
    ):
        answer = worked.http.get(path, headers={b"cookie": cookie.encode()})
        assert (answer.status_code, answer.json()["code"]) == (403, "owner"), cookie
        assert "rollout text" not in answer.text


def test_a_hostile_cookie_costs_no_more_work_than_its_length(swarm: Swarm) -> None:
    """Escaped quotes in the largest head that is read kept the server busy for half a second, unsigned."""
    name, calls = swarm.app.service.session.cookie_name, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for cookie in (f'{name}="' + '\\"' * 8000 + '"', f'{name}="' + "\\101" * 4000 + '"', "a=b;" * 200, "=" * 16_000):
        sys.setprofile(count)
        is_owner = swarm.app.service.session.is_owner(cookie)
        sys.setprofile(None)
        assert not is_owner
    assert calls < 2000


@pytest.mark.parametrize("path", addresses())
def test_with_the_cookie_the_owner_sees_everything(worked: Swarm, path: str) -> None:
    assert log_in(worked) == 200
    answer = worked.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(worked: Swarm) -> None:
    answer = worked.http.post("/v1/owner/session", json={"secret": SECRET})
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert SECRET not in cookie
    assert "Secure" not in cookie  # plain HTTP here
    assert worked.http.get("/v1/session").json()["is_owner"] is True


@pytest.mark.parametrize("secret", ["0" * 64, link_secret(RUN_SECRET, "run-1", 1), link_secret(RUN_SECRET, "run-2", 0)])
def test_another_secret_opens_nothing(worked: Swarm, secret: str) -> None:
    assert log_in(worked, secret) == 403
    assert worked.http.get("/v1/session").json()["is_owner"] is False


def test_a_malformed_secret_is_refused(worked: Swarm) -> None:
    for body in ({"secret": "short"}, {"secret": "Z" * 64}, {}, {"secret": SECRET, "more": 1}):
        assert worked.http.post("/v1/owner/session", json=body).status_code == 422


def test_rotating_the_link_closes_every_open_page(worked: Swarm) -> None:
    assert log_in(worked) == 200
    renewed = worked.client("run").rotate_link().secret
    assert renewed == link_secret(RUN_SECRET, "run-1", 1)
    assert worked.http.get("/v1/owner/timeline").status_code == 403
    assert log_in(worked) == 403
    assert log_in(worked, renewed) == 200


def test_only_the_owner_rotates_the_link(worked: Swarm) -> None:
    assert worked.http.post("/v1/owner/link").status_code == 401


def test_a_group_shows_the_rewards_of_the_validator(worked: Swarm) -> None:
    log_in(worked)
    view = worked.http.get("/v1/owner/groups/0/0/0").json()
    one, _ = view["completions"]
    assert (one["reward"], one["reward_from"], one["turns"][0]["text"]) == (1.0, "validator", TEXT)
    assert worked.http.get("/v1/owner/groups/7/0/0").status_code == 404


def test_without_a_reader_there_are_no_texts(worked: Swarm) -> None:
    worked.app.service.rollouts = None
    log_in(worked)
    assert worked.http.get("/v1/owner/groups/0/0/0").json()["code"] == "no_rollouts"


def span(worker: str, issued_at: float, took_s: float | None, *, slot: int = 0, **changes: object) -> LeaseSpan:
    received = None if took_s is None else issued_at + took_s
    state = LeaseState.LEASED if took_s is None else LeaseState.SUBMITTED
    fields = {"state": state, "accepted": None} | changes
    return LeaseSpan(worker, 0, slot, 0, issued_at=issued_at, expires_at=issued_at + 60, received_at=received, **fields)  # type: ignore[arg-type]


def test_a_lease_is_late_that_takes_much_longer_than_the_others() -> None:
    usual = [span(f"w{number}", 0.0, 10.0, slot=number) for number in range(5)]
    slow, dropped, fresh = (
        span("slow", 0.0, 16.0, slot=7),
        span("gone", 0.0, None, slot=8, state=LeaseState.ABANDONED),
        span("new", 95.0, None, slot=9),
    )
    assert late_spans([*usual, slow, dropped, fresh], now=100.0) == {slow, dropped}
    assert late_spans([fresh], now=100.0) == set()


def test_a_second_lease_beside_the_first_is_a_backup_and_one_after_it_is_not() -> None:
    first, beside, after = span("a", 0.0, 30.0), span("b", 20.0, 15.0), span("c", 50.0, None)
    assert backups([first, beside, after]) == {beside}


def test_a_trace_of_an_audit_is_kept_beside_its_file_and_only_from_a_validator(worked: Swarm, tmp_path: Path) -> None:
    row = worked.one("SELECT submission_id FROM submissions")
    body = AuditTrace(
        submission_id=str(row["submission_id"]), rows=[TraceRow(group=0, sample=0, margins=[0.5], entropies=[])]
    )
    worked.client("validator").send_trace(body, deadline_s=5.0)
    assert worked.run.trace_of(str(row["submission_id"])).read_bytes() == body.model_dump_json().encode()
    assert worked.http.post("/v1/traces", json=body.model_dump()).status_code == 401


def test_a_full_disk_costs_the_trace_and_the_events_and_no_work(worked: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    events = EventLog(Path("/dev/full"))
    worked.alter(metrics=events)
    monkeypatch.setattr("shoal.coordinator.http.handlers.roles.write_atomic", full)
    row = worked.one("SELECT submission_id FROM submissions")
    worked.client("validator").send_trace(AuditTrace(submission_id=str(row["submission_id"]), rows=[]), deadline_s=5.0)
    assert events.counters["trace_lost"] == 1
    worked.sweep()
    worked.publish(1)
    worked.produce(worked.client("ann"))
    assert worked.client("x").status().newest_version == 1
    assert events.counters["events_lost"] >= 3
