"""How much of a slow broadcast does asynchrony hide, and how long does training stand still for its weights?

    python benchmarks/overlap.py [--steps 15] [--groups 16] [--versions 6] [--model DIR] [--standstill-only]

Real roles, each its own process, behind one capped link:

origin → relay → capped link → worker, with coordinator, trainer and validator beside them, the bundled policy and the demo task.
First a run without a cap gives the duration of a step; then the link is capped so that a broadcast takes that long, and the same
run is made at async 0 and at async 2. A broadcast lasts from the moment the trainer has announced a version until the worker has
it, verified. `hidden_fraction` is 1 − (time in which the worker had no work because it lacked weights) ÷ (time of the
broadcasts), at async 2; `speedup` is step time at async 0 ÷ step time at async 2. The first steps of each run do not count.

`trainer_standstill` is measured with SmolLM2-135M in a process of its own: trainer, publisher and origin are the real ones, steps
are trained on the batch of trainer_vs_trl.py, and versions are recorded with nobody (one short request in a run). It is the median
time that training stands still for a version (waiting for the one before, and the copy) ÷ the median time to stage one. Versions
staged beside a step and versions staged alone take turns; the latter are the divisor, since sharing cores makes staging longer.
`step_slowdown` is the time of a step with a version being staged beside it ÷ without.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config import ShoalConfig, build_config, to_toml
from shoal.protocol import api

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 3
RUN_DEADLINE_S = 300.0
LOOK_INTERVAL_S = 0.2
WITHOUT_CAP_BYTES_S = 1e12


@dataclass(frozen=True)
class Measured:
    """One run after its warm-up: seconds of a step, of each broadcast, and of the worker's waits for weights."""

    step_s: float
    broadcasts_s: list[float]
    waited_for_weights_s: float
    waited_for_trainer_s: float
    bytes_total: int

    @property
    def hidden_fraction(self) -> float:
        return 1.0 - self.waited_for_weights_s / sum(self.broadcasts_s)


def make_config(root: Path, level: int, steps: int, groups: int, ports: list[int]) -> ShoalConfig:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "overlap", "dir": str(root / "run"), "steps": steps, "seed": 7},
        "tasks": {"count": 2000, "heldout": 16},
        "rollouts": {"group_size": 8, "tasks_per_slot": 4, "max_prompt_tokens": 64, "max_new_tokens": 48},
        "reward": {"target_lengths": [21, 30], "length_alpha": 0.003},
        "training": {
            "async_level": level,
            "groups_per_step": groups,
            "learning_rate": 1e-9,  # keeps the policy, and so the work of a step, as it is
            "kl_beta": 0.0,
            "entropy_eta": 0.0,
            "minibatches": 1,
            "checkpoint_every": 1000,
        },
        "coordinator": {"port": ports[0], "gone_after_s": 6, "lease_s": 60},
        "broadcast": {"port": ports[1], "shard_bytes": 1 << 18},
        "trust": {"key_share": 1.0, "probation_share": 1.0, "probation_audits": 1},
        "validation": {"numerics_classes": ["torch/float32/cpu"]},
    }
    return build_config(tree)


@contextmanager
def roles(
    root: Path, config: ShoalConfig, relay_port: int, link_url: str, *, trainer: list[str] | None = None
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All roles of the run, the worker last; stopped together. `trainer` is a command to use instead of `shoal train`."""
    run_file = root / "run.toml"
    run_file.write_text(to_toml(config))
    url = config.coordinator_url
    commands = {
        "init": ["init", str(run_file)],
        "coordinator": ["coordinator", str(run_file)],
        "train": ["train", str(run_file), "--threads", "1"],
        "relay": [
            *("relay", "--upstream", config.origin_url, "--port", str(relay_port), "--dir", str(root / "relay")),
            *("--coordinator", url, "--public-url", link_url),
        ],
        "validate": ["validate", str(run_file), "--threads", "1"],
        "work": ["work", url, "--dir", str(root / "worker"), "--threads", "1"],
    }
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, arguments in commands.items():
            log = (root / f"{name}.log").open("wb")
            command = trainer if name == "train" and trainer else [sys.executable, "-m", "shoal", *arguments]
            started[name] = subprocess.Popen(command, stdout=log, stderr=log)
            if name == "init" and started[name].wait(timeout=RUN_DEADLINE_S):
                raise SystemExit((root / "init.log").read_text())
        yield started
    finally:
        for process in reversed(started.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in started.values():
            process.wait(timeout=30)


def events(path: Path, name: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def run(level: int, steps: int, groups: int, bytes_s: float) -> Measured:
    broadcast = importlib.import_module("broadcast")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ports = [broadcast.free_port() for _ in range(3)]
        link = broadcast.Proxy(ports[2], bytes_s)
        config = make_config(root, level, steps, groups, ports)
        with roles(root, config, ports[2], f"http://127.0.0.1:{link.port}") as processes:
            wait_until_finished(root, processes, steps)
        return measure(root, steps)


def wait_until_finished(root: Path, processes: dict[str, subprocess.Popen[bytes]], steps: int) -> None:
    """Until the last version is out; the deadline counts from the version before."""
    seen, deadline = -1, time.monotonic() + RUN_DEADLINE_S
    while seen < steps:
        published = events(root / "run" / "events" / "trainer.jsonl", "published")
        if published and published[-1]["version"] > seen:
            seen, deadline = published[-1]["version"], time.monotonic() + RUN_DEADLINE_S
        ended = [name for name, process in processes.items() if process.poll()]  # 0: its work is done
        if time.monotonic() > deadline or ended:
            log = (root / f"{ended[0] if ended else 'train'}.log").read_text()[-2000:]
            raise SystemExit(f"The run did not reach version {steps}: {ended or 'too slow'}.\n{log}")
        time.sleep(LOOK_INTERVAL_S)


def measure(root: Path, steps: int) -> Measured:
    """From the events that trainer and worker left; times are of one machine's clock."""
    published = {event["version"]: event for event in events(root / "run" / "events" / "trainer.jsonl", "published")}
    worker = root / "worker" / "events.jsonl"
    fetched = {event["version"]: event["at"] for event in events(worker, "weights_fetched")}
    begin, end = published[WARM_UP_STEPS]["at"], published[steps]["at"]
    waits = [event for event in events(worker, "waited") if begin < event["at"] <= end]

    def waited(reason: str) -> float:
        return sum(float(event["seconds"]) for event in waits if event["reason"] == reason)

    counted = [version for version in range(WARM_UP_STEPS, steps) if version in fetched]
    return Measured(
        step_s=(end - begin) / (steps - WARM_UP_STEPS),
        broadcasts_s=[fetched[version] - published[version]["at"] for version in counted],
        waited_for_weights_s=waited("need_weights"),
        waited_for_trainer_s=waited("waiting_for_trainer"),
        bytes_total=published[steps]["bytes_total"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--groups", type=int, default=16, help="Useful groups in a batch; sets the length of a step.")
    parser.add_argument("--versions", type=int, default=6, help="Versions of each kind that trainer_standstill counts.")
    parser.add_argument(
        "--model", type=Path, default=None, help="Model of trainer_standstill; SmolLM2-135M by default."
    )
    parser.add_argument("--standstill-only", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(standstill(arguments.child, arguments.versions, os.cpu_count() or 1)))
        return
    stood_still = measure_standstill(arguments)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    if arguments.standstill_only:
        print(json.dumps({"benchmark": "overlap", **stood_still, "machine": machine}))
        return
    free = run(2, arguments.steps, arguments.groups, WITHOUT_CAP_BYTES_S)
    _say("async 2, no cap", free)
    # What a broadcast takes without a cap (polls, two hops, verification) comes on top of the link.
    bytes_s = free.bytes_total / max(free.step_s / 2, free.step_s - statistics.median(free.broadcasts_s))
    capped = {}
    for level in (0, 2):
        capped[level] = run(level, arguments.steps, arguments.groups, bytes_s)
        _say(f"async {level}, capped at {bytes_s / 1e3:.0f} kB/s", capped[level])
    broadcast_s = statistics.median(capped[2].broadcasts_s)
    result = {
        "benchmark": "overlap",
        "hidden_fraction": round(capped[2].hidden_fraction, 3),
        "hidden_fraction_async_0": round(capped[0].hidden_fraction, 3),
        "speedup": round(capped[0].step_s / capped[2].step_s, 3),
        "step_s": {"no_cap_async_2": round(free.step_s, 3)}
        | {f"async_{level}": round(measured.step_s, 3) for level, measured in capped.items()},
        "broadcast_s": round(broadcast_s, 3),
        "broadcast_over_step": round(broadcast_s / capped[2].step_s, 3),
        "waited_for_weights_s": {str(level): round(one.waited_for_weights_s, 3) for level, one in capped.items()},
        "versions": {str(level): len(one.broadcasts_s) for level, one in capped.items()},
        "link_bytes_s": round(bytes_s),
        "version_bytes": free.bytes_total,
        "steps": arguments.steps - WARM_UP_STEPS,
        "groups_per_step": arguments.groups,
        **stood_still,
        "machine": machine,
    }
    print(json.dumps(result))


class Unrecorded:
    """In place of the coordinator's client: a version is taken as recorded."""

    def publish(self, body: api.VersionBody) -> api.VersionAnswer:
        return api.VersionAnswer(ledger_head="00" * 32)


def standstill(model: Path, versions: int, threads: int) -> dict[str, Any]:
    """In the child: trains and publishes `versions` times beside a step and as often alone, in turns."""
    import torch

    from shoal.broadcast import Origin, OriginSettings
    from shoal.identity import Keypair
    from shoal.metrics import EventLog
    from shoal.training import Group, Sample, Trainer
    from shoal.training.service import TrainerService

    torch.set_num_threads(threads)
    batch = importlib.import_module("trainer_vs_trl")
    samples = [Sample(prompt, output, reward, reward) for prompt, output, reward in batch.make_batch(model)]
    starts = range(0, len(samples), batch.GROUP_SIZE)
    groups = [Group(str(start), samples[start : start + batch.GROUP_SIZE]) for start in starts]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        training = {"learning_rate": 1e-6, "kl_beta": 0.0, "minibatches": 1, "micro_batch_tokens": 1024}
        config = build_config({"run": {"dir": folder, "steps": 10_000}, "training": training})
        trainer = Trainer(config.training, model, work_dir=root / "trainer", temperature=1.0, seed=0)
        origin = Origin(root / "origin", Keypair.generate(), OriginSettings(run_id="standstill", keyframe_every=100))
        stand_ins: Any = (None, Unrecorded())
        service = TrainerService(
            config, stand_ins[0], trainer, stand_ins[1], origin, metrics=EventLog(root / "events.jsonl")
        )
        step_s: dict[str, list[float]] = {"beside": [], "alone": []}
        assert service.publisher is not None
        service.publish()
        for number in range(2 * versions + 2):
            kind = "alone" if number % 2 else "beside"
            if kind == "alone":
                service.publisher.wait()
            begun = time.perf_counter()
            trainer.train_step(groups)
            step_s[kind].append(time.perf_counter() - begun)
            service.publish()
        service.publisher.wait()
        return _standstill_metrics(events(root / "events.jsonl", "published")[3:], step_s)


def _standstill_metrics(published: list[dict[str, Any]], step_s: dict[str, list[float]]) -> dict[str, Any]:
    """An even version was made by a step that ran alone, and is staged beside the next one; the first two are a warm-up."""

    def median(name: str, parity: int) -> float:
        return statistics.median(float(event[name]) for event in published if event["version"] % 2 == parity)

    copy_s, alone_s, beside_s = (
        statistics.median(event["time_standstill_s"] for event in published),
        median("time_stage_s", 1),
        median("time_stage_s", 0),
    )
    steps = {kind: statistics.median(seconds[1:]) for kind, seconds in step_s.items()}
    return {
        "trainer_standstill": round(copy_s / alone_s, 4),
        "standstill_s": round(copy_s, 4),
        "stage_s": {"alone": round(alone_s, 3), "beside": round(beside_s, 3)},
        "train_step_s": {kind: round(seconds, 3) for kind, seconds in steps.items()},
        "step_slowdown": round(steps["beside"] / steps["alone"], 3),
        "standstill_versions": len(published),
        "weights_bytes": published[-1]["weights_bytes"],
        "delta_bytes": published[-1]["bytes_total"],
    }


def measure_standstill(arguments: argparse.Namespace) -> dict[str, Any]:
    trl = importlib.import_module("trainer_vs_trl")
    model = arguments.model or trl.smollm2(Path(sys.executable))
    command = [sys.executable, __file__, "--child", str(model), "--versions", str(arguments.versions)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _say(name: str, measured: Measured) -> None:
    print(
        f"{name}: step {measured.step_s:.2f} s, broadcast {statistics.median(measured.broadcasts_s):.2f} s, "
        f"waited {measured.waited_for_weights_s:.2f} s for weights, {measured.waited_for_trainer_s:.2f} s for the trainer",
        flush=True,
    )


if __name__ == "__main__":
    main()
