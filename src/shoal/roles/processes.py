"""One function per role: builds it from a run directory or a coordinator's address and runs it until it ends.

The command line calls these in its own process; nothing here knows how it was started. Heavy imports stay inside the functions that
need them, so that relay and coordinator start in well under a second.
"""

import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, ShoalError
from shoal.files import remove_all_leftovers, write_atomic
from shoal.identity import Keypair
from shoal.locks import BusyError, hold
from shoal.metrics import EventLog, Report
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient, fetch_descriptor
from shoal.protocol.descriptor import RunDescriptor
from shoal.roles.welcome import describe_judging, describe_model, explain_run, explain_weights, trust_authority
from shoal.rundir import RunDirectory

if TYPE_CHECKING:
    from shoal.broadcast import RelaySettings
    from shoal.training.model.distributed import World
    from shoal.worker import Worker

JOIN_DEADLINE_S = 120.0
LARGEST_CROWD = 64
REPEAT_TROUBLE_S = 10.0
RELAY_GONE_S = 30.0
TAKE_OVER_S = 5.0
"""A role whose predecessor was killed waits this long for the kernel to bury it."""


class PinnedKeyError(ShoalError):
    code = "pinned_key"


class SpokenTrouble(EventLog):
    """Counts like any other, and tells the operator what is wrong: at once, and again while it lasts."""

    def __init__(
        self,
        path: Path,
        report: Report,
        *,
        spoken: Collection[str] = ("trouble", "relay_failed", "relay_lied"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path)
        self._report, self._spoken, self._monotonic = report, spoken, monotonic
        self._told: dict[object, float] = {}

    def event(self, name: str, /, **fields: object) -> None:
        super().event(name, **fields)
        if name in self._spoken:
            reason, relay = str(fields.get("reason", "")), fields.get("relay")
            now = self._monotonic()
            self._told = {what: at for what, at in self._told.items() if now - at < REPEAT_TROUBLE_S}
            what = (name, relay or reason)
            if what not in self._told:
                self._told[what] = now
                self._report(f"{relay} lied and is avoided: {reason}" if name == "relay_lied" else reason)


def coordinate(directory: RunDirectory, report: Report) -> None:
    from shoal.coordinator import run_coordinator
    from shoal.coordinator.rules.trust import LossRule

    def on_ready(url: str) -> None:
        report(f"coordinator of {directory.descriptor().run_id} at {url}")
        report(f"cheating loses: {LossRule.of(directory.config())}")

    run_coordinator(directory, on_ready=on_ready)


def train(directory: RunDirectory, report: Report, *, threads: int) -> None:
    """Trains, publishes, and goes on serving the last versions until it is stopped."""
    use_threads(threads)
    from shoal.training.model.distributed import World

    world = World.join(directory.config().training.device)
    busy = f"Another trainer uses {directory.trainer}."
    with hold(directory.trainer / "lock", busy, wait_s=TAKE_OVER_S) if world.rank == 0 else nullcontext():
        _train(directory, world, report)


def _train(directory: RunDirectory, world: "World", report: Report) -> None:
    from shoal.owner.create import register_files
    from shoal.policy.models import resolve_model
    from shoal.training import Trackers, Trainer
    from shoal.training.service import TrainerService, build_origin, serve

    config, descriptor = directory.config(), directory.descriptor()
    metrics = EventLog(directory.events / "trainer.jsonl")
    trainer = Trainer(
        config.training,
        resolve_model(config.model.path),
        work_dir=directory.trainer,
        temperature=config.rollouts.temperature,
        seed=config.run.seed,
        max_new_tokens=config.rollouts.max_new_tokens,
        world=world,
    )
    client = CoordinatorClient.for_run(descriptor, directory.existing_key("trainer"), config.coordinator_url)
    client.deadline_s = JOIN_DEADLINE_S
    if world.rank != 0:
        TrainerService(config, descriptor, trainer, client, None).run()
        return
    origin = build_origin(config, descriptor, directory.origin, directory.existing_key("run"), client.server_time)
    register_files(origin, descriptor, directory.origin)
    server = serve(origin, config, metrics)
    report(f"origin at {server.url}")
    trackers = Trackers(
        directory.trainer, config.training.trackers, run_name=descriptor.run_id, settings=config.model_dump(mode="json")
    )
    try:
        service = TrainerService(
            config, descriptor, trainer, client, origin, metrics=metrics, trackers=trackers, report=report
        )
        finished = service.run()
        if not finished:
            report(f"the run is drained at version {trainer.step}; `shoal run resume` lets it go on")
            return
        report("training is finished; still serving weights, stop with Ctrl-C")
        threading.Event().wait()
    finally:
        trackers.close()
        server.stop()


def validate(directory: RunDirectory, report: Report, *, threads: int, engine: str = "") -> None:
    with own_place(directory.root, "validator") as place:
        _validate(directory, report, place, threads=threads, engine_kind=engine)


@contextmanager
def own_place(root: Path, kind: str) -> Iterator[Path]:
    """The first of kind, kind-2, kind-3 … that no process uses: several of a kind on one host share nothing but the run."""
    for number in range(1, LARGEST_CROWD + 1):
        place = root / (kind if number == 1 else f"{kind}-{number}")
        with ExitStack() as held:
            try:
                held.enter_context(hold(place / "lock", f"Another {kind} uses {place}."))
            except BusyError:
                continue
            remove_all_leftovers(place)
            yield place
            return
    raise BusyError(f"{LARGEST_CROWD} processes work as {kind} in {root}.", hint="Start more on other hosts.")


def _validate(directory: RunDirectory, report: Report, place: Path, *, threads: int, engine_kind: str) -> None:
    use_threads(threads)
    from shoal.coordinator.rules.trust import LossRule
    from shoal.joined import join_run
    from shoal.validation import Validator, load_calibration
    from shoal.validation.calibration.limits import ModelIdentity
    from shoal.validation.reward_models import make_scorer

    config, descriptor = directory.config(), directory.descriptor()
    rule = LossRule.of(config)
    rule.require()
    report(f"cheating loses: {rule}")
    calibration = load_calibration(config.validation.calibration)
    if not config.validation.foreign_calibration:
        calibration.require_model(ModelIdentity(architecture=descriptor.model_files["config.json"].digest))
    report(f"fetching the model files of {descriptor.run_id} from {', '.join(descriptor.relay_urls)}")
    client = CoordinatorClient.for_run(descriptor, directory.existing_key("validator"), config.coordinator_url)
    run = join_run(descriptor, place, keep_versions=descriptor.async_level + 3, clock=client.server_time)
    engine = run.make_engine(engine_kind or config.validation.engine)
    metrics = EventLog(directory.events / f"{place.name}.jsonl")
    report(f"judging for {descriptor.run_id} with {engine.numerics_class}")
    learned = make_scorer(config.validation.reward_models, descriptor, run.workload.tasks.train)
    Validator(run, client, engine, calibration, learned=learned, metrics=metrics, report=report).run()


def evaluate(directory: RunDirectory, report: Report, *, threads: int) -> None:
    use_threads(threads)
    with own_place(directory.root, "evaluator") as root:
        _evaluate(directory, root, report)


def _evaluate(directory: RunDirectory, root: Path, report: Report) -> None:
    from shoal.joined import join_run
    from shoal.validation import Evaluator

    config, descriptor = directory.config(), directory.descriptor()
    report(f"fetching the model files of {descriptor.run_id} from {', '.join(descriptor.relay_urls)}")
    client = CoordinatorClient.for_run(descriptor, directory.existing_key("evaluator"), config.coordinator_url)
    run = join_run(descriptor, root, heldout=True, clock=client.server_time)
    settings = config.evaluation
    report(f"measuring every {settings.every} versions of {descriptor.run_id}")
    Evaluator(
        run,
        client,
        run.make_engine(),
        every=settings.every,
        samples=settings.samples,
        steps=config.run.steps,
        report=report,
    ).run()


def relay(
    settings: "RelaySettings", report: Report, *, coordinator: str | None = None, authority: Path | None = None
) -> None:
    """Runs a relay until SIGINT or SIGTERM."""
    from shoal.broadcast import Neighbours, Relay

    root, run_key = settings.root, settings.run_key
    if authority is not None:
        trust_authority(authority, root / "trusted.pem")
    metrics = SpokenTrouble(root / "events.jsonl", report)
    neighbours, announce, clock = None, None, time.time
    if coordinator is not None:
        descriptor = joined_descriptor(coordinator, run_key, root, report)
        settings = replace(settings, run_key=descriptor.run_key)
        client = CoordinatorClient.for_run(descriptor, Keypair.load_or_create(root / "relay.key"), coordinator)
        clock = client.server_time
        neighbours = Neighbours(settings.upstreams, settings.peers)

        def announce(url: str) -> None:
            answer = client.announce_relay(
                api.RelayBody(
                    url=url,
                    exchanges=neighbours.exchanges,
                    newest_version=_newest_version(root, descriptor.run_key),
                    bytes_sent=int(metrics.counters["bytes_sent"]),
                    bytes_received=int(metrics.counters["bytes_received"]),
                )
            )
            living = [view for view in answer.relays if view.last_seen_s <= RELAY_GONE_S]
            spare = [answer.origin_url, *descriptor.relay_urls]
            neighbours.update([(view.url, view.exchanges) for view in living if view.url != url], spare)

    with hold(root / "lock", f"Another relay uses {root}.", hint="Give this one its own directory with --dir."):
        remove_all_leftovers(root)
        relay = Relay(settings, neighbours=neighbours, announce=announce, metrics=metrics, clock=clock)
        stopped = stop_signal()
        relay.start()
        report(f"relay at {relay.url}, following {', '.join(settings.upstreams)}")
        if coordinator is not None and settings.host in ("0.0.0.0", "::") and settings.public_url is None:
            report(f"workers on other machines cannot reach {relay.url}; say how they can with --public-url")
        try:
            stopped.wait()
        finally:
            relay.stop()


def stop_signal() -> threading.Event:
    """Set by SIGINT or SIGTERM from now on."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _newest_version(root: Path, run_key: str) -> int:
    from shoal.broadcast.manifest import open_head

    path = root / "head.json"
    head = open_head(path.read_bytes(), run_key) if path.exists() else None
    return head.versions[-1].version if head and head.versions else -1


def work(
    url: str,
    report: Report,
    *,
    root: Path,
    key_file: Path | None,
    run_key: str | None,
    name: str,
    threads: int,
    engine: str = "torch",
    own_verifiers: Collection[str] = (),
    authority: Path | None = None,
    cheat: str | None = None,
) -> None:
    key_path = key_file or root / "worker.key"
    if os.path.lexists(key_path):
        Keypair.load(key_path)  # a key that cannot be used is told before anybody is waited for
    with hold(root / "lock", f"Another worker uses {root}.", hint="Give this one its own directory with --dir."):
        remove_all_leftovers(root)
        if authority is not None:
            trust_authority(authority, root / "trusted.pem")
        descriptor = joined_descriptor(url, run_key, root, report)
        is_new = not key_path.exists()
        keypair = Keypair.load_or_create(key_path)
        made = ", made just now: it is your account and your credit, keep it" if is_new else ""
        report(f"your key is {key_path}{made}")
        explain_run(descriptor, report)
        use_threads(threads)
        from shoal.joined import join_run
        from shoal.policy.engines import choose_arithmetic, devices_here

        arithmetic = choose_arithmetic(engine, descriptor.numerics_classes, devices_here())
        metrics = SpokenTrouble(root / "events.jsonl", report, spoken=("relay_lied",))
        client = CoordinatorClient.for_run(descriptor, keypair, url)
        client.relays()  # any answer brings the server's time, by which a head has expired or not
        run = join_run(
            descriptor, root / "cache", metrics=metrics, own_verifiers=own_verifiers, clock=client.server_time
        )
        report(f"model: {describe_model(run.model_files / 'config.json')}")
        report(f"judging: {describe_judging(run.workload.tasks.train, descriptor.reward)}")
        explain_weights(run.weights, descriptor.async_level + 2, root, report)
        name = name or platform.node()[:60] or "worker"
        kind, ready_engine = _worker_kind(cheat), run.make_engine(engine, arithmetic)
        kind(run, client, ready_engine, name=name, metrics=metrics, report=report).run()


def _worker_kind(cheat: str | None) -> "type[Worker]":
    from shoal.worker import CHEATERS, Worker

    if cheat is None:
        return Worker
    if cheat not in CHEATERS:
        raise ConfigError(f"There is no cheat {cheat!r}.", hint=f"Known: {', '.join(CHEATERS)}.")
    return CHEATERS[cheat]


def joined_descriptor(url: str, run_key: str | None, root: Path, report: Report) -> RunDescriptor:
    """The run behind this address. Its key is pinned at first use: a different run under the same address is refused."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is no address.", hint="It begins with http:// or https://.")
    report(f"asking {url} for its run, for up to {JOIN_DEADLINE_S:.0f} s")
    pin = root / "pinned" / "".join(letter if letter.isalnum() else "-" for letter in url.rstrip("/"))
    pinned = run_key or (pin.read_text().strip() if pin.exists() else None)
    try:
        data, descriptor = fetch_descriptor(url, None, deadline_s=JOIN_DEADLINE_S)
    except ShoalError as error:
        if error.code in ("http", "integrity"):
            raise ConfigError(
                f"{url} is not a Shoal coordinator.", hint="Ask the run's owner for the address."
            ) from None
        raise
    if pinned is not None and descriptor.run_key != pinned:
        raise PinnedKeyError(
            f"{url} now shows a run with key {descriptor.run_key[:12]}…, not the expected {pinned[:12]}….",
            hint=f"If the owner really started a new run, remove {pin} or pass the new --run-key.",
        )
    write_atomic(pin, descriptor.run_key.encode())
    write_atomic(root / "descriptor.json", data)
    return descriptor


def use_threads(threads: int) -> None:
    """Fixes the number of compute threads before torch starts its pools; 0 leaves the choice to torch."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
