"""docs/reference/metrics.md: every metric for Prometheus, from the table that feeds them."""

from shoal.coordinator.rules.alerts import ALERTS
from shoal.metrics import METRICS, Metric
from tools.reference.text import item, wrapped

INTRODUCTION = (
    "`GET /metrics` of the coordinator answers in Prometheus text, for anyone. It covers the coordinator, and trainer,"
    " validators, evaluator and relays as far as they report to it. A worker serves its own metrics on loopback with"
    " `shoal work --metrics-port PORT`."
)
SOURCES = {"coordinator": "Of the coordinator", "worker": "Of a worker, on request"}


def page() -> str:
    lines = ["# Metrics and alerts", "", wrapped(INTRODUCTION)]
    for role, title in SOURCES.items():
        lines += ["", f"## {title}", ""]
        lines += [item(_line(metric)) for metric in METRICS if metric.role == role]
    lines += ["", "## Alerts", "", wrapped("Each is an event, a line in the terminal and a card on the page."), ""]
    lines += [item(f"**`{one.name}`**, threshold {one.threshold:g}: {one.means} {one.advice}") for one in ALERTS]
    return "\n".join(lines) + "\n"


def _line(metric: Metric) -> str:
    labels = f" by `{', '.join(metric.labels).rstrip('s')}`" if metric.labels else ""
    return f"**`{metric.name}`** ({metric.kind}, {metric.about}){labels}: {metric.help}"
