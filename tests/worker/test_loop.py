"""The contributor's loop against a scripted coordinator: lease → weights → generate → submit, and every way it ends."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shoal.errors import IntegrityError, RefusedError, UnavailableError
from shoal.metrics import EventLog
from shoal.policy.engine import Completion, Engine, GenerationRequest, Scored, ScoreRequest, Stream
from shoal.protocol import api
from shoal.protocol.rollouts import read_rollouts
from shoal.worker import Worker
from support.fake_coordinator import FakeCoordinator, Refuse, request_ids
from support.tiny_run import WORKER, DiskWeights, Reports, TinyRun, make_lease


class RecordingEngine:
    """The real engine, with a diary."""

    def __init__(self, engine: Engine) -> None:
        self.numerics_class, self.vocab_size = engine.numerics_class, engine.vocab_size
        self._engine = engine
        self.diary: list[str] = []
        self.on_generate: Callable[[], None] = lambda: None

    def load(self, directory: Path) -> None:
        self.diary.append(f"load {directory.name}")
        self._engine.load(directory)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        self.diary.append(f"generate {len(requests)}")
        self.on_generate()
        return self._engine.generate(requests, temperature=temperature, on_progress=on_progress)

    def open(self, *, temperature: float, max_tokens: int, rows: int | None = None) -> Stream:
        return self._engine.open(temperature=temperature, max_tokens=max_tokens, rows=rows)

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        return self._engine.score(requests, temperature=temperature)


class Contributor:
    """A worker, the coordinator it talks to and everything it says."""

    def __init__(self, tiny_run: TinyRun, *published: int) -> None:
        self.coordinator = FakeCoordinator()
        self.weights: DiskWeights = tiny_run.weights(*published)
        self.engine = RecordingEngine(tiny_run.new_engine())
        self.reports = Reports()
        self.metrics = EventLog()
        self.joined = tiny_run.joined(self.weights)
        self.worker = Worker(
            self.joined,
            self.coordinator.client(deadline_s=3600.0, on_wait=self.reports.append),
            self.engine,
            name="worker",
            metrics=self.metrics,
            report=self.reports,
        )


@pytest.fixture
def contributor(tiny_run: TinyRun) -> Contributor:
    return Contributor(tiny_run, 0)


JOINED = ["load v0", "generate 1", "generate 8"]
"""Weights first, then one request to warm up and a slot to measure the speed."""


def test_it_joins_works_and_ends_when_the_run_is_finished(contributor: Contributor, tiny_run: TinyRun) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.engine.diary == [*JOINED, "generate 8", "generate 8"]
    assert list(contributor.coordinator.submitted) == ["lease-3-0", "lease-3-1"]
    assert contributor.coordinator.registered[0].numerics_class == "torch/float32/cpu"
    assert contributor.coordinator.registered[0].tokens_per_s > 0
    header, rollouts = read_rollouts(contributor.coordinator.submitted["lease-3-0"], tiny_run.workload.limits)
    assert (header.lease_id, header.worker_key, header.policy_version) == ("lease-3-0", WORKER.public, 0)
    assert [(rollout.group, rollout.sample) for rollout in rollouts] == [(g, s) for g in range(2) for s in range(4)]
    assert contributor.reports.some("the run is finished")
    assert contributor.coordinator.returned == []


def test_each_lease_is_asked_for_under_a_new_id_and_with_the_versions_it_holds(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert len(request_ids(contributor.coordinator.lease_bodies)) == 2
    assert [body.held_versions for body in contributor.coordinator.lease_bodies] == [[0], [0]]


def test_weights_are_swapped_between_leases_and_only_when_the_lease_names_others(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0)
    versions = (0, 0, 1, 0)
    contributor.coordinator.grant(*(make_lease(slot, version=version) for slot, version in enumerate(versions)))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.engine.diary == [
        *JOINED,
        *("generate 8", "generate 8"),
        *("load v1", "generate 8"),
        *("load v0", "generate 8"),
    ]
    assert contributor.worker.totals.swap_s > 0
    assert contributor.metrics.counters["weights_swapped"] == 3


def test_the_line_of_a_submission_says_where_how_fast_and_what_it_earned(contributor: Contributor) -> None:
    account = {"submissions_accepted": 7, "credit_held": 12_000, "credit_released": 345}
    contributor.coordinator.account = contributor.coordinator.account.model_copy(update=account)
    contributor.coordinator.grant(make_lease(4))
    contributor.coordinator.finish()
    contributor.worker.run()
    line = next(line for line in contributor.reports if line.startswith("step 3 slot 4: 8 samples, "))
    assert "tokens at" in line
    assert line.endswith("submitted; 7 accepted so far, credit 12,000 held, 345 released")


@pytest.mark.parametrize(
    ("reason", "activity"),
    [
        ("no_work", "waiting for work"),
        ("waiting_for_trainer", "waiting for the trainer"),
        ("paused", "the run is paused"),
        ("need_weights", "fetching version 1"),
    ],
)
def test_without_a_lease_it_says_what_it_waits_for_and_asks_again(
    contributor: Contributor, reason: str, activity: str
) -> None:
    contributor.coordinator.wait(reason, times=2)
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.metrics.counters["waited"] == 2
    assert contributor.worker.console.activity == activity
    assert contributor.engine.diary == JOINED


def test_an_interrupt_gives_the_slot_back_and_uploads_what_is_done(contributor: Contributor) -> None:
    generations = iter(range(10))

    def interrupt_the_second_slot() -> None:
        if next(generations) == 3:
            raise KeyboardInterrupt

    contributor.engine.on_generate = interrupt_the_second_slot
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    with pytest.raises(KeyboardInterrupt):
        contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-0"]
    assert contributor.coordinator.returned == ["lease-3-1"]
    assert contributor.reports.some("gave step 3 slot 1 back")
    assert contributor.reports.some("1 submission with")
    assert contributor.weights.closed


def test_a_slot_that_cannot_be_given_back_is_reported_and_expires(contributor: Contributor) -> None:
    def interrupt() -> None:
        contributor.coordinator.refusals["/v1/leases/"] = Refuse("unknown_lease", status=404)
        raise KeyboardInterrupt

    contributor.coordinator.grant(make_lease(0))
    calls = iter((lambda: None, lambda: None, interrupt))
    contributor.engine.on_generate = lambda: next(calls)()
    with pytest.raises(KeyboardInterrupt):
        contributor.worker.run()
    assert contributor.reports.some("could not give the slot back, it will expire")


def test_a_banned_key_ends_with_the_refusal_and_gives_nothing_back(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1), make_lease(2))
    contributor.coordinator.refusals["/v1/submissions/"] = Refuse("banned", "This key is banned: reward.")
    with pytest.raises(RefusedError, match=r"This key is banned: reward\. Do otherwise\.") as caught:
        contributor.worker.run()
    assert caught.value.code == "banned"
    assert contributor.coordinator.returned == []
    assert not contributor.reports.some("banned")


def test_a_refused_lease_ends_with_the_refusal(contributor: Contributor) -> None:
    contributor.coordinator.leases = [Refuse("banned", "This key is banned: sampling.")]
    with pytest.raises(RefusedError, match="sampling"):
        contributor.worker.run()


def test_a_lease_that_ran_out_costs_one_submission_and_nothing_else(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.coordinator.refusals["/v1/submissions/lease-3-0"] = Refuse("lease_expired", "The lease ended.", 409)
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-1"]
    assert contributor.worker.totals.submissions == 1
    assert contributor.reports.some("step 3 slot 0 came too late: The lease ended.")


def test_generation_goes_on_while_the_last_slot_is_uploaded(contributor: Contributor) -> None:
    second_slot_begun = threading.Event()
    calls = iter((lambda: None, lambda: None, lambda: None, second_slot_begun.set))
    contributor.engine.on_generate = lambda: next(calls)()
    submit = contributor.worker.client.submit

    def submit_slowly(lease_id: str, data: bytes, **options: object) -> api.SubmissionAnswer:
        assert second_slot_begun.wait(30), "the first upload holds the second slot up"
        return submit(lease_id, data)

    contributor.worker.client.submit = submit_slowly  # type: ignore[method-assign]
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-0", "lease-3-1"]


def test_heartbeats_carry_totals_and_bring_relays(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.metrics.count("bytes_received", 1234)
    contributor.worker.run()
    contributor.worker.heartbeat.beat()
    first, last = contributor.coordinator.heartbeats[0], contributor.coordinator.heartbeats[-1]
    assert first.tokens_generated == 0
    assert last.tokens_generated == contributor.worker.totals.tokens > 0
    assert last.bytes_received == 1234
    assert contributor.joined.relays()[0] == "http://relay-of-the-coordinator"


def test_a_heartbeat_that_is_refused_or_lost_is_left_to_the_loop(contributor: Contributor) -> None:
    beats = iter((RefusedError("banned", "Banned."), UnavailableError("Nobody there."), IntegrityError("Not a view.")))
    has_ended = threading.Event()

    def beat(body: api.HeartbeatBody) -> api.HeartbeatAnswer:
        error = next(beats, None)
        if error is None:
            has_ended.set()
            contributor.worker.heartbeat.stop()
        raise error or UnavailableError("Too late.")

    heartbeat = contributor.worker.heartbeat
    heartbeat.start()
    contributor.worker.client.heartbeat = beat  # type: ignore[method-assign]
    assert has_ended.wait(30)
    assert contributor.reports == ["Not a view."]


def test_without_any_relay_it_stops_waiting_and_names_what_is_missing(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.loop.FIRST_WEIGHTS_S", 0.01)
    contributor = Contributor(tiny_run)
    with pytest.raises(UnavailableError, match="No relay delivered a policy version"):
        contributor.worker.run()
    assert contributor.coordinator.registered == []


def test_stop_ends_the_loop_after_the_slot_at_hand(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    calls = iter((lambda: None, lambda: None, contributor.worker.stop))
    contributor.engine.on_generate = lambda: next(calls)()
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-0"]


OUTAGE = "Waiting for the coordinator at http://coordinator, for up to 60 minutes: connection refused."


def test_a_coordinator_that_is_away_is_waited_for_and_asked_the_same_again(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.coordinator.away["/v1/leases"] = 30
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-0"]
    asked = [body for path, body in contributor.coordinator.tries if path == "/v1/leases"]
    assert asked[:31] == [asked[0]] * 31
    assert contributor.reports.count(OUTAGE) == 1


def test_an_outage_that_heartbeats_meet_too_is_reported_once(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    outage = {"/v1/leases": 30, "/v1/heartbeat": 1_000_000}
    calls = iter((lambda: None, lambda: None, lambda: contributor.coordinator.away.update(outage)))
    contributor.engine.on_generate = lambda: next(calls)()
    contributor.worker.run()
    assert [report for report in contributor.reports if "refused" in report] == [OUTAGE]


def test_a_coordinator_that_stays_away_is_waited_for_no_longer(contributor: Contributor) -> None:
    contributor.coordinator.away["/v1/leases"] = 1_000_000
    with pytest.raises(UnavailableError, match="did not answer for 3600 s"):
        contributor.worker.run()
    assert contributor.weights.closed


def test_a_coordinator_that_forgot_the_worker_gets_its_registration_again(contributor: Contributor) -> None:
    """As after a restored backup."""
    contributor.coordinator.leases.append(Refuse("unknown_worker", "This key is not registered."))
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-0"]
    assert len(contributor.coordinator.registered) >= 2
    assert contributor.reports.some("registering again")


def test_an_upload_is_sent_again_while_its_lease_lasts(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.coordinator.away["/v1/submissions"] = 30
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-0"]
    assert contributor.worker.totals.submissions == 1
    assert sum("Waiting for the coordinator" in report for report in contributor.reports) == 1


def test_an_upload_that_never_arrives_costs_one_submission_and_nothing_else(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0, expires_at=0.0), make_lease(1))
    contributor.coordinator.finish()
    contributor.coordinator.away["/v1/submissions/lease-3-0"] = 1000
    contributor.worker.run()
    assert list(contributor.coordinator.submitted) == ["lease-3-1"]
    assert contributor.reports.some("step 3 slot 0 could not be submitted")


def test_the_machine_is_measured_and_reported(contributor: Contributor) -> None:
    contributor.coordinator.finish()
    contributor.worker.run()
    reported = contributor.coordinator.registered[0]
    assert reported.tokens_per_s > 0
    assert reported.memory_bytes > 0
    assert reported.link_bytes_per_s > 0
    line = next(line for line in contributor.reports if line.startswith("this machine: "))
    assert "tokens/s" in line
    assert "GB of memory" in line
    assert "MB/s from the relays" in line
