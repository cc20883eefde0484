import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.metrics import EventLog, ReportingEventLog
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
