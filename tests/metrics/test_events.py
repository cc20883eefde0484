import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.metrics import EventLog, Record, ReportingEventLog, read_events
from support.tiny_run import Reports


def test_without_a_path_metrics_only_count() -> None:
    metrics = EventLog()
    metrics.count("tokens", 5)
    metrics.count("tokens")
    metrics.count("seconds", 0.5)
    metrics.event("submitted", step=1)
    assert metrics.counters == {"tokens": 6, "seconds": 0.5, "submitted": 1}
    metrics.close()


def test_events_are_lines_in_the_order_they_happened_and_survive_a_restart(tmp_path: Path) -> None:
    path, now = tmp_path / "events" / "worker.jsonl", 1.00049
    for _ in range(2):
        metrics = EventLog(path, clock=lambda: now)
        metrics.event("started", worker="ünicode")
        metrics.event("stopped")
        metrics.close()
        metrics.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "stopped"] * 2
    assert lines[0] == {"at": 1.0, "event": "started", "worker": "ünicode"}


def test_an_event_is_on_disk_when_it_was_emitted(tmp_path: Path) -> None:
    metrics = EventLog(tmp_path / "events.jsonl")
    metrics.event("now")
    assert "now" in (tmp_path / "events.jsonl").read_text()
    metrics.close()


def test_threads_lose_no_count_and_mix_no_lines(tmp_path: Path) -> None:
    metrics = EventLog(tmp_path / "events.jsonl")

    def work(number: int) -> None:
        for _ in range(200):
            metrics.event("tick", number=number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    metrics.close()
    assert metrics.counters == {"tick": 800}
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 800


def test_trouble_is_reported_at_once_and_again_while_it_lasts(tmp_path: Path) -> None:
    now, reports = [0.0], Reports()
    metrics = ReportingEventLog(tmp_path / "events.jsonl", reports, monotonic=lambda: now[0])
    for second in range(21):
        now[0] = float(second)
        metrics.event("relay_failed", relay="http://up", reason=f"http://up cannot be reached for shard {second}")
    assert len(reports) == 3
    metrics.event("relay_lied", relay="http://liar", about="shard", reason="bytes with digest 12… instead of 34…")
    assert reports[-1] == "http://liar lied and is avoided: bytes with digest 12… instead of 34…"


def test_a_full_disk_loses_events_and_nothing_else(tmp_path: Path) -> None:
    path, now = tmp_path / "events.jsonl", [0.0]
    path.symlink_to("/dev/full")
    metrics = EventLog(path, clock=lambda: now[0])
    metrics.event("step", number=1)
    metrics.event("step", number=2)
    assert metrics.counters == {"step": 2, "events_lost": 2}
    path.unlink()
    now[0] = 60.0
    metrics.event("step", number=3)
    assert [event["number"] for event in read_events(path)] == [3]
    metrics.close()


def test_a_file_that_cannot_be_made_loses_events_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file where a directory should be")
    metrics = EventLog(tmp_path / "events" / "coordinator.jsonl")
    metrics.event("step")
    assert metrics.counters == {"step": 1, "events_lost": 1}


def test_a_listener_that_fails_stops_nothing(tmp_path: Path) -> None:
    metrics, heard = EventLog(tmp_path / "events.jsonl"), list[str]()

    def fail(record: Record) -> None:
        raise RuntimeError("a broken page")

    metrics.listen(fail)
    metrics.listen(lambda record: heard.append(record["event"]))
    metrics.event("step")
    assert heard == ["step"]
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["step"]


def test_a_broken_file_of_events_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"at": 1, "event": "a"}\n\x00\xff garbage\n[1]\n{"event": "b"}\n{"at": 2, "event": "c"}\n{"at": 3, "ev'
    )
    assert [event["event"] for event in read_events(path)] == ["a", "c"]
    assert [event["event"] for event in read_events(path, names=("c",))] == ["c"]
    assert read_events(tmp_path / "nothing.jsonl") == []
