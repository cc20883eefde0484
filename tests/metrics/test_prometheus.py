import math
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.metrics import METRICS, EventLog, Exporter, serve_metrics


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_events_feed_counters_gauges_and_histograms() -> None:
    events = EventLog()
    exporter = Exporter(events, "coordinator")
    events.event("verdict", outcome="rejected", reasons=["sampling", "reward"], seconds=0.2, tokens=0)
    events.event("verdict", outcome="accepted", reasons=[], seconds=float("nan"), tokens=30)
    events.event("version", reward_mean=0.25, time_wait_batch_s=2.0, entropy=None)
    events.count("leases_granted", 3)
    found = samples(exporter.text({"step": 7, "worker_counts": {"active": 2}, "disk_free_bytes": None}).decode())
    assert found["shoal_verdicts_total[rejected]"] == 1
    assert (found["shoal_rejections_total[sampling]"], found["shoal_rejections_total[reward]"]) == (1, 1)
    assert (found["shoal_verdict_seconds_count"], found["shoal_verdict_seconds_sum"]) == (1, 0.2)
    events.event("verdict", outcome="accepted", reasons=[], seconds=9.0, tokens=30)
    assert samples(exporter.text().decode())["shoal_verdict_seconds_count"] == 1, "held until the next version"
    assert found["shoal_verdict_tokens_total"] == 30
    assert (found["shoal_reward_mean"], found["shoal_leases_total"], found["shoal_step"]) == (0.25, 3, 7)
    assert found["shoal_workers[active]"] == 2
    assert "shoal_disk_free_bytes" not in found


def test_a_histogram_counts_up_to_each_bound_and_by_its_label() -> None:
    exporter = Exporter(EventLog(), "coordinator")
    (metric,) = [one for one in METRICS if one.event == "request"]
    low, high = metric.buckets[0], metric.buckets[-1]
    for seconds in (low, low / 2, high, 2 * high):
        exporter.observe("request", route="/v1/heartbeat", seconds=seconds)
    exporter.observe("request", route="/v1/leases", seconds=low)
    found = samples(exporter.text().decode())
    counted = [found[f"{metric.name}_bucket[{bound}][/v1/heartbeat]"] for bound in (low, high, "+Inf")]
    assert counted == [2, 3, 4]
    assert found[f"{metric.name}_count[/v1/heartbeat]"] == 4
    assert found[f"{metric.name}_sum[/v1/heartbeat]"] == pytest.approx(1.5 * low + 3 * high)
    assert found[f"{metric.name}_count[/v1/leases]"] == 1


def test_a_gauge_forgets_what_was_not_measured_again() -> None:
    events = EventLog()
    exporter = Exporter(events, "coordinator")
    events.event("version", reward_mean=0.25, kl_behaviour=0.02)
    events.event("version", reward_mean=0.5)
    found = samples(exporter.text().decode())
    assert found["shoal_reward_mean"] == 0.5
    assert math.isnan(found["shoal_behaviour_divergence"])


def test_every_metric_has_a_name_of_its_own_a_source_and_a_meaning() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.event or metric.field, metric
        assert metric.help.endswith("."), metric
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert len(metric.labels) <= 1, metric


def test_a_worker_serves_its_own_metrics_on_request() -> None:
    events = EventLog()
    port = serve_metrics(events, "worker", 0)
    events.event("submitted", size_bytes=5000)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = samples(answer.read().decode())
    assert (found["shoal_worker_submissions_total"], found["shoal_worker_submission_bytes_sum"]) == (1, 5000)
    assert "shoal_step" not in found
