"""Makes a calibration: honest runs set the limits, other honest runs and forgeries show what the limits are worth.

Honest work is generated under different batch shapes, thread counts and compute types, because that is how honest machines
differ, and scored as validators score, in float32 on the CPU. One half sets the limits of a class, the other half is checked
by them, submission by submission, and so is each forgery. The file keeps the counts with exact confidence bounds. Not more
submissions are made than the stated bounds need. A new kind of machine is measured on such a machine and added to the file.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shoal import __version__
from shoal.config import ShoalConfig
from shoal.files import write_atomic
from shoal.policy.directory import resolve_model
from shoal.policy.engine import Engine
from shoal.policy.lora.checks import check_lora
from shoal.validation.calibration.adapters import merged_model, write_typical
from shoal.validation.calibration.evidence import Honest, Trials, evidence_of, limits_of
from shoal.validation.calibration.forgeries import ADAPTERS, EDITS, TEMPERATURES, WEIGHTS, Edit, forged_weights
from shoal.validation.calibration.limits import (
    Calibration,
    Limits,
    ModelIdentity,
    NumericsClass,
    load_calibration,
)
from shoal.validation.calibration.work import (
    HonestWorkers,
    Machine,
    OnCompletions,
    Sample,
    Setting,
    Work,
    generate,
    score,
    threads,
)

HONEST_SETTINGS = (Setting(1, 128), Setting(2, 128), Setting(2, 32, 0.5), Setting(1, 7, 0.25))
"""Small batches are slow, so they are a smaller part of the sample."""
HONEST_SUBMISSIONS = 30
"""Of all settings together: if none is rejected, fewer than 10 % of honest submissions are (95 % bound)."""
FORGED_SUBMISSIONS = 16
"""Of each forgery: if none is missed, fewer than 17 % are (95 % bound). In a smaller calibration there are fewer."""

Share = Callable[[float], None]
"""Takes the share of the work that is done."""
Measured = dict[str, tuple[Limits, Honest, Trials]]


def calibrate_run(
    config: ShoalConfig,
    prompt_count: int,
    out: Path,
    *,
    machine: Machine = Machine(),  # noqa: B008  # frozen
    extend: bool = False,
    honest_submissions: int = HONEST_SUBMISSIONS,
    on_share: Share = lambda share: None,
) -> Calibration:
    """Calibrates the model and settings of a run; writes the classes into the file, beside those that it has if it is extended."""
    directory = resolve_model(config.model.path)
    old = load_calibration(str(out)) if extend else None
    if old is not None:
        old.require_model(ModelIdentity.of(directory))
    with _adapter(config, directory) as adapter:
        work = Work.of(config, directory, prompt_count, adapter)
        made = calibrate(
            work,
            model_name=config.model.path,
            machine=machine,
            honest_submissions=honest_submissions,
            forged_submissions=-(-honest_submissions * FORGED_SUBMISSIONS // HONEST_SUBMISSIONS),
            on_share=on_share,
        )
    whole = made if old is None else made.model_copy(update={"classes": old.classes | made.classes})
    write_atomic(out, whole.model_dump_json(indent=2).encode() + b"\n")
    return made


@contextmanager
def _adapter(config: ShoalConfig, directory: Path) -> Iterator[Path | None]:
    """The adapter to measure with: the one that the run starts from, or one as large as training makes them."""
    start, lora = check_lora(config.model, directory), config.model.adapter
    if lora is None or start is not None:
        yield start
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield write_typical(Path(temporary), directory, lora)


def calibrate(
    work: Work,
    *,
    model_name: str,
    machine: Machine = Machine(),  # noqa: B008  # frozen
    settings: Sequence[Setting] = HONEST_SETTINGS,
    honest_submissions: int = HONEST_SUBMISSIONS,
    forged_submissions: int = FORGED_SUBMISSIONS,
    on_share: Share = lambda share: None,
) -> Calibration:
    """Measures the engine of this machine; every prompt is an honest sample per setting and dtype."""
    shares = sum(setting.share for setting in settings)
    halves = [
        Halves(
            setting,
            max(1, round(setting.share * len(work.prompts))),
            math.ceil(honest_submissions * setting.share / shares) * work.submission_size,
        )
        for setting in settings
    ]
    honest_completions = len(machine.dtypes) * sum(half.limits + half.tested for half in halves)
    wrong_policies = len(WEIGHTS) + (len(ADAPTERS) + 1 if work.adapter is not None else 0)
    forgeries = wrong_policies + len(TEMPERATURES) + 1  # edits share one honest sample
    steps = Steps(honest_completions + forgeries * forged_submissions * work.submission_size, on_share)
    with threads(work.threads):
        workers, scorer = HonestWorkers(work, machine), work.engine()
        measured = dict(_measure(work, workers, scorer, dtype, halves, steps) for dtype in machine.dtypes)
        forged: dict[str, dict[str, Trials]] = {name: {} for name in measured}
        for forgery, sample in _forgeries(work, scorer, forged_submissions, steps):
            for name, (limits, _, _) in measured.items():
                forged[name].setdefault(forgery, Trials()).add(sample, limits, work.submission_size)
    return Calibration(
        model=model_name,
        identity=ModelIdentity.of(work.model_directory),
        made_with=f"shoal {__version__}",
        classes=_classes(measured, forged),
    )


@dataclass(frozen=True)
class Halves:
    """Completions of a setting that set the limits, and those that test them."""

    setting: Setting
    limits: int
    tested: int


@dataclass
class Steps:
    """Counts completions as they are made."""

    total: int
    on_share: Share
    done: int = 0

    def part(self, count: int) -> OnCompletions:
        before, self.done = self.done, self.done + count
        return lambda made: self.on_share(min(1.0, (before + made) / self.total))


def _measure(
    work: Work,
    workers: HonestWorkers,
    scorer: Engine,
    dtype: str,
    halves: Sequence[Halves],
    steps: Steps,
) -> tuple[str, tuple[Limits, Honest, Trials]]:
    """One numerics class: its limits, the work that set them, and how they did on other honest work."""
    honest, trials, names = Honest(), Trials(), set[str]()

    def sample(purpose: str, count: int, setting: Setting) -> Sample:
        requests = work.requests(f"{purpose} {dtype} {setting}", count)
        name, made = workers.generate(requests, dtype, setting, steps.part(count))
        names.add(name)
        return Sample(requests, made, score(scorer, requests, made, work.temperature))

    for half in halves:
        honest.add(sample("limits", half.limits, half.setting))
    limits = limits_of(honest)
    for half in halves:
        trials.add(sample("test", half.tested, half.setting), limits, work.submission_size)
    return names.pop(), (limits, honest, trials)


def _classes(measured: Measured, forged: Mapping[str, Mapping[str, Trials]]) -> dict[str, NumericsClass]:
    return {
        name: NumericsClass(limits=limits, evidence=evidence_of(limits, honest, trials, forged[name]))
        for name, (limits, honest, trials) in measured.items()
    }


def table(calibration: Calibration) -> Iterator[str]:
    """Honest work and each forgery, one line each, and a sentence about what the class lets pass."""
    for name, known in calibration.classes.items():
        evidence = known.evidence
        yield f"{name:24s} {'checked':>7s} {'rejected':>8s}  error rate below (95 %)  audits until a ban"
        rejected, bound = evidence.honest_rejected, evidence.honest_false_reject_upper95
        yield f"  {'honest':22s} {evidence.honest_submissions:7d} {rejected:8d}  {bound:.4f}"
        for forgery, trials in evidence.forgeries.items():
            caught = trials.submissions - trials.missed
            until = "one rejection" if not trials.missed else trials.submissions_to_ban or "never"
            yield f"  {forgery:22s} {trials.submissions:7d} {caught:8d}  {trials.missed_upper95:<23.4f}  {until}"
        yield f"{name}: {calibration.cost(name)}."


def _forgeries(work: Work, scorer: Engine, submissions: int, steps: Steps) -> Iterator[tuple[str, Sample]]:
    """Each forgery with the validator's view of it. Forgers compute in float32: rounding would only give them away."""
    for name, engine in _wrong_policies(work):
        yield from ((name, sample) for sample in _samples(work, scorer, engine, submissions, name, steps))
    cheat = work.engine()
    for factor in TEMPERATURES:
        name = f"temperature_x{factor}"
        yield from ((name, sample) for sample in _samples(work, scorer, cheat, submissions, name, steps, factor))
    for sample in _samples(work, scorer, cheat, submissions, "edits", steps):
        for name, edit in EDITS.items():
            yield name, _edited(sample, edit, scorer, work)


def _wrong_policies(work: Work) -> Iterator[tuple[str, Engine]]:
    for name, forge in WEIGHTS.items():
        with forged_weights(work.model_directory, forge) as forged:
            yield name, work.engine(base=forged)
    if work.adapter is None or work.lora is None:
        return
    engine = work.engine()
    for name, forge in ADAPTERS.items():
        with forged_weights(work.adapter, forge) as forged:
            engine.load(forged)
            yield name, engine
    with merged_model(work.model_directory, work.adapter, work.lora) as merged:
        yield "adapter_merged_bf16", replace(work, model_directory=merged, adapter=None).engine()


def _samples(
    work: Work, scorer: Engine, engine: Engine, submissions: int, salt: str, steps: Steps, heat: float = 1.0
) -> Iterator[Sample]:
    for number, count in enumerate(work.parts(submissions)):
        requests = work.requests(f"{salt} {number}", count)
        made = generate(engine, work, requests, heat * work.temperature, steps.part(count))
        yield Sample(requests, made, score(scorer, requests, made, work.temperature))


def _edited(sample: Sample, edit: Edit, scorer: Engine, work: Work) -> Sample:
    """The sample with every submission edited; only completions whose tokens changed are scored again."""
    edited = [row for part in sample.submissions(work.submission_size) for row in edit(part.completions)]
    changed = [index for index, row in enumerate(edited) if row.tokens != sample.completions[index].tokens]
    again = score(scorer, [sample.requests[i] for i in changed], [edited[i] for i in changed], work.temperature)
    scored = list(sample.scored)
    for index, row in zip(changed, again, strict=True):
        scored[index] = row
    return replace(sample, completions=edited, scored=scored)
