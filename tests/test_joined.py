"""A new worker builds everything from the descriptor and trusts no relay."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.broadcast import Origin, OriginServer, OriginSettings, RelayReport
from shoal.config import LoraConfig, RolloutConfig, TasksConfig
from shoal.errors import ConfigError, IntegrityError, UnavailableError
from shoal.files import CONFIG_FILE
from shoal.joined import RelayList, RelayReports, join_run, wait_for_file
from shoal.owner.create import _serve_base, _serve_files, _serve_tasks
from shoal.policy import WeightsNotLoadedError
from shoal.policy.engine import GenerationRequest
from shoal.policy.weights import base_digest
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.tasks import CODEC_FILES, OwnVerifierError, SandboxError, Task, TaskSet, TaskSets, load_tasks
from shoal.validation.calibration.adapters import write_typical
from support.samples import descriptor, keypair
from support.tiny_run import Reports, save_policy

TASKS = TasksConfig(count=12, heldout=4)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin", keypair("run"), OriginSettings(run_id="run-1"))


@pytest.fixture
def url(origin: Origin) -> Iterator[str]:
    server = OriginServer(origin.store, "127.0.0.1", 0)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def run(origin: Origin, url: str, model: Path) -> RunDescriptor:
    return descriptor(
        relay_urls=(url,),
        model_files=_serve_files(origin, model),
        tasks=TASKS,
        task_set_digest=load_tasks(TASKS).train.digest,
        rollouts=RolloutConfig(max_prompt_tokens=64),
    )


def test_a_join_brings_files_workload_and_an_engine_without_weights(
    run: RunDescriptor, model: Path, tmp_path: Path
) -> None:
    joined = join_run(run, tmp_path / "cache")
    assert joined.workload.items(bytes(32))
    for name in run.model_files:
        assert (joined.model_files / name).read_bytes() == (model / name).read_bytes()
    engine = joined.make_engine()
    request = GenerationRequest((3, 4), 1, 2)
    with pytest.raises(WeightsNotLoadedError):
        engine.generate([request], temperature=1.0)
    engine.load(model)
    assert len(engine.generate([request], temperature=1.0)) == 1


def test_a_second_join_needs_no_relay(run: RunDescriptor, tmp_path: Path) -> None:
    first = join_run(run, tmp_path / "cache")
    again = join_run(run.model_copy(update={"relay_urls": ()}), tmp_path / "cache")
    assert again.workload.items(bytes(32)) == first.workload.items(bytes(32))


def test_a_relay_with_other_bytes_delivers_nothing(
    run: RunDescriptor, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run.model_files[CONFIG_FILE]
    (origin.root / "shards" / config.digest).write_bytes(b"x" * config.bytes)
    monkeypatch.setattr("shoal.joined.FILE_DEADLINE_S", 0.2)
    monkeypatch.setattr("shoal.joined.ORIGIN_OUTAGE_S", 0.0)
    with pytest.raises(UnavailableError, match="instead of"):
        join_run(run, tmp_path / "cache")
    assert not (tmp_path / "cache" / "model").exists()


def test_tokenizer_files_that_the_descriptor_forgot_are_named(run: RunDescriptor, tmp_path: Path) -> None:
    files = {name: reference for name, reference in run.model_files.items() if name not in CODEC_FILES}
    with pytest.raises(ConfigError, match="tokenizer"):
        join_run(run.model_copy(update={"model_files": files}), tmp_path / "cache")


def test_live_relays_come_before_those_of_the_descriptor(run: RunDescriptor) -> None:
    relays = RelayList(run)
    assert relays() == run.relay_urls
    relays.update(["http://live"])
    assert relays() == ("http://live", *run.relay_urls)
    relays.update([])
    assert relays() == run.relay_urls


def test_a_role_reports_how_relays_served_it_since_the_last_time() -> None:
    served = RelayReport("http://good", bytes_received=10, served=4)
    failed = RelayReport("http://bad", failures=1, success=0.7)
    lied = RelayReport("http://liar", bytes_received=99, lies=1)
    slow = RelayReport("http://flaky", bytes_received=5, failures=9, success=0.2)
    measured = [served, failed, lied, slow, RelayReport("http://idle")]
    reports = RelayReports(lambda: measured)
    news = reports.news()
    assert {one.url: (one.served, one.failed) for one in news} == {
        "http://good": (4, 0), "http://bad": (0, 1), "http://liar": (0, 1), "http://flaky": (0, 9),
    }  # fmt: skip
    found = {one.url: one.is_good for one in news}
    assert found == {"http://good": True, "http://bad": False, "http://liar": False, "http://flaky": False}
    assert reports.news() == []
    lied.bytes_received += 1
    assert [(one.url, one.is_good) for one in reports.news()] == [("http://liar", True)]


def test_a_report_names_the_relays_that_served_most() -> None:
    many = [RelayReport(f"http://relay-{number}", bytes_received=1 + number) for number in range(100)]
    news = RelayReports(lambda: many).news()
    assert len(news) == 32
    assert news[0].url == "http://relay-99"


def test_runs_share_a_cache_without_mixing(run: RunDescriptor, tmp_path: Path, model: Path, origin: Origin) -> None:
    joined = join_run(run, tmp_path / "cache")
    other = join_run(run.model_copy(update={"run_key": keypair("other").public}), tmp_path / "cache")
    assert joined.model_files != other.model_files


def served(origin: Origin, run: RunDescriptor, tasks: TaskSets) -> RunDescriptor:
    return run.model_copy(
        update={
            "tasks": TasksConfig(source="somewhere-else.jsonl"),
            "task_set_digest": tasks.train.digest,
            "task_count": len(tasks.train),
            "task_files": _serve_tasks(origin, tasks.train),
            "heldout_files": _serve_tasks(origin, tasks.heldout),
        }
    )


def test_tasks_of_the_owners_disk_come_with_the_run(run: RunDescriptor, origin: Origin, tmp_path: Path) -> None:
    tasks = load_tasks(TASKS)
    joined = join_run(served(origin, run, tasks), tmp_path / "cache", heldout=True)
    assert list(joined.workload.tasks.train) == list(tasks.train)
    assert list(joined.workload.tasks.heldout) == list(tasks.heldout)
    again = join_run(served(origin, run, tasks).model_copy(update={"relay_urls": ()}), tmp_path / "cache")
    assert again.workload.tasks.train.digest == tasks.train.digest
    assert len(again.workload.tasks.heldout) == 0, "who only works does not need them"


def test_served_tasks_that_are_not_those_of_the_run_are_refused(
    run: RunDescriptor, origin: Origin, tmp_path: Path
) -> None:
    other = served(origin, run, load_tasks(TASKS.model_copy(update={"seed": 9})))
    with pytest.raises(ConfigError, match="not the one of the run"):
        join_run(other.model_copy(update={"task_set_digest": run.task_set_digest}), tmp_path / "cache")


CODE = Task(
    problem_id="c",
    source="t",
    task_type="verifiable_code",
    prompt="Say 1.",
    verification_info={"test_cases": {"inputs": ["1"], "outputs": ["1"]}},
)


def test_a_machine_without_bubblewrap_is_refused_when_the_run_has_code_tasks(
    run: RunDescriptor, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.sandbox.sandbox.sandbox_complaint", lambda: "bubblewrap is not installed")
    tasks = TaskSets(train=TaskSet([CODE]), heldout=TaskSet([CODE]))
    with pytest.raises(SandboxError, match="Install bubblewrap"):
        join_run(served(origin, run, tasks), tmp_path / "cache")
    inside = {"parts": [{"task_type": "verifiable_code", "verification_info": CODE.verification_info, "weight": 1.0}]}
    hidden = CODE.model_copy(update={"task_type": "multi", "verification_info": inside})
    with pytest.raises(SandboxError):
        join_run(served(origin, run, TaskSets(TaskSet([hidden]), TaskSet())), tmp_path / "cache")
    join_run(run, tmp_path / "other")


def test_code_of_the_owner_is_imported_only_with_leave(run: RunDescriptor, origin: Origin, tmp_path: Path) -> None:
    own = CODE.model_copy(update={"task_type": "tasks.own:says_one", "verification_info": {}})
    asking = served(origin, run, TaskSets(train=TaskSet([own]), heldout=TaskSet()))
    with pytest.raises(OwnVerifierError, match=r"--verifier tasks\.own:says_one"):
        join_run(asking, tmp_path / "cache", own_verifiers=())
    joined = join_run(asking, tmp_path / "cache", own_verifiers=("tasks.own:says_one",))
    assert joined.workload.tasks.train[0].task_type == "tasks.own:says_one"


class LateOrigin:
    """Serves after some tries."""

    def __init__(self, failures: int) -> None:
        self.failures, self.now = failures, 0.0

    def fetch_file(self, digest: str, *, max_bytes: int, deadline_s: float) -> bytes:
        if self.failures:
            self.failures -= 1
            self.now += deadline_s
            raise UnavailableError("No relay delivered config.json.")
        return b"served"


def fetch(origin: LateOrigin, reports: Reports) -> bytes:
    file = FileReference(digest="ab" * 32, bytes=6)
    return wait_for_file(origin, file, reports, deadline_s=60.0, monotonic=lambda: origin.now)  # type: ignore[arg-type]


def test_an_origin_that_does_not_serve_yet_is_waited_for_and_reported_once() -> None:
    reports = Reports()
    assert fetch(LateOrigin(failures=10), reports) == b"served"
    assert reports == ["No relay delivered config.json. Waiting for it, for up to 60 minutes."]


def test_an_origin_that_stays_away_for_an_hour_ends_the_wait() -> None:
    with pytest.raises(UnavailableError):
        fetch(LateOrigin(failures=1000), Reports())


def test_a_run_of_adapters_brings_its_base_once(
    origin: Origin, run: RunDescriptor, model: Path, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=2)
    terms = _serve_base(origin, model, lora)
    assert terms is not None
    adapted = run.model_copy(update={"adapter": terms})
    joined = join_run(adapted, tmp_path / "cache")
    assert base_digest(joined.model_files) == terms.base_weights == base_digest(model)
    engine, request = joined.make_engine(), GenerationRequest((3, 4), 1, 2)
    assert engine.numerics_class.endswith("+lora")
    with pytest.raises(WeightsNotLoadedError):
        engine.generate([request], temperature=1.0)
    engine.load(write_typical(tmp_path / "adapter", model, lora))
    assert len(engine.generate([request], temperature=1.0)) == 1
    join_run(adapted.model_copy(update={"relay_urls": ()}), tmp_path / "cache")


def test_a_base_that_a_relay_changed_is_not_used(
    origin: Origin, run: RunDescriptor, model: Path, tmp_path: Path
) -> None:
    terms = _serve_base(origin, model, LoraConfig(rank=2))
    assert terms is not None
    changed = terms.model_copy(update={"base_weights": "00" * 32})
    with pytest.raises(IntegrityError, match="other weights than its descriptor says"):
        join_run(run.model_copy(update={"adapter": changed}), tmp_path / "cache")
