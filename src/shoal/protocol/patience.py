"""Waiting for a coordinator that is away: it may be restarting, the network may be down, or this laptop was asleep."""

import time
from collections.abc import Callable
from typing import TypeVar

from shoal.errors import UnavailableError
from shoal.metrics import Report

Answer = TypeVar("Answer")


def patiently(
    ask: Callable[[], Answer],
    report: Report,
    *,
    outage_s: float,
    stopping: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Asks until there is an answer and says whom it waits for; whoever is away for longer than `outage_s` is given up."""
    away_since: float | None = None
    while True:
        try:
            return ask()
        except UnavailableError as error:
            away_since = clock() if away_since is None else away_since
            if stopping() or clock() - away_since > outage_s:
                raise
            report(f"{error.message} Waiting for it, for up to {outage_s / 60:.0f} minutes.")
