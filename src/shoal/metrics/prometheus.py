"""The metrics of a process in Prometheus text, fed by its event log and, at the moment of a scrape, by a status.

Which metrics there are is decided by the table alone. What an event lacks, or what is not a finite number, is left out.
"""

import bisect
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from shoal.errors import ConfigError
from shoal.metrics.events import EventLog, Record
from shoal.metrics.table import METRICS, Metric, Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_HELD = 10_000
"""Values of one metric that wait for an event; then the oldest go."""
Status = Mapping[str, Any]
"""Values by the `field` of a gauge without an event: a number, or numbers by the value of its label."""


class Exporter:
    def __init__(self, events: EventLog, role: Role, status: Callable[[], Status] = dict) -> None:
        self.registry = CollectorRegistry()
        self._by_event: dict[str, list[_Fed]] = {}
        self._released_by: dict[str, list[_Fed]] = {}
        chosen = [metric for metric in METRICS if metric.role == role]
        for metric in chosen:
            if metric.event and not _is_plain_count(metric):
                fed = _Fed(metric, self.registry)
                self._by_event.setdefault(metric.event, []).append(fed)
                self._released_by.setdefault(metric.held_until, []).append(fed)
        self.registry.register(_AtScrape(events, [metric for metric in chosen if _is_plain_count(metric)]))
        self._status = _StatusCollector([metric for metric in chosen if not metric.event], status)
        self.registry.register(self._status)
        events.listen(self.take)

    def take(self, record: Record) -> None:
        for fed in self._by_event.get(record["event"], ()):
            fed.take(record)
        for fed in self._released_by.get(record["event"], ()):
            fed.release()

    def observe(self, event: str, **fields: object) -> None:
        """Counts something that is too frequent to be written as an event."""
        self.take({"event": event, **fields})

    def text(self, status: Status | None = None) -> bytes:
        if status is not None:
            self._status.status = lambda: status
        return generate_latest(self.registry)


def serve_metrics(events: EventLog, role: Role, port: int, host: str = "127.0.0.1") -> int:
    """Serves `/metrics` in a thread of its own, for as long as the process lives; returns the port."""
    try:
        server, _ = start_http_server(port, host, Exporter(events, role).registry)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"Metrics cannot be served on port {port}: {reason}.", hint="Choose another port.") from None
    return int(server.server_port)


def _is_plain_count(metric: Metric) -> bool:
    return metric.kind == "counter" and not metric.field and not metric.labels


class _Fed:
    """A metric that takes one value per event."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self.metric = metric
        name, labels = metric.name, [_label(name) for name in metric.labels]
        self._series: Counter | Gauge | _Histogram
        if metric.kind == "histogram":
            self._series = _Histogram(metric, labels)
            registry.register(self._series)
        else:
            self._series = (Counter if metric.kind == "counter" else Gauge)(
                name, metric.help, labels, registry=registry
            )
        self._children: dict[tuple[str, ...], Counter | Gauge] = {}
        self._held: deque[Record] = deque(maxlen=MOST_HELD)

    def take(self, record: Record) -> None:
        if self.metric.held_until:
            self._held.append(record)
        else:
            self._count(record)

    def release(self) -> None:
        """Counts what was held."""
        while self._held:
            self._count(self._held.popleft())

    def _count(self, record: Record) -> None:
        value = _number(record.get(self.metric.field)) if self.metric.field else 1.0
        if value is None:
            if isinstance(self._series, Gauge) and not self.metric.labels:
                self._series.set(math.nan)  # an old value would say that it was measured now
            return
        for values in self._label_values(record):
            if isinstance(self._series, _Histogram):
                self._series.observe(values, value)
                continue
            series = self._child(self._series, values)
            if isinstance(series, Gauge):
                series.set(value)
            else:
                series.inc(max(0.0, value))

    def _child(self, series: Counter | Gauge, values: tuple[str, ...]) -> Counter | Gauge:
        if not values:
            return series
        if values not in self._children:
            self._children[values] = series.labels(*values)
        return self._children[values]

    def _label_values(self, record: Record) -> Iterator[tuple[str, ...]]:
        if not self.metric.labels:
            yield ()
            return
        found = record.get(self.metric.labels[0])
        for item in found if isinstance(found, list | tuple) else () if found is None else (found,):
            yield (str(item),)


def _label(name: str) -> str:
    return "reason" if name == "reasons" else name


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class _Histogram(Collector):
    """Counts of values by upper bound. The client's own histogram looks at one bound after the other, for every request."""

    def __init__(self, metric: Metric, labels: list[str]) -> None:
        self._metric, self._labels = metric, labels
        self._bounds = [*metric.buckets, math.inf]
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._begin(())

    def observe(self, values: tuple[str, ...], value: float) -> None:
        with self._lock:
            if values not in self._counts:
                self._begin(values)
            self._counts[values][bisect.bisect_left(self._bounds, value)] += 1
            self._sums[values] += value

    def collect(self) -> Iterator[Family]:
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=self._labels)
        with self._lock:
            for values, counts in self._counts.items():
                reached = [
                    (_bound(bound), float(n))
                    for bound, n in zip(self._bounds, itertools.accumulate(counts), strict=True)
                ]
                family.add_metric(values, reached, self._sums[values])
        yield family

    def _begin(self, values: tuple[str, ...]) -> None:
        self._counts[values], self._sums[values] = [0] * len(self._bounds), 0.0


def _bound(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(float(bound))


class _AtScrape(Collector):
    """Counters that the event log keeps itself."""

    def __init__(self, events: EventLog, metrics: list[Metric]) -> None:
        self._events, self._metrics = events, metrics

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics:
            yield CounterMetricFamily(metric.name, metric.help, value=self._events.counters[metric.event])


class _StatusCollector(Collector):
    def __init__(self, metrics: list[Metric], status: Callable[[], Status]) -> None:
        self._metrics, self.status = metrics, status

    def collect(self) -> Iterator[Family]:
        status = self.status()
        for metric in self._metrics:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            found = status.get(metric.field)
            values = found if isinstance(found, Mapping) else {} if found is None else {None: found}
            for label, value in values.items():
                if (known := _number(value)) is not None:
                    family.add_metric([] if label is None else [str(label)], known)
            if family.samples:
                yield family
