"""Every metric that a role exposes to Prometheus: its name, kind, meaning, and the event or status field that feeds it.

A new metric is a row here and nothing else; the exporter, the page of the reference and the tests follow from the table. Counters
without labels take the count of their event. Labels are fields of the event; a field that is a list counts once per item.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["coordinator", "worker"]
Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
FAST_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BYTES = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    help: str
    role: Role
    about: str
    """Whose work it measures."""
    event: str = ""
    field: str = ""
    """The field of the event, or of the status, that holds the value; empty counts events."""
    labels: tuple[str, ...] = ()
    held_until: str = ""
    """The event with which values appear, several at once: each by itself would tell what only the owner may know."""
    buckets: tuple[float, ...] = SECONDS


METRICS: tuple[Metric, ...] = (
    Metric("shoal_http_request_seconds", "histogram", "Time to answer a request, by route.", "coordinator",
           "coordinator", "request", "seconds", ("route",), buckets=FAST_SECONDS),
    Metric("shoal_refusals_total", "counter", "Refused requests, by code.", "coordinator",
           "coordinator", "refusal", labels=("code",)),
    Metric("shoal_leases_total", "counter", "Leases granted.", "coordinator", "coordinator", "leases_granted"),
    Metric("shoal_submissions_total", "counter", "Rollout files taken in.", "coordinator", "coordinator", "submitted"),
    Metric("shoal_events_lost_total", "counter", "Events that could not be written.", "coordinator",
           "coordinator", "events_lost"),
    Metric("shoal_alerts_total", "counter", "Alerts that were raised, by name.", "coordinator",
           "coordinator", "alert", labels=("name",)),
    Metric("shoal_step", "gauge", "Step that workers generate for.", "coordinator", "coordinator", field="step"),
    Metric("shoal_steps", "gauge", "Steps of the run.", "coordinator", "coordinator", field="steps"),
    Metric("shoal_policy_version", "gauge", "Newest published version.", "coordinator",
           "coordinator", field="newest_version"),
    Metric("shoal_useful_groups", "gauge", "Groups ready for the next batch.", "coordinator",
           "coordinator", field="useful_groups"),
    Metric("shoal_submissions_pending", "gauge", "Submissions without a verdict.", "coordinator",
           "validator", field="submissions_pending"),
    Metric("shoal_workers", "gauge", "Workers by trust state.", "coordinator", "worker",
           field="worker_counts", labels=("state",)),
    Metric("shoal_disk_free_bytes", "gauge", "Free space for rollouts.", "coordinator",
           "coordinator", field="disk_free_bytes"),
    Metric("shoal_ledger_entries", "gauge", "Entries of the ledger.", "coordinator", "coordinator", field="ledger_entries"),
    Metric("shoal_event_streams", "gauge", "Open pages that receive events.", "coordinator",
           "coordinator", field="event_streams"),
    Metric("shoal_verdicts_total", "counter", "Verdicts by outcome.", "coordinator", "validator", "verdict",
           labels=("outcome",)),
    Metric("shoal_rejections_total", "counter", "Reasons of rejections.", "coordinator", "validator", "verdict",
           labels=("reasons",)),
    Metric("shoal_verdict_seconds", "histogram", "Time that a validator took for one submission.", "coordinator",
           "validator", "verdict", "seconds", held_until="version"),
    Metric("shoal_verdict_tokens_total", "counter", "Tokens of accepted submissions.", "coordinator",
           "validator", "verdict", "tokens"),
    Metric("shoal_heldout_accuracy", "gauge", "Accuracy on held-out tasks.", "coordinator",
           "evaluator", "evaluation", "accuracy"),
    Metric("shoal_reward_mean", "gauge", "Mean reward of the last batch.", "coordinator", "trainer", "version", "reward_mean"),
    Metric("shoal_generated_reward_mean", "gauge", "Mean reward of all groups that were generated for the last batch.",
           "coordinator", "trainer", "version", "generated_reward_mean"),
    Metric("shoal_entropy", "gauge", "Mean entropy of the policy over trained tokens.", "coordinator",
           "trainer", "version", "entropy"),
    Metric("shoal_behaviour_divergence", "gauge", "Divergence between trainer and rollout policy, per token.",
           "coordinator", "trainer", "version", "kl_behaviour"),
    Metric("shoal_output_length_mean", "gauge", "Mean length of trained completions.", "coordinator",
           "trainer", "version", "output_length_mean"),
    Metric("shoal_truncation_rate", "gauge", "Share of completions cut at the limit.", "coordinator",
           "trainer", "version", "truncation_rate"),
    Metric("shoal_age_mean", "gauge", "Mean age of trained groups, in versions.", "coordinator", "trainer", "version", "age_mean"),
    Metric("shoal_trained_tokens_total", "counter", "Tokens trained on.", "coordinator",
           "trainer", "version", "trained_tokens"),
    Metric("shoal_trainer_wait_seconds", "histogram", "Time that the trainer waited for a batch.", "coordinator",
           "trainer", "version", "time_wait_batch_s"),
    Metric("shoal_trainer_update_seconds", "histogram", "Time of the optimiser steps of a training step.", "coordinator",
           "trainer", "version", "time_update_s"),
    Metric("shoal_version_bytes", "histogram", "Bytes that follow a version.", "coordinator",
           "trainer", "version", "bytes_total", buckets=BYTES),
    Metric("shoal_relay_bytes_sent", "gauge", "Bytes that a relay has sent, as it says.", "coordinator",
           "relay", field="relay_bytes_sent", labels=("relay",)),
    Metric("shoal_relay_bytes_received", "gauge", "Bytes that a relay has received, as it says.", "coordinator",
           "relay", field="relay_bytes_received", labels=("relay",)),
    Metric("shoal_relay_success", "gauge", "Share of a relay's answers that were right and complete, as clients say.",
           "coordinator", "relay", field="relay_success", labels=("relay",)),
    Metric("shoal_relay_version", "gauge", "Newest version that a relay holds.", "coordinator",
           "relay", field="relay_version", labels=("relay",)),
    Metric("shoal_worker_submissions_total", "counter", "Slots submitted by this worker.", "worker", "worker", "submitted"),
    Metric("shoal_worker_submission_bytes", "histogram", "Size of submitted files.", "worker",
           "worker", "submitted", "size_bytes", buckets=BYTES),
    Metric("shoal_worker_waited_seconds", "histogram", "Time without work, by reason.", "worker", "worker",
           "waited", "seconds", ("reason",)),
    Metric("shoal_worker_swap_seconds", "histogram", "Time to swap weights.", "worker", "worker", "weights_swapped", "swap_s"),
    Metric("shoal_worker_version", "gauge", "Version in the engine.", "worker", "worker", "weights_swapped", "version"),
    Metric("shoal_worker_fetch_seconds", "histogram", "Time to fetch a version.", "worker", "worker",
           "weights_fetched", "seconds"),
    Metric("shoal_worker_bytes_received_total", "counter", "Bytes of weights received.", "worker",
           "worker", "bytes_received"),
    Metric("shoal_worker_relay_failures_total", "counter", "Failures of relays.", "worker", "worker", "relay_failed"),
    Metric("shoal_worker_relay_lies_total", "counter", "Wrong bytes from relays.", "worker", "worker", "relay_lied"),
)  # fmt: skip
