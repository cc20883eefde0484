"""What an owner or researcher does with a run besides running it: export its policy, look at and replay its rollouts, plan its
memory.

Each function works offline on a run directory or a run file; heavy imports stay inside.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import ShoalConfig, to_toml
from shoal.identity import Envelope
from shoal.metrics import Report
from shoal.metrics.units import memory
from shoal.owner.dataset import EVIDENCE, ROLLOUTS, public_settings, write_dataset, write_evidence
from shoal.protocol.api import HistoryView
from shoal.protocol.rollouts import RolloutLimits
from shoal.rundir import RunDirectory, is_address, load_run

if TYPE_CHECKING:
    from shoal.inspection.filters import Filter, Order


def export_run(
    directory: RunDirectory,
    output: Path,
    report: Report,
    *,
    version: int | None = None,
    policy_only: bool = False,
    merge: bool = False,
) -> None:
    """A plain model directory with a card made from the run: recipe, data digest, curves, ledger head; beside it the rollouts
    as a dataset and the evidence that others repeat the run from, unless only the policy is wanted. An adapter becomes a PEFT
    directory, unless it is to be merged into its base.

    Without `version` the last one; a run that has not reached it has no result to export. The card says nothing that was
    measured on later versions than its own.
    """
    from shoal.policy.directory import base_name, resolve_model
    from shoal.training import RunFacts, export_policy, latest_checkpoint
    from shoal.training.export import version_to_export

    config, descriptor = directory.config(), directory.descriptor()
    base, lora = resolve_model(config.model.path), config.model.adapter
    history, ledger_head = _recorded(directory)
    ledger = b"" if policy_only else _ledger(directory)
    newest = max((view.version for view in history.versions), default=0)
    chosen = version_to_export(version, newest=newest, steps=config.run.steps)
    source = latest_checkpoint(directory.trainer, chosen)
    facts = RunFacts(
        run_name=descriptor.run_id,
        base_model=base_name(config.model.path),
        version=chosen,
        last_version=max(newest, config.run.steps),
        recipe_toml=to_toml(public_settings(config)),
        task_digest=descriptor.task_set_digest,
        ledger_head=_sealed_head(ledger) or ledger_head,
        run_key=descriptor.run_key,
        adapter="" if lora is None or merge else f"rank {lora.rank}, alpha {lora.alpha:g}",
        has_evidence=bool(ledger),
        reward_curve=[
            (view.version, float(reward))
            for view in history.versions
            if view.version <= chosen and isinstance(reward := view.report.get("task_reward_mean"), (int, float))
        ],
        heldout_curve=[(view.version, view.accuracy) for view in history.evaluations if view.version <= chosen],
    )

    def add(folder: Path) -> None:
        if ledger:
            rows = write_dataset(directory, folder / ROLLOUTS, report)
            files = write_evidence(directory, folder / EVIDENCE, ledger)
            report(f"{rows} completions as a dataset, {files} rollout files as evidence")

    export_policy(source, base, output, facts, lora=lora, merge=merge, add=add)
    which = (
        f"an intermediate one: the run ends with version {facts.last_version}" if facts.intermediate else "the last one"
    )
    report(f"wrote version {chosen}, {which}, to {output}")


def _ledger(directory: RunDirectory) -> bytes:
    """The sealed ledger; empty where there is no coordinator's store."""
    from shoal.coordinator.store.records import has_store
    from shoal.owner.control import find_run

    if directory.ledger_file.is_file():
        return directory.ledger_file.read_bytes()
    return find_run(str(directory.root)).ledger() if has_store(directory) else b""


def _sealed_head(ledger: bytes) -> str:
    """The head that the seal of an export names."""
    if not ledger:
        return ""
    seal = json.loads(Envelope.from_bytes(ledger.splitlines()[-1]).payload)
    return str(seal["head"])


def replay_rollouts(config: ShoalConfig, recording: Path, work_dir: Path, report: Report) -> None:
    """Trains from recorded rollouts without a swarm; starts again where it was interrupted."""
    from shoal.proofs.commitments import CHUNK_TOKENS, TOP_K
    from shoal.training import StepReport, Trackers, build_trainer, recorded_groups, replay

    trainer = build_trainer(config, work_dir)
    if trainer.resume():
        report(f"resumed at step {trainer.step}")
    trackers = Trackers(
        work_dir, config.training.trackers, run_name=config.run.name, settings=config.model_dump(mode="json")
    )

    def on_step(step: StepReport) -> None:
        trackers.log(step.step, step.as_dict())
        report(f"step {step.step}: task reward {step.task_reward_mean:.3f}, loss {step.loss:.4f}")

    limits = RolloutLimits.for_settings(config.rollouts, CHUNK_TOKENS, TOP_K)
    trained = replay(trainer, recorded_groups(recording, limits), steps=config.run.steps, on_step=on_step)
    trackers.close()
    report(f"trained {trained} steps in {work_dir}")


def recorded_path(where: str) -> Path:
    """Rollouts that somebody means by a path, or by the file or directory of a run."""
    return load_run(where).run.dir if where.endswith(".toml") or is_address(where) else Path(where)


def inspect_rollouts(
    paths: Sequence[Path],
    chosen: "Filter",
    *,
    order: "Order",
    reverse: bool,
    limit: int,
    tokenizer: Path | None,
    policy: Path | None,
    as_lines: bool,
    max_characters: int,
) -> None:
    """Prints the recorded rollouts that match, for people or as JSON lines."""
    from rich.console import Console

    from shoal import inspection

    recording = inspection.open_recording(paths, tokenizer=tokenizer)
    everything = list(recording.records())
    matching = [record for record in everything if chosen.wants(record)]
    workload = recording.workload()
    if policy is not None and workload is not None and matching:
        matching = inspection.add_margins(matching, policy, workload, recording.directory)
    matching = inspection.sort_records(matching, order, reverse=reverse)
    shown = matching[:limit] if limit else matching
    if workload is not None:
        shown = [inspection.explain(record, workload) for record in shown]
    if as_lines:
        for record in shown:
            print(json.dumps(inspection.as_json(record), ensure_ascii=False))
        return
    console = Console()
    for record in shown:
        console.print(inspection.render_record(record, max_characters=max_characters))
    console.print(inspection.render_summary(shown, matching, len(everything)))


def show_memory_plan(config: ShoalConfig, ranks: int, report: Report, *, shapes: Path | None = None) -> None:
    """`shapes` may hold the shapes of models that are not to be downloaded for this."""
    from shoal.training import model_shape, plan_memory

    shape = model_shape(config.model.path, shapes, config.model.adapter)
    longest, bin_tokens = config.rollouts.longest_row, config.training.micro_batch_tokens
    on_gpu = config.training.device != "cpu"
    plan = plan_memory(shape, config.training, ranks=ranks, on_gpu=on_gpu, longest_row=longest)
    if longest > bin_tokens:
        report(
            f"rows of up to {longest} tokens exceed training.micro_batch_tokens = {bin_tokens}; planned for {longest}"
        )
    trained = f", {shape.adapter / 1e6:.1f}M of an adapter trained" if shape.adapter else ""
    report(f"{config.model.path}: {_size(shape.parameters)} parameters on {ranks} ranks{trained}")
    report(plan.as_text())


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def show_engine_plan(config: ShoalConfig, role: str, report: Report, *, rows: int, shapes: Path | None = None) -> None:
    """What the engine of a worker that generates `rows` sequences at once, or of a validator, will hold."""
    from shoal.policy.plans import KEYS_AND_VALUES, EngineShape, memory_table, scorer_memory, worker_memory
    from shoal.training.memory import model_config, model_shape
    from shoal.validation import load_calibration

    rollouts, path = config.rollouts, config.model.path
    shape = EngineShape.of(model_config(path, shapes)[0])
    whole = model_shape(path, shapes, config.model.adapter)
    stored_bytes = whole.stored_bytes if whole.adapter else 2
    report(f"{path}: {_size(shape.parameters)} parameters, one {role}")
    if role == "validator":
        report(memory_table(scorer_memory(shape, stored_bytes=stored_bytes, adapter=whole.adapter)))
        return
    classes = config.validation.numerics_classes or load_calibration(config.validation.calibration).finest()
    for dtype in dict.fromkeys(name.split("/")[1] for name in classes):
        parts = worker_memory(
            shape,
            rows=rows,
            prompt=rollouts.max_prompt_tokens,
            longest=rollouts.longest_row,
            dtype_bytes=4 if dtype == "float32" else 2,
            adapter=whole.adapter,
        )
        row_bytes = parts[KEYS_AND_VALUES] // rows
        report(f"in {dtype}:\n{memory_table(parts)}\neach row more: {memory(row_bytes)}")


def _recorded(directory: RunDirectory) -> tuple[HistoryView, str]:
    """History and ledger head from the coordinator's store, whether it runs or not."""
    from shoal.coordinator.server import build_run
    from shoal.coordinator.store import records
    from shoal.coordinator.views import history, status

    run = build_run(directory)
    with records.open_store(directory) as store:
        return (
            store.read(lambda connection: history(connection, run)),
            store.read(lambda connection: status(connection, run)).ledger_head,
        )
