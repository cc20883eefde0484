"""The contributor's loop against a scripted coordinator: leases in, samples through the engine, files out, and how it ends."""

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType

import pytest
from pydantic import BaseModel

from shoal.errors import ConfigError, IntegrityError, RefusedError, UnavailableError
from shoal.metrics import EventLog
from shoal.policy.engine import Completion, Engine, GenerationRequest, Scored, ScoreRequest, Stream
from shoal.protocol import api
from shoal.protocol.rollouts import Rollout, read_rollouts
from shoal.worker import Worker
from shoal.worker.slots import Slot
from support.fake_coordinator import FakeCoordinator, Refuse, request_ids
from support.tiny_run import WORKER, DiskWeights, Reports, TinyRun, make_lease


def nothing() -> None:
    pass


class RecordingStream:
    """The real stream; says what enters, and never holds more than its rows."""

    def __init__(self, stream: Stream, owner: "RecordingEngine") -> None:
        self._stream, self._owner, self.rows = stream, owner, stream.rows

    @property
    def unfinished(self) -> int:
        return self._stream.unfinished

    @property
    def generated(self) -> int:
        return self._stream.generated

    def submit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        self._owner.diary.append(f"enter {len(requests)}")
        numbers = self._stream.submit(requests)
        self._owner.most_unfinished = max(self._owner.most_unfinished, self.unfinished)
        return numbers

    def step(self) -> list[tuple[int, Completion]]:
        self._owner.steps += 1
        self._owner.on_step()
        return self._stream.step()

    def cancel(self, numbers: Collection[int]) -> None:
        self._stream.cancel(numbers)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "RecordingStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RecordingEngine:
    """The real engine, with a diary."""

    def __init__(self, engine: Engine) -> None:
        self.numerics_class, self.vocab_size = engine.numerics_class, engine.vocab_size
        self._engine = engine
        self.diary: list[str] = []
        self.steps = 0
        self.most_unfinished = 0
        self.on_step: Callable[[], None] = nothing
        self.on_load: Callable[[str], None] = lambda name: None

    def load(self, directory: Path) -> None:
        self.diary.append(f"load {directory.name}")
        self.on_load(directory.name)
        self._engine.load(directory)

    def open(self, *, temperature: float, max_tokens: int, rows: int | None = None) -> Stream:
        return RecordingStream(self._engine.open(temperature=temperature, max_tokens=max_tokens, rows=rows), self)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        return self._engine.generate(requests, temperature=temperature, on_progress=on_progress)

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        return self._engine.score(requests, temperature=temperature)


class Contributor:
    """A worker, the coordinator it talks to and everything it says."""

    def __init__(
        self, tiny_run: TinyRun, *published: int, kind: type[Worker] = Worker, outbox: Path | None = None
    ) -> None:
        self.coordinator = FakeCoordinator()
        self.weights: DiskWeights = tiny_run.weights(*published)
        self.engine = RecordingEngine(tiny_run.new_engine())
        self.reports = Reports()
        self.metrics = EventLog()
        self.joined = tiny_run.joined(self.weights)
        self.worker = kind(
            self.joined,
            self.coordinator.client(deadline_s=3600.0, on_wait=self.reports.append),
            self.engine,
            name="worker",
            outbox=outbox,
            metrics=self.metrics,
            report=self.reports,
        )

    @property
    def submitted(self) -> list[str]:
        return sorted(self.coordinator.submitted)


@pytest.fixture(autouse=True)
def eight_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a slot has samples, so that slots follow each other."""
    monkeypatch.setattr("shoal.worker.machine.PROBED_ROWS", (8,))


@pytest.fixture
def contributor(tiny_run: TinyRun) -> Contributor:
    return Contributor(tiny_run, 0)


def test_it_joins_works_and_ends_when_the_run_is_finished(contributor: Contributor, tiny_run: TinyRun) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0", "lease-3-1"]
    assert contributor.coordinator.registered[0].numerics_class == "torch/float32/cpu"
    assert contributor.coordinator.registered[0].tokens_per_s > 0
    header, rollouts = read_rollouts(contributor.coordinator.submitted["lease-3-0"], tiny_run.workload.limits)
    assert (header.lease_id, header.worker_key, header.policy_version) == ("lease-3-0", WORKER.public, 0)
    assert [(rollout.group, rollout.sample) for rollout in rollouts] == [(g, s) for g in range(2) for s in range(4)]
    assert contributor.reports.some("the run is finished")
    assert contributor.coordinator.returned == []


def test_samples_of_the_next_slot_enter_as_soon_as_rows_are_free(contributor: Contributor) -> None:
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(6)))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert len(contributor.submitted) == 6
    entered = [int(entry.split()[1]) for entry in contributor.engine.diary if entry.startswith("enter")]
    assert sum(entered) == 48
    assert len([count for count in entered if count < 8]) > 6, "slots overlap: their samples do not enter all at once"


def test_the_engine_never_holds_more_than_its_rows_whatever_is_leased(contributor: Contributor) -> None:
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(12)))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert len(contributor.submitted) == 12
    assert contributor.engine.most_unfinished == 8


def test_leases_are_taken_when_they_are_needed_and_not_before(contributor: Contributor) -> None:
    """A lease that waits ages, and its deadline runs."""
    held: list[int] = []

    def count() -> None:
        held.append(contributor.worker.generation.waiting)

    contributor.engine.on_step = count
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(12)))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert max(held) <= 24, "one slot that is entering, and what two times the rows need at most"


def test_each_lease_is_asked_for_under_a_new_id_and_with_the_versions_it_holds(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert len(request_ids(contributor.coordinator.lease_bodies)) == 2
    assert [body.held_versions for body in contributor.coordinator.lease_bodies] == [[0], [0]]


def tokens_of(contributor: Contributor, tiny_run: TinyRun) -> dict[str, list[list[int]]]:
    limits = tiny_run.workload.limits
    return {
        lease: [rollout.output_tokens for rollout in read_rollouts(data, limits)[1]]
        for lease, data in contributor.coordinator.submitted.items()
    }


def expected_tokens(tiny_run: TinyRun, lease: api.Lease) -> list[list[int]]:
    items = tiny_run.workload.items(bytes.fromhex(lease.slot_seed))
    requests = [GenerationRequest(item.prompt_tokens, item.seed, 40) for item in items]
    return [one.tokens for one in tiny_run.engine(lease.policy_version).generate(requests, temperature=1.0)]


def test_every_completion_comes_from_the_version_of_its_lease(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0)
    leases = [make_lease(slot, version=version) for slot, version in enumerate((0, 0, 1, 0, 1, 1))]
    contributor.coordinator.grant(*leases)
    contributor.coordinator.finish()
    contributor.worker.run()
    made = tokens_of(contributor, tiny_run)
    assert sorted(made) == [lease.lease_id for lease in leases]
    for lease in leases:
        assert made[lease.lease_id] == expected_tokens(tiny_run, lease), lease.policy_version
    assert contributor.worker.totals.swap_s > 0


def test_once_new_weights_are_ready_no_lease_is_taken_until_they_are_loaded(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0)
    asked_while_draining: list[int] = []

    def publish() -> None:
        if contributor.engine.steps == 3:
            contributor.weights.published.append(1)
            contributor.worker.weights.wait_newer(0, 30.0)
            asked_while_draining.append(len(contributor.coordinator.lease_bodies))

    def note(name: str) -> None:
        if name == "v1":
            asked_while_draining.append(len(contributor.coordinator.lease_bodies))

    contributor.engine.on_step, contributor.engine.on_load = publish, note
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.wait("no_work", times=1)
    contributor.coordinator.grant(make_lease(2, version=1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert len(contributor.submitted) == 3
    assert contributor.engine.diary.count("load v1") == 1
    before, after = asked_while_draining[:2]
    # One more if it was on its way, one when the last row had ended.
    assert after - before <= 2


def test_a_busy_worker_names_no_version_that_would_cost_two_swaps(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0, 1)
    contributor.weights.published = [0, 1]
    contributor.coordinator.grant(make_lease(0, version=1), make_lease(1, version=1))
    contributor.coordinator.wait("no_work")
    contributor.coordinator.finish()
    contributor.worker.weights.path(0, contributor.weights.head().versions[0].manifest_digest, deadline_s=1.0)
    contributor.worker.run()
    named = [body.held_versions for body in contributor.coordinator.lease_bodies]
    assert named[0] == [1]
    assert named[-1] in ([1], [0, 1]), "an idle one takes what there is"


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
    assert contributor.metrics.counters["waited"] >= 2
    assert contributor.worker.console.activity == activity
    assert contributor.engine.diary == ["load v0"]


def at_step(contributor: Contributor, step: int, act: Callable[[], None]) -> None:
    """Does something when the engine takes this step."""

    def look() -> None:
        if contributor.engine.steps == step:
            act()

    contributor.engine.on_step = look


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_gives_unfinished_slots_back_and_uploads_what_is_done(contributor: Contributor) -> None:
    """The upload of the first slot is still on its way when the second is interrupted."""
    submit = contributor.worker.client.submit

    def submit_late(lease_id: str, data: bytes, **options: object) -> api.SubmissionAnswer:
        assert contributor.reports.wait_for("leaving")
        return submit(lease_id, data)

    def interrupt_the_second() -> None:
        if contributor.worker._deliveries.pending:
            raise KeyboardInterrupt

    contributor.worker.client.submit = submit_late  # type: ignore[method-assign]
    contributor.engine.on_step = interrupt_the_second
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.wait("no_work", times=1000)
    with pytest.raises(KeyboardInterrupt):
        contributor.worker.run()
    assert contributor.submitted == ["lease-3-0"]
    assert contributor.coordinator.returned == ["lease-3-1"]
    assert contributor.reports.some("leaving: step 3 slot 1 goes to another worker, the last upload is being finished")
    assert contributor.reports.some("gave step 3 slot 1 back")
    assert contributor.reports.some("1 submission with")
    assert contributor.weights.closed


def test_an_interrupt_during_a_swap_gives_back_what_had_not_begun(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0)
    contributor.engine.on_load = lambda name: interrupt() if name == "v1" else None
    contributor.coordinator.grant(make_lease(0), make_lease(1, version=1))
    contributor.coordinator.wait("no_work", times=1000)
    with pytest.raises(KeyboardInterrupt):
        contributor.worker.run()
    assert contributor.submitted == ["lease-3-0"]
    assert contributor.coordinator.returned == ["lease-3-1"]


def test_a_slot_that_cannot_be_given_back_is_reported_and_expires(contributor: Contributor) -> None:
    def refuse_and_interrupt() -> None:
        contributor.coordinator.refusals["/v1/leases/"] = Refuse("unknown_lease", status=404)
        raise KeyboardInterrupt

    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.wait("no_work", times=1000)
    at_step(contributor, 1, refuse_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        contributor.worker.run()
    assert contributor.reports.some("could not give step 3 slot 0 back, it will expire")


def test_a_banned_key_ends_with_the_refusal_and_gives_nothing_back(contributor: Contributor) -> None:
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(20)))
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


def test_a_file_that_comes_too_late_costs_one_submission_and_nothing_else(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.coordinator.refusals["/v1/submissions/lease-3-0"] = Refuse("lease_expired", "The lease ended.", 409)
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-1"]
    assert contributor.worker.totals.submissions == 1
    assert contributor.reports.some("step 3 slot 0 came too late: The lease ended.")


def test_a_lease_that_ends_while_its_samples_run_frees_their_rows(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0, expires_at=1_000_010.0), make_lease(1))
    contributor.coordinator.finish()

    def pass_time() -> None:
        contributor.coordinator.now += 20.0

    at_step(contributor, 4, pass_time)
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-1"]
    assert contributor.reports.some("step 3 slot 0 took longer than its lease lasts; 0 of 8 samples were done")
    assert contributor.coordinator.returned == []


def test_a_slot_that_cannot_end_in_time_is_given_back_before_it_begins(contributor: Contributor) -> None:
    worker = contributor.worker
    contributor.coordinator.grant(make_lease(0), make_lease(1, expires_at=1_000_030.0), make_lease(2))
    contributor.coordinator.finish()

    def slow_down() -> None:
        worker.generation.rates.step_s = 1e6

    at_step(contributor, 2, slow_down)
    worker.generation.lengths.observe(16, 40)
    worker.generation.lengths.observe(32, 40)
    worker.run()
    assert contributor.submitted == ["lease-3-0", "lease-3-2"]
    assert contributor.coordinator.returned == ["lease-3-1"]
    assert contributor.reports.some("step 3 slot 1 cannot end before its lease does")


def test_a_worker_whose_machine_slept_works_again(contributor: Contributor) -> None:
    """It gave every slot back for ever: nothing ran that could show how fast it is."""
    worker, asleep_s = contributor.worker, 20_000.0
    contributor.coordinator.grant(make_lease(0), *(make_lease(slot, expires_at=1_000_060.0) for slot in range(1, 30)))
    contributor.coordinator.finish()
    at_step(contributor, 2, lambda: worker.generation.rates.stepped(asleep_s, 0))
    worker.run()
    assert contributor.coordinator.returned[0] == "lease-3-1"
    assert contributor.submitted[-1] == "lease-3-29"
    assert len(contributor.submitted) + len(contributor.coordinator.returned) == 30
    assert len(contributor.coordinator.returned) < 20


class Picky(Worker):
    """Cannot prepare some slots."""

    refused: frozenset[int] = frozenset({0})

    def prepare(self, lease: api.Lease) -> Slot:
        if lease.slot in self.refused:
            raise ConfigError("The prompt of task-1 has 700 tokens, the run allows 64.")
        return super().prepare(lease)


def test_a_slot_whose_tasks_are_refused_is_given_back_and_the_next_one_is_taken(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0, kind=Picky)
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-1"]
    assert contributor.coordinator.returned == ["lease-3-0"]
    assert contributor.reports.some("step 3 slot 0 cannot be worked on: The prompt of task-1")


def test_a_worker_that_refuses_everything_ends_with_the_reason(tiny_run: TinyRun) -> None:
    class VeryPicky(Picky):
        refused = frozenset(range(10))

    contributor = Contributor(tiny_run, 0, kind=VeryPicky)
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(10)))
    with pytest.raises(ConfigError, match="700 tokens"):
        contributor.worker.run()
    assert len(contributor.coordinator.returned) == 4
    assert contributor.submitted == []


def test_a_version_that_no_relay_has_any_more_costs_its_slot(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0, version=7), make_lease(1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-1"]
    assert contributor.coordinator.returned == ["lease-3-0"]
    assert contributor.reports.some("step 3 slot 0 cannot be worked on: No relay delivered version 7.")


def test_a_worker_whose_version_was_withdrawn_goes_on_with_the_earlier_one(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0, 1)
    leases = [make_lease(0, version=1), make_lease(1, version=0)]
    contributor.coordinator.grant(*leases)
    contributor.coordinator.finish()

    def withdraw() -> None:
        contributor.weights.published = [0]

    at_step(contributor, 3, withdraw)
    contributor.worker.run()
    made = tokens_of(contributor, tiny_run)
    assert [made[lease.lease_id] for lease in leases] == [expected_tokens(tiny_run, lease) for lease in leases]
    assert contributor.engine.diary.count("load v0") == 1


class Clumsy(Worker):
    """Its verifier fails on some answers."""

    bad: frozenset[int] = frozenset({1})

    def rollouts(self, slot: Slot) -> list[Rollout]:
        if slot.lease.slot in self.bad:
            raise ZeroDivisionError("of a verifier")
        return super().rollouts(slot)


def test_an_answer_that_breaks_scoring_costs_its_slot_and_no_other(tiny_run: TinyRun) -> None:
    contributor = Contributor(tiny_run, 0, kind=Clumsy)
    contributor.coordinator.grant(make_lease(0), make_lease(1), make_lease(2))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0", "lease-3-2"]
    assert contributor.coordinator.returned == ["lease-3-1"]
    assert contributor.reports.some("step 3 slot 1 could not be scored: ZeroDivisionError: of a verifier")


def test_a_verifier_that_always_fails_ends_the_worker(tiny_run: TinyRun) -> None:
    class VeryClumsy(Clumsy):
        bad = frozenset(range(100))

    contributor = Contributor(tiny_run, 0, kind=VeryClumsy)
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(30)))
    with pytest.raises(ZeroDivisionError):
        contributor.worker.run()
    assert contributor.submitted == []


def test_finished_work_survives_the_death_of_the_process(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The first process dies with its upload in flight; the next one uploads the same bytes."""
    first = Contributor(tiny_run, 0, outbox=tmp_path / "outbox")
    first.coordinator.grant(make_lease(0, expires_at=1_000_100.0))
    first.coordinator.finish()
    first.coordinator.away["/v1/submissions"] = 1_000_000
    first.worker.run()
    assert first.submitted == []
    (kept,) = (tmp_path / "outbox").glob("*.parquet")
    data = kept.read_bytes()
    (tmp_path / "outbox" / "3-9-lease-3-9.parquet").write_bytes(b"the process died before the lease was written")
    (tmp_path / "outbox" / "3-8-lease-3-8.json").write_bytes(b"{")
    second = Contributor(tiny_run, 0, outbox=tmp_path / "outbox")
    second.coordinator.finish()
    second.worker.run()
    assert second.coordinator.submitted == {"lease-3-0": data}
    assert second.reports.some("uploading step 3 slot 0, which was finished before")
    assert list((tmp_path / "outbox").iterdir()) == []


def test_generation_goes_on_while_slots_are_uploaded(contributor: Contributor) -> None:
    third_slot_begun = threading.Event()
    submit = contributor.worker.client.submit

    def look() -> None:
        if (
            contributor.worker.generation.running
            and contributor.engine.diary.count("enter 8")
            and _entered(contributor) > 16
        ):
            third_slot_begun.set()

    def submit_slowly(lease_id: str, data: bytes, **options: object) -> api.SubmissionAnswer:
        assert third_slot_begun.wait(30), "two uploads hold the third slot up"
        return submit(lease_id, data)

    contributor.engine.on_step = look
    contributor.worker.client.submit = submit_slowly  # type: ignore[method-assign]
    contributor.coordinator.grant(make_lease(0), make_lease(1), make_lease(2))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0", "lease-3-1", "lease-3-2"]


def _entered(contributor: Contributor) -> int:
    return sum(int(entry.split()[1]) for entry in contributor.engine.diary if entry.startswith("enter"))


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


def test_stop_ends_the_loop_when_what_was_begun_has_ended(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.wait("no_work", times=1000)
    at_step(contributor, 1, contributor.worker.stop)
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0"]
    assert contributor.coordinator.returned in ([], ["lease-3-1"])


OUTAGE = "Waiting for the coordinator at http://coordinator, for up to 60 minutes: connection refused."


def test_a_coordinator_that_is_away_is_waited_for_and_asked_the_same_again(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.coordinator.away["/v1/leases"] = 30
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0"]
    asked = [body for path, body in contributor.coordinator.tries if path == "/v1/leases"]
    assert asked[:31] == [asked[0]] * 31
    assert contributor.reports.count(OUTAGE) == 1


def test_samples_go_on_while_the_coordinator_is_away(contributor: Contributor) -> None:
    """Leases, uploads and heartbeats are all lost for a while; no work is."""
    away = {"/v1/leases": 40, "/v1/submissions": 40, "/v1/heartbeat": 1_000_000}
    contributor.coordinator.grant(make_lease(0), make_lease(1), make_lease(2))
    contributor.coordinator.finish()
    at_step(contributor, 2, lambda: contributor.coordinator.away.update(away))
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0", "lease-3-1", "lease-3-2"]
    assert contributor.reports.some("Waiting for the coordinator at http://coordinator")


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
    assert contributor.submitted == ["lease-3-0"]
    assert len(contributor.coordinator.registered) >= 2
    assert contributor.reports.some("registering again")


def test_an_upload_is_sent_again_while_its_lease_lasts(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()
    contributor.coordinator.away["/v1/submissions"] = 30
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0"]
    assert contributor.worker.totals.submissions == 1
    assert sum("Waiting for the coordinator" in report for report in contributor.reports) == 1


def test_an_upload_that_never_arrives_costs_one_submission_and_nothing_else(contributor: Contributor) -> None:
    contributor.coordinator.grant(make_lease(0, expires_at=1_000_100.0), make_lease(1))
    contributor.coordinator.finish()
    contributor.coordinator.away["/v1/submissions/lease-3-0"] = 1000
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-1"]
    assert contributor.reports.some("step 3 slot 0 could not be submitted")


def refuse_the_first(contributor: Contributor, times: int, *, after: int = 0) -> None:
    """The coordinator calls the machine too slow so often, once it has registered `after` times."""
    coordinator, asked = contributor.coordinator, 0
    accept = coordinator._register

    def register(rest: str, content: bytes) -> BaseModel:
        nonlocal asked
        asked += 1
        if after < asked <= after + times:
            raise Refuse("too_slow", "At 3 tokens/s a slot takes up to 213 s; leases of this run last 60 s.", 422)
        return accept(rest, content)

    coordinator._register = register  # type: ignore[method-assign]


@pytest.fixture
def measures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.registration.MEASURE_AGAIN_S", 0.0)


@pytest.mark.usefixtures("measures_at_once")
def test_a_machine_that_was_busy_while_it_was_measured_is_measured_again(contributor: Contributor) -> None:
    refuse_the_first(contributor, 2)
    contributor.coordinator.finish()
    contributor.worker.run()
    assert len(contributor.coordinator.registered) == 1
    assert sum("Measuring again in" in line for line in contributor.reports) == 2


@pytest.mark.usefixtures("measures_at_once")
def test_a_machine_that_stays_too_slow_leaves(contributor: Contributor) -> None:
    refuse_the_first(contributor, 3)
    with pytest.raises(RefusedError, match="At 3 tokens/s a slot takes up to 213 s"):
        contributor.worker.run()
    assert contributor.coordinator.registered == []


def test_a_worker_whose_machine_slows_down_meanwhile_goes_on(
    contributor: Contributor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.machine.Machine.update_speed", lambda *_: True)
    refuse_the_first(contributor, 9, after=1)
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0", "lease-3-1"]
    assert contributor.reports.some("Work goes on: slots that cannot end in time go back")


def test_the_machine_is_measured_and_reported(contributor: Contributor) -> None:
    contributor.coordinator.finish()
    contributor.worker.run()
    reported = contributor.coordinator.registered[0]
    assert reported.tokens_per_s > 0
    assert reported.memory_bytes > 0
    assert reported.link_bytes_per_s > 0
    line = next(line for line in contributor.reports if line.startswith("this machine: "))
    assert "tokens/s" in line
    assert "B of memory" in line
    assert "B/s from the relays" in line
