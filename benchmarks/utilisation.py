"""How full does a worker keep its engine when completions differ much in length and weights change? SmolLM2-135M, 8 rows.

    python benchmarks/utilisation.py [--rounds 3] [--median 12] [--versions 2] [--engine torch] [--cpu-time] [--minutes 8]

Slots of 8 samples; completions end after lognormal lengths (sigma 1, cut at 16 times the median) by a rule that only the benchmark
knows; a new version every 160 completions; nobody validates: files are accepted as they come. The worker has one
core; coordinator, relay, origin and the rest the other. Two phases take turns: the worker, and the loop that it replaced, slot by
slot, which is kept here. Before and after each, in the same process, the engine runs alone with an endless queue: its saturated
rate. Phases are kept in `--pieces`; with `--minutes` the same command goes on later. A phase lasts from the end of one swap of
weights to the end of a later one, so that swaps and the rows that end before them count. `utilisation` is useful tokens per second
over the saturated rate; medians over rounds. `bound` is what the tail of each version leaves of it if nothing else cost time, by
counting.

`--cpu-time` is for a busy machine: time is the processor time of the worker's process, all threads, plus the time in which its
engine waited for somebody else, so that other programs on the core do not count, and idle rows and waits still do.
"""

import argparse
import importlib
import json
import math
import os
import platform
import random
import runpy
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.broadcast import WeightClient
from shoal.config import ShoalConfig, build_config, to_toml
from shoal.errors import UnavailableError
from shoal.identity import Keypair
from shoal.policy.engine import (
    Completion,
    Engine,
    GenerationRequest,
    Scored,
    ScoreRequest,
    Stream,
    generate_all,
    positions_needed,
)
from shoal.policy.episodes import EpisodeStream
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.rollouts import RolloutLimits, read_rollouts
from shoal.rundir import RunDirectory
from shoal.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
FETCH = ROOT / "examples" / "smollm2" / "fetch.py"
CALIBRATION = ROOT / "examples" / "smollm2" / "calibration.json"
ROWS, GROUP, GROUPS_PER_VERSION = 8, 8, 20
LONGEST = 16
"""Times the median length."""
MAX_PROMPT = 80
CHANGED_SHARE = 0.005
"""Of the values of a tensor, from one version to the next: about what training changes in bf16."""
START_DEADLINE_S = 600.0
WORKER_CORE, OTHER_CORE = "0", "1"
SEED = 17


def length(seed: int, median: int) -> int:
    drawn = random.Random(seed).lognormvariate(math.log(median), 1.0)
    return max(1, min(round(drawn), LONGEST * median))


class Clock:
    """The time of the wall, or the processor time of this process plus what it waited."""

    def __init__(self) -> None:
        self.by_cpu = False
        self._waited_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._waited_s if self.by_cpu else time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began, cpu = time.monotonic(), time.process_time()
        yield
        self._waited_s += max(0.0, time.monotonic() - began - (time.process_time() - cpu))


CLOCK = Clock()


@dataclass
class Record:
    """What the engine did: when weights were in place, and how many tokens of completions had ended when."""

    loaded_at: list[float] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)
    on_load: Callable[[int], None] = lambda count: None

    def tokens_per_s(self, first: int) -> float:
        """Between the end of the load with this number and the end of the last one."""
        begin, end = self.loaded_at[first], self.loaded_at[-1]
        return sum(tokens for at, tokens in self.ended if begin < at <= end) / (end - begin)

    def completions_per_swap(self, first: int) -> float:
        begin, end = self.loaded_at[first], self.loaded_at[-1]
        return sum(begin < at <= end for at, _ in self.ended) / (len(self.loaded_at) - 1 - first)


class MeasuredStream:
    """Ends completions by the benchmark's rule and notes them."""

    def __init__(self, stream: Stream, median: int, record: Record) -> None:
        self._stream, self._median, self._record, self.rows = stream, median, record, stream.rows

    @property
    def unfinished(self) -> int:
        return self._stream.unfinished

    @property
    def generated(self) -> int:
        return self._stream.generated

    def submit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        return self._stream.submit(
            [replace(one, max_new_tokens=min(one.max_new_tokens, length(one.seed, self._median))) for one in requests]
        )

    def step(self) -> list[tuple[int, Completion]]:
        ended = self._stream.step()
        now = CLOCK()
        self._record.ended += [(now, len(completion.tokens)) for _, completion in ended]
        return ended

    def cancel(self, numbers: Collection[int]) -> None:
        self._stream.cancel(numbers)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "MeasuredStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MeasuredEngine:
    """Any engine, its completions ended by the benchmark's rule."""

    def __init__(self, engine: Engine, median: int) -> None:
        self._engine, self._median = engine, median
        self.numerics_class = "torch/float32/cpu"  # what the run admits; nobody validates
        self.vocab_size = engine.vocab_size
        self.record = Record()

    def load(self, directory: Path) -> None:
        self._engine.load(directory)
        self.record.loaded_at.append(CLOCK())
        self.record.on_load(len(self.record.loaded_at))

    def open(self, *, temperature: float, max_tokens: int, rows: int | None = None) -> MeasuredStream:
        stream = self._engine.open(temperature=temperature, max_tokens=max_tokens, rows=rows)
        return MeasuredStream(stream, self._median, self.record)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        with self.open(temperature=temperature, max_tokens=positions_needed(requests), rows=ROWS) as stream:
            return generate_all(stream, requests, on_progress)

    def score(self, requests: Sequence[ScoreRequest], *, temperature: float) -> list[Scored]:
        return self._engine.score(requests, temperature=temperature)


class Continuous(Worker):
    """The worker, with the time that its engine waits."""

    def _idle(self) -> None:
        with CLOCK.waiting():
            super()._idle()


class SlotBySlot(Worker):
    """The loop before engines were fed continuously: the next lease after the last sample of a slot, uploads one at a time."""

    def _work(self, stream: EpisodeStream) -> None:
        while not self._stopping.is_set():
            self._hear_all()
            body = api.LeaseBody(request_id=secrets.token_hex(16), held_versions=self.weights.held()[-16:])
            with CLOCK.waiting():
                answer = self.client.lease(body)
                if answer.lease is None:
                    self._stopping.wait(answer.retry_after_s)
                    continue
                slot = self.prepare(answer.lease)
            self._load(slot.version, slot.weights)
            if self._stopping.is_set():
                self._leases.give_back(slot.lease)
                return
            self.generation.slots.append(slot)
            self.generation.enter(slot, len(slot.items), stream)
            while stream.unfinished:
                self._step(stream)
            with CLOCK.waiting():
                while self._deliveries.pending > 1:
                    time.sleep(0.001)


PHASES: dict[str, type[Worker]] = {"continuous": Continuous, "slot_by_slot": SlotBySlot}


def make_config(root: Path, model: Path, median: int, ports: Sequence[int]) -> ShoalConfig:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "utilisation", "dir": str(root / "run"), "steps": 100_000, "seed": SEED},
        "model": {"path": str(model)},
        "tasks": {"count": 2000, "heldout": 16, "thinking": False, "system_prompt": "Answer with one number."},
        "rollouts": {
            "group_size": GROUP,
            "tasks_per_slot": 1,
            "max_prompt_tokens": MAX_PROMPT,
            "max_new_tokens": LONGEST * median,
        },
        "training": {"async_level": 2, "groups_per_step": GROUPS_PER_VERSION, "oversampling": 3.0},
        "coordinator": {"port": ports[0], "lease_s": 1200, "gone_after_s": 300},
        "broadcast": {"port": ports[1]},
        "trust": {"key_share": 1.0, "probation_share": 1.0, "probation_audits": 1},
        "validation": {"calibration": str(CALIBRATION), "numerics_classes": ["torch/float32/cpu"]},
    }
    return build_config(tree)


class Owner:
    """Trainer and validator without their work: publishes a version per batch, and accepts every file."""

    def __init__(self, directory: RunDirectory) -> None:
        from shoal.policy import build_model
        from shoal.policy.weights import WireCopy
        from shoal.roles.trainer import build_origin, register_files, serve

        config, self.descriptor = directory.config(), directory.descriptor()
        self.trainer = self._client(config, directory.existing_key("trainer"))
        self.validator = self._client(config, directory.existing_key("validator"))
        self.origin = build_origin(
            config, self.descriptor, directory.origin, directory.existing_key("run"), self.trainer.server_time
        )
        register_files(self.origin, self.descriptor, directory.origin)
        self.server = serve(self.origin, config, _no_events())
        self.model = build_model(Path(config.model.path), "bfloat16", "cpu")
        self.copy = WireCopy(self.model)

    def _client(self, config: ShoalConfig, key: Keypair) -> CoordinatorClient:
        return CoordinatorClient.for_run(self.descriptor, key, config.coordinator_url, deadline_s=START_DEADLINE_S)

    def run(self) -> None:
        threading.Thread(target=self._accept_forever, daemon=True).start()
        version = 0
        while True:
            self._publish(version)
            self._take_batch(version)
            version += 1
            self._change()

    def _take_batch(self, step: int) -> None:
        """Waits for the batch of the step and lets every group of it pass."""
        batch = self.trainer.batch(step).batch
        while batch is None or batch.state == "proposed":
            if batch is None:
                batch = self.trainer.batch(step).batch
            else:
                passing = dict.fromkeys((group.group_id for group in batch.groups), 0.0)
                body = api.ScreeningBody(step=step, attempt=batch.attempt, statistics=passing)
                batch = self.trainer.screen(body)

    def _publish(self, version: int) -> None:
        publication = self.origin.stage(version, self.copy.take())
        body = api.VersionBody(
            version=version,
            manifest_digest=publication.manifest_digest,
            weights_digest=publication.weights_digest,
            bytes_total=publication.follow_bytes,
        )
        self.origin.announce(ledger_head=self.trainer.publish(body).ledger_head)
        print(f"published {version}", flush=True)

    def _change(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                flat = parameter.view(-1)
                changed = torch.randint(flat.numel(), (max(1, int(CHANGED_SHARE * flat.numel())),))
                flat[changed] *= 1 + 2**-7  # the next bf16 value

    def _accept_forever(self) -> None:
        limits = RolloutLimits.of(self.descriptor)
        while True:
            answer = self.validator.claim(api.ClaimBody(request_id=secrets.token_hex(16), wait_s=10))
            if answer.claim is not None:
                self._accept(answer.claim, limits)

    def _accept(self, claim: api.Claim, limits: RolloutLimits) -> None:
        data = self.validator.submission_file(claim.submission_id, claim.digest)
        rows = read_rollouts(data, limits)[1]
        verdict = {
            "claim_id": claim.claim_id,
            "submission_id": claim.submission_id,
            "accepted": True,
            "reasons": [],
            "audited_groups": claim.audit_groups,
            "groups": [
                {
                    "group": 0,
                    "task_id": rows[0].task_id,
                    "useful": True,
                    "tokens": sum(len(row.output_tokens) for row in rows),
                    "rewards": [row.reward for row in rows],
                    "task_rewards": [row.task_reward for row in rows],
                }
            ],
        }
        self.validator.verdict(api.VerdictBody.model_validate(verdict))


def _no_events() -> Any:
    from shoal.metrics import EventLog

    return EventLog()


def work(url: str, root: Path, options: argparse.Namespace) -> None:
    """The worker's process: one phase; its last line is JSON."""
    from shoal.joined import join_run
    from shoal.roles.joining import joined_descriptor
    from shoal.roles.process import use_threads

    use_threads(1)
    CLOCK.by_cpu = options.cpu_time
    descriptor = joined_descriptor(url, None, root, _say)
    key = Keypair.load_or_create(root / "worker.key")
    client = CoordinatorClient.for_run(descriptor, key, url, deadline_s=START_DEADLINE_S, on_wait=_say)
    client.relays()
    run = join_run(descriptor, root / "cache", clock=client.server_time, report=_say)
    engine = MeasuredEngine(_engine(options.engine, run.model_files), options.median)
    engine.load(_first_weights(run.weights))
    prompts = [item.prompt_tokens for seed in range(64) for item in run.workload.items(seed.to_bytes(32, "big"))[:1]]
    worker = PHASES[options.phase](run, client, engine, name=options.phase, report=_say)
    before = _saturated(engine, prompts, options.median)
    found = _work_phase(worker, engine, options.versions)
    alone = (before + _saturated(engine, prompts, options.median)) / 2
    print(json.dumps({"phase": options.phase, "saturated_tokens_per_s": alone, **found}), flush=True)


def _first_weights(weights: WeightClient) -> Path:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            return weights.fetch_newest(deadline_s=START_DEADLINE_S)[1]
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _engine(kind: str, model_files: Path) -> Engine:
    if kind == "vllm":
        from shoal.policy.vllm.engine import VllmEngine

        return VllmEngine(model_files, eos_token_ids=(), max_batch=ROWS, max_tokens=2048)
    from shoal.policy import TorchEngine

    return TorchEngine(model_files, eos_token_ids=(), max_batch=ROWS)


def _work_phase(worker: Worker, engine: MeasuredEngine, versions: int) -> dict[str, float]:
    """From the first swap after joining, through this number of versions."""
    engine.record = Record(on_load=lambda count: worker.stop() if count >= 2 + versions else None)
    worker.run()
    record = engine.record
    return {"tokens_per_s": record.tokens_per_s(first=1), "completions_per_swap": record.completions_per_swap(first=1)}


def _saturated(engine: MeasuredEngine, prompts: Sequence[tuple[int, ...]], median: int) -> float:
    """The engine with an endless queue of groups, after every row was refilled once."""
    rng = random.Random(SEED)
    with engine.open(temperature=1.0, max_tokens=MAX_PROMPT + LONGEST * median, rows=ROWS) as stream:

        def step() -> None:
            while stream.unfinished < ROWS + GROUP:
                prompt = rng.choice(prompts)
                stream.submit([GenerationRequest(prompt, rng.getrandbits(64), LONGEST * median) for _ in range(GROUP)])
            stream.step()

        for _ in range(3 * median):
            step()
        begin, before = CLOCK(), stream.generated
        for _ in range(16 * median):
            step()
        return (stream.generated - before) / (CLOCK() - begin)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def processes(root: Path, config: ShoalConfig, relay_port: int) -> Iterator[None]:
    """Coordinator, relay and owner on the other core."""
    run_file = root / "run.toml"
    run_file.write_text(to_toml(config))
    shoal = [sys.executable, "-m", "shoal"]
    subprocess.run([*shoal, "init", str(run_file)], check=True, stdout=subprocess.DEVNULL)
    relay = ["relay", "--upstream", config.origin_url, "--port", str(relay_port), "--dir", str(root / "relay")]
    relay += ["--coordinator", config.coordinator_url, "--public-url", f"http://127.0.0.1:{relay_port}"]
    commands = {
        "coordinator": [*shoal, "coordinator", str(run_file)],
        "owner": [sys.executable, __file__, "--owner", str(config.run.dir)],
        "relay": [*shoal, *relay],
    }
    started = []
    try:
        for name, command in commands.items():
            log = (root / f"{name}.log").open("wb")
            pinned = ["taskset", "-c", OTHER_CORE, *command]
            started.append(subprocess.Popen(pinned, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}))
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)


def measure(options: argparse.Namespace, model: Path, phase: str) -> dict[str, Any]:
    """One phase with processes of its own."""
    broadcast = runpy.run_path(str(ROOT / "benchmarks" / "broadcast.py"))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ports = [broadcast["free_port"]() for _ in range(3)]
        config = make_config(root, model, options.median, ports)
        with processes(root, config, ports[2]):
            command = [sys.executable, __file__, "--work", config.coordinator_url, "--dir", str(root / "worker")]
            for name in ("median", "versions", "engine"):
                command += [f"--{name}", str(getattr(options, name))]
            command += ["--phase", phase, *(["--cpu-time"] if options.cpu_time else [])]
            worker = subprocess.run(["taskset", "-c", WORKER_CORE, *command], stdout=subprocess.PIPE, text=True)
            if worker.returncode:
                raise SystemExit("The worker failed.\n" + (root / "owner.log").read_text()[-2000:])
            found: dict[str, Any] = json.loads(worker.stdout.splitlines()[-1])
            return found


def bound(median: int, *, by_slot: bool, versions: int = 200) -> float:
    """What swaps at 160 completions leave if nothing else costs time: rows are counted, step by step."""
    rng = random.Random(SEED)
    steps = tokens = 0
    for _ in range(versions):
        running: list[int] = []
        entered = ended = 0
        while ended < entered or ended < GROUPS_PER_VERSION * GROUP:
            may_enter = entered % GROUP or ended < GROUPS_PER_VERSION * GROUP  # a slot that was begun is finished
            free = ROWS - len(running)
            if may_enter and (free == ROWS if by_slot else free > 0):
                new = [length(rng.getrandbits(64), median) for _ in range(free if by_slot else 1)]
                entered += len(new)
                tokens += sum(new)
                running += new
                continue
            steps += 1
            running = [left - 1 for left in running if left > 1]
            ended = entered - len(running)
    return tokens / (ROWS * steps)


def report(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    def of(phase: str, name: str) -> list[float]:
        return [one[name] for one in found if one["phase"] == phase]

    # Each phase has a saturated one before and after it: a machine that is slower for a while is slower for both.
    shares = {
        phase: [one["tokens_per_s"] / one["saturated_tokens_per_s"] for one in found if one["phase"] == phase]
        for phase in PHASES
    }
    speedups = [now / before for now, before in zip(shares["continuous"], shares["slot_by_slot"], strict=True)]
    return {
        "benchmark": "utilisation",
        "utilisation": round(statistics.median(shares["continuous"]), 3),
        "speedup_over_slot_by_slot": round(statistics.median(speedups), 3),
        "utilisation_slot_by_slot": round(statistics.median(shares["slot_by_slot"]), 3),
        "bound": round(bound(options.median, by_slot=False), 3),
        "bound_slot_by_slot": round(bound(options.median, by_slot=True), 3),
        "saturated_tokens_per_s": round(statistics.median(one["saturated_tokens_per_s"] for one in found), 1),
        "tokens_per_s": round(statistics.median(of("continuous", "tokens_per_s")), 1),
        "completions_per_swap": round(statistics.median(of("continuous", "completions_per_swap"))),
        "rounds": {phase: [round(share, 3) for share in shares[phase]] for phase in PHASES},
        "engine": options.engine,
        "rows": ROWS,
        "slot_samples": GROUP,
        "median_length": options.median,
        "completions_per_version": GROUPS_PER_VERSION * GROUP,
        "versions_per_phase": options.versions,
        "clock": "cpu" if options.cpu_time else "wall",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--median", type=int, default=12, help="Median length of a completion in tokens.")
    parser.add_argument("--versions", type=int, default=2, help="Versions per phase.")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--model", type=Path, help="A model directory; SmolLM2-135M-Instruct by default.")
    parser.add_argument("--cpu-time", action="store_true", help="For a busy machine.")
    pieces_module = importlib.import_module("pieces")
    pieces_module.add_flags(parser, ROOT / "build" / "utilisation.json")
    parser.add_argument("--phase", choices=tuple(PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--owner", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner is not None:
        Owner(RunDirectory(options.owner)).run()
    elif options.work is not None:
        work(options.work, options.dir, options)
    else:
        model = options.model or runpy.run_path(str(FETCH))["fetched"]()
        clock = "cpu" if options.cpu_time else "wall"
        pieces = pieces_module.of(options, (options.engine, model.name, options.median, options.versions, clock))
        found = [
            pieces.get(f"{phase} {number}", lambda phase=phase: measure(options, model, phase))
            for number in range(options.rounds)
            for phase in (list(PHASES) if number % 2 == 0 else list(reversed(PHASES)))
        ]
        print(json.dumps(report(found, options)))


if __name__ == "__main__":
    main()
