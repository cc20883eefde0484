"""A key that leases and never submits, as a process, and a real swarm with and without it, phase by phase.

    python tests/end_to_end/staller.py DESCRIPTOR

The process takes every lease that it gets, answers none, and sends heartbeats like an honest worker.
"""

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from end_to_end.swarm import Swarm, small_config, swarm
from shoal.config import ShoalConfig
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.descriptor import RunDescriptor, open_descriptor

HONEST = ("honest-1", "honest-2")
OWNED = ("coordinator", "trainer", "relay-1", "validator")
ASKS_EVERY_S = 0.25
LEASED = "leased"
WARM_UP_STEPS = 20
"""Until the record of each honest worker is long enough, and the first, slow steps are over."""


@dataclass(frozen=True)
class Phase:
    with_staller: bool
    steps: int
    seconds: float
    """Between the batch before the first step and that of the last one, by the coordinator's clock."""
    step_s: list[float]
    """The same, step by step."""
    stalled_leases: int
    """Of the staller, at the end of the phase."""


def config(root: Path, lease_s: int) -> ShoalConfig:
    """Steps that never end; the policy hardly changes, so that every phase has the same work."""
    return small_config(
        root,
        steps=100_000,
        training={"groups_per_step": 4, "learning_rate": 1e-7, "checkpoint_every": 1000},
        coordinator={"lease_s": lease_s, "gone_after_s": 30},
    )


@contextmanager
def honest_swarm(root: Path, lease_s: int = 60) -> Iterator[Swarm]:
    """Two honest workers that have delivered for a while."""
    with swarm(config(root, lease_s)) as running:
        running.add_owner_roles(*OWNED)
        for name in HONEST:
            running.add_worker(name)
        running.until("the warm-up", lambda status: status.step >= WARM_UP_STEPS)
        yield running


def pair(running: Swarm, steps: int, *, staller_first: bool) -> list[Phase]:
    """One phase with a staller and one without, next to each other."""
    return [phase(running, steps, with_staller=with_staller) for with_staller in (staller_first, not staller_first)]


def phase(running: Swarm, steps: int, *, with_staller: bool) -> Phase:
    """Steps of the real swarm, with a new staller or without one."""
    with staller(running) if with_staller else no_staller() as stalled:
        if with_staller:
            running.until("the first stalled lease", lambda status: stalled() > 0)
        first = next_step(running)
        running.until(f"step {first + steps}", lambda status: status.step > first + steps)
        formed = {batch["step"]: batch["formed_s"] for batch in running.history().batches}
        took = [round(formed[step + 1] - formed[step], 3) for step in range(first, first + steps)]
        return Phase(with_staller, steps, formed[first + steps] - formed[first], took, stalled())


def next_step(running: Swarm) -> int:
    """Waits for the next batch; returns its step."""
    now = running.client.status().step
    running.until("the next batch", lambda status: status.step > now)
    return now


@contextmanager
def no_staller() -> Iterator[Callable[[], int]]:
    yield lambda: 0


@contextmanager
def staller(running: Swarm) -> Iterator[Callable[[], int]]:
    """A staller with a new key, and how many leases it was granted so far."""
    log = running.directory.logs / f"staller-{secrets.token_hex(4)}.log"
    with log.open("wb") as output:
        command = [sys.executable, __file__, str(running.directory.descriptor_file)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield lambda: log.read_text().count(LEASED)
    finally:
        process.kill()
        process.wait()


def stall(descriptor: RunDescriptor) -> None:
    with CoordinatorClient.for_run(descriptor, Keypair.generate()) as client:
        numerics_class = descriptor.numerics_classes[0]
        client.register(api.RegisterBody(name="staller", numerics_class=numerics_class, tokens_per_s=1e6))
        newest, beaten_at = 0, 0.0
        while True:
            held = list(range(max(0, newest - 8), newest + 1))
            answer = client.lease(api.LeaseBody(request_id=secrets.token_hex(16), held_versions=held))
            if answer.lease is not None:
                print(LEASED, answer.lease.step, answer.lease.slot, flush=True)
            newest = max(newest, answer.wanted_version)
            if time.monotonic() - beaten_at > 3.0:
                client.heartbeat(api.HeartbeatBody(activity="generating"))
                beaten_at = time.monotonic()
            time.sleep(ASKS_EVERY_S)


if __name__ == "__main__":
    stall(open_descriptor(Path(sys.argv[1]).read_bytes()))
