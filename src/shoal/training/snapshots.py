"""The copy of the weights that leaves the trainer: made once, beside the training where that is possible.

Between two optimiser steps the weights do not change, so the publisher's thread copies them while the trainer fetches and
computes the next gradient. The first that needs the copy makes it: the publisher, or the trainer before it changes a weight.
The other one waits for it, so neither can wait for ever. `stood_still_s` is how long the trainer did.
"""

import threading
import time
from collections.abc import Callable, Sequence

from shoal.broadcast import WireTensor


class Snapshot:
    def __init__(
        self, take: Callable[[], Sequence[WireTensor]], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._take, self._clock = take, clock
        self._lock = threading.Lock()
        self._tensors: Sequence[WireTensor] | None = None
        self.stood_still_s = 0.0

    def tensors(self) -> Sequence[WireTensor]:
        """The copy; the first call makes it."""
        with self._lock:
            if self._tensors is None:
                self._tensors = self._take()
            return self._tensors

    def secure(self) -> None:
        """Called by the trainer before the weights change: afterwards the copy is whole."""
        started = self._clock()
        self.tensors()
        self.stood_still_s += self._clock() - started
