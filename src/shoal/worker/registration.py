"""With what a machine is registered: measured before its first lease, corrected when work shows another speed.

A machine that was busy while it was measured is not one that is too slow: it is measured again before it leaves.
"""

import secrets
from collections.abc import Callable

from shoal.errors import RefusedError
from shoal.joined import JoinedRun
from shoal.metrics import Report
from shoal.policy.engine import Engine
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.worker.machine import Machine, machine_memory, measure_engine

TOO_SLOW = "too_slow"
MEASUREMENTS = 3
MEASURE_AGAIN_S = 20.0


class Registration:
    def __init__(self, run: JoinedRun, client: CoordinatorClient, engine: Engine, name: str, report: Report) -> None:
        self.machine, self.rows = Machine(1.0), 1
        """`rows` is how many samples at a time the machine should work on."""
        self._run, self._client, self._engine, self._name, self._report = run, client, engine, name, report
        self._measured = (0, 0.0)

    def measure_and_register(self, link_bytes_per_s: float, wait: Callable[[float], object]) -> api.WorkerView:
        """`wait` passes the time between two measurements."""
        for left in reversed(range(MEASUREMENTS)):
            self.rows, tokens_per_s = self._measure()
            self.machine = Machine(tokens_per_s, link_bytes_per_s, machine_memory())
            self._report(f"this machine: {self.machine.line()}, {self.rows} samples at a time")
            try:
                return self.register()
            except RefusedError as refusal:
                if refusal.code != TOO_SLOW or not left:
                    raise
                self._report(f"{refusal.message} Measuring again in {MEASURE_AGAIN_S:.0f} s, in case it was busy.")
                wait(MEASURE_AGAIN_S)
        raise AssertionError("the last refusal is raised")

    def register(self) -> api.WorkerView:
        return self._client.register(self.machine.registration(self._name, self._engine.numerics_class))

    def update_speed(self, generated: int, busy_s: float) -> bool:
        """Takes all tokens and engine seconds since the start; true if the registered speed was wrong."""
        (before_tokens, before_s), self._measured = self._measured, (generated, busy_s)
        return self.machine.update_speed(generated - before_tokens, busy_s - before_s)

    def correct(self) -> None:
        """Registers another speed; a machine that has become too slow keeps its work."""
        try:
            self.register()
        except RefusedError as refusal:
            if refusal.code != TOO_SLOW:
                raise
            self._report(f"{refusal.message} Work goes on: slots that cannot end in time go back.")

    def _measure(self) -> tuple[int, float]:
        item = self._run.workload.items(secrets.token_bytes(32))[0]
        return measure_engine(self._engine, item, self._run.descriptor.rollouts)
