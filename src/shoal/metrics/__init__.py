"""What a process says about its work: one stream of events per role, and the metrics that follow from it."""

from shoal.metrics.events import EventLog, Record, Report, ReportingEventLog, read_events, silent
from shoal.metrics.prometheus import Exporter, serve_metrics
from shoal.metrics.table import METRICS, Metric

__all__ = [
    "METRICS",
    "EventLog",
    "Exporter",
    "Metric",
    "Record",
    "Report",
    "ReportingEventLog",
    "read_events",
    "serve_metrics",
    "silent",
]
