"""The evaluator measures what is due once, in a way that can be repeated."""

from pathlib import Path

import pytest

from shoal.broadcast.store import DiskError
from shoal.errors import UnavailableError
from shoal.evaluation import Evaluator
from shoal.protocol import api
from support.fake_coordinator import FakeCoordinator
from support.samples import keypair
from support.tiny_run import DiskWeights, Reports, TinyRun, version_digest


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


def evaluator(
    tiny_run: TinyRun,
    coordinator: FakeCoordinator,
    weights: DiskWeights,
    *,
    every: int = 2,
    steps: int = 3,
    samples: int = 1,
) -> Evaluator:
    return Evaluator(
        tiny_run.joined(weights),
        coordinator.client(keypair("evaluator")),
        tiny_run.new_engine(),
        every=every,
        samples=samples,
        steps=steps,
        report=Reports(),
    )


def seen(version: int) -> api.EvaluationView:
    return api.EvaluationView(version=version, accuracy=0.5, problems=1, samples=1, mean_tokens=1, seconds=1, at_s=1)


def test_it_measures_the_first_and_the_last_version_and_ends(tiny_run: TinyRun, coordinator: FakeCoordinator) -> None:
    weights = DiskWeights(dict.fromkeys(range(4), tiny_run.policies[0]), [0, 1, 2, 3])
    evaluator(tiny_run, coordinator, weights).run()
    assert [body.version for body in coordinator.evaluations] == [0, 3]
    assert coordinator.evaluations[0].problems == 6


def test_a_first_version_that_cannot_be_fetched_delays_the_others_once(
    tiny_run: TinyRun, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutFirst(DiskWeights):
        def fetch_version(self, version: int, manifest_digest: str, **options: object) -> Path:
            if version == 0:
                raise UnavailableError("Nobody has it.")
            return super().fetch_version(version, manifest_digest)

    monkeypatch.setattr("shoal.evaluation.evaluator.RETRY_S", 0.0)
    weights = WithoutFirst(dict.fromkeys(range(4), tiny_run.policies[0]), [0, 1, 2, 3])
    evaluator(tiny_run, coordinator, weights).run()
    assert [body.version for body in coordinator.evaluations] == [3]


def test_versions_are_due_every_few_and_at_the_end(tiny_run: TinyRun, coordinator: FakeCoordinator) -> None:
    subject = evaluator(tiny_run, coordinator, tiny_run.weights(0), every=4, steps=10)
    assert [version for version in range(11) if subject._is_due(version)] == [0, 4, 8, 10]


def test_new_versions_are_measured_as_they_come_and_others_skipped(
    tiny_run: TinyRun, coordinator: FakeCoordinator
) -> None:
    class Growing(DiskWeights):
        def head(self, **options: object) -> object:  # type: ignore[override]
            head = super().head()
            self.published.append(len(self.published))
            return head

    weights = Growing(dict.fromkeys(range(9), tiny_run.policies[0]), [0])
    evaluator(tiny_run, coordinator, weights).run()
    assert [body.version for body in coordinator.evaluations] == [0, 2, 3]


def test_a_restart_measures_nothing_twice(tiny_run: TinyRun, coordinator: FakeCoordinator) -> None:
    coordinator.history = coordinator.history.model_copy(update={"evaluations": [seen(0), seen(3)]})
    weights = tiny_run.weights(0)
    evaluator(tiny_run, coordinator, weights).run()
    assert coordinator.evaluations == []
    assert weights.fetched == []


def test_after_a_rewind_a_number_that_was_measured_is_measured_again(
    tiny_run: TinyRun, coordinator: FakeCoordinator
) -> None:
    """The owner returned to version 0 when version 2 had been measured; its number names other weights now."""
    voided = api.VersionView(version=2, manifest_digest="7" * 64, published_s=1, report={})
    first = api.VersionView(version=0, manifest_digest=version_digest(0), published_s=1, report={})
    history = {"evaluations": [seen(0), seen(2)], "versions": [first, voided]}
    coordinator.history = coordinator.history.model_copy(update=history)
    weights = DiskWeights(dict.fromkeys(range(4), tiny_run.policies[0]), [0, 1, 2])

    class Grows(DiskWeights):
        def head(self, **options: object) -> object:  # type: ignore[override]
            head = super().head()
            self.published = [0, 1, 2, 3] if 2 in self.fetched else self.published
            return head

    evaluator(tiny_run, coordinator, Grows(weights.versions, [0, 1, 2])).run()
    assert [(body.version, body.manifest_digest) for body in coordinator.evaluations] == [
        (2, version_digest(2)),
        (3, version_digest(3)),
    ]


def test_relays_that_do_not_answer_are_asked_again(
    tiny_run: TinyRun, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.evaluation.evaluator.RETRY_S", 0.0)

    class Late(DiskWeights):
        def head(self, **options: object) -> object:  # type: ignore[override]
            if not self.fetched and not self.published:
                self.published = [3]
                raise UnavailableError("No relay showed a head.")
            return super().head()

    subject = evaluator(tiny_run, coordinator, Late({3: tiny_run.policies[0]}))
    subject.run()
    assert [body.version for body in coordinator.evaluations] == [3]
    assert isinstance(subject.report, Reports)
    assert subject.report.some("No relay showed a head.")


def test_an_evaluator_without_room_says_so_and_tries_again(
    tiny_run: TinyRun, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.evaluation.evaluator.RETRY_S", 0.0)
    refusals = iter([OSError(28, "No space left on device"), DiskError("There is no space on the disk for x.")])

    class Full(DiskWeights):
        def fetch_version(self, *arguments: object, **options: object) -> Path:
            if (refusal := next(refusals, None)) is not None:
                raise refusal
            return super().fetch_version(*arguments, **options)  # type: ignore[arg-type]

    subject = evaluator(tiny_run, coordinator, Full({3: tiny_run.policies[0]}, [3]))
    subject.run()
    assert [body.version for body in coordinator.evaluations] == [3]
    assert isinstance(subject.report, Reports)
    assert subject.report.some("No space left on device")
    assert subject.report.some("no space on the disk")


def test_seeds_depend_on_version_and_task_only(tiny_run: TinyRun, coordinator: FakeCoordinator) -> None:
    first, again = (evaluator(tiny_run, coordinator, tiny_run.weights(0)) for _ in range(2))
    for subject in (first, again):
        subject.engine.load(tiny_run.policies[0])
    assert first.measure(2) == again.measure(2)
    assert first.measure(2).mean_tokens != first.measure(3).mean_tokens


def test_several_samples_per_problem_are_averaged(tiny_run: TinyRun, coordinator: FakeCoordinator) -> None:
    evaluator(tiny_run, coordinator, DiskWeights({3: tiny_run.policies[1]}, [3]), samples=3).run()
    assert (coordinator.evaluations[0].samples, coordinator.evaluations[0].problems) == (3, 6)
