"""The commands about data: `eval`, `curate`, `filter`, `sft`, `reward-model train`.

Thin: each parses its flags and calls a package. Every command can be killed and given again:
finished batches and checkpoints are kept.
Heavy imports happen inside.
"""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.asking_flags import Asking, SystemPrompt, Thinking, Threads, asks
from shoal.cli.flags import report
from shoal.config import TasksConfig
from shoal.errors import ConfigError
from shoal.files import write_atomic

if TYPE_CHECKING:
    from shoal.tasks import Task

reward_model_app = typer.Typer(no_args_is_help=True, help="A reward model for the validator's side.")

Model = Annotated[str, typer.Option(help="`bundled`, a model or PEFT directory, or a Hugging Face id.")]
TASKS_HELP = "A JSONL or Parquet file, a directory of them, hf:ORG/NAME, reasoning-gym:NAME or builtin:NAME."
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")]
Seed = Annotated[str, typer.Option(help="Other seeds give other samples.")]


@asks
def evaluate_policy(
    policy: Annotated[str, typer.Argument(help="`bundled`, a model or PEFT directory, or a Hugging Face id.")],
    tasks: Annotated[
        str | None, typer.Option(help=f"{TASKS_HELP} Default: what --run is measured on, or builtin:chain-sums.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="A second policy, compared by a paired test.")] = None,
    by: Annotated[str, typer.Option(help="Metadata field that names the categories of the table.")] = "",
    limit: Limit = None,
    seed: Seed = "evaluation",
    dir: Annotated[Path, typer.Option(help="Where answers are kept; a repeated command goes on.")] = Path(
        "evaluations"
    ),
    answers: Annotated[
        Path | None, typer.Option(help="Also write every answer of POLICY to this parquet file.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the metrics to this file.")] = None,
    *,
    asking: Asking,
) -> None:
    """Measure a policy on tasks: avg@k, pass@k, intervals, categories; or two of them against each other."""
    from shoal.evaluation import (
        compare_answers,
        comparison_json,
        comparison_table,
        metrics_by_category,
        metrics_json,
        metrics_table,
        write_answers,
    )
    from shoal.evaluation.answering import answer_tasks, plan_of
    from shoal.files import digest_bytes

    source, found_tasks = _tasks_to_measure(tasks, asking)
    chosen = _limited(_measurable(found_tasks), limit)
    settings = asking.settings(seed, by)
    results: dict[str, Any] = {"tasks": source, "samples": asking.samples}
    given = []
    for name in [policy] if against is None else [policy, against]:
        spec, executor = asking.executor(name, settings)
        key = digest_bytes(json.dumps(plan_of(chosen, spec, asking.batch_tasks), sort_keys=True).encode())[:16]
        report(f"{name}: {len(chosen)} tasks × {asking.samples} samples")
        found = list(answer_tasks(chosen, spec, executor, dir / key, report, batch_tasks=asking.batch_tasks).answers())
        metrics = metrics_by_category(found)
        report(f"\n{metrics_table(metrics)}\n")
        results.setdefault("policies", []).append({"policy": name, "metrics": metrics_json(metrics)})
        given.append(found)
    if answers is not None:
        write_answers(answers, given[0])
    if against is not None:
        comparisons = compare_answers(given[1], given[0])
        report(f"{comparison_table(comparisons, against, policy)}\n")
        results["comparison"] = comparison_json(comparisons)
    if json_file is not None:
        write_atomic(json_file, json.dumps(results, indent=2).encode() + b"\n")


@asks
def curate_tasks(
    tasks: Annotated[str, typer.Argument(help="The raw task set: a file, a directory, hf:ORG/NAME or builtin:NAME.")],
    out: Annotated[Path, typer.Argument(help="Directory for tasks.jsonl, dropped.jsonl and curation.json.")],
    model: Model = "bundled",
    low: Annotated[float, typer.Option(min=0, max=1, help="Smallest solve rate that is kept.")] = 0.125,
    high: Annotated[float, typer.Option(min=0, max=1, help="Largest solve rate that is kept.")] = 0.5,
    evaluation: Annotated[
        list[str] | None, typer.Option(help="Task set that must stay unseen; may be given several times.")
    ] = None,
    similarity: Annotated[
        float, typer.Option(min=0.01, max=1, help="Prompts at least this similar are duplicates; 1: equal words.")
    ] = 1.0,
    overlap_words: Annotated[int, typer.Option(min=1, help="Words in a row that count as contamination.")] = 13,
    limit: Limit = None,
    seed: Seed = "curation",
    *,
    asking: Asking,
) -> None:
    """Keep the tasks that a model solves sometimes: drop duplicates, contamination, the too easy and the too hard."""
    from shoal.curation import Band, CurationSettings, curate
    from shoal.tasks.sources import tasks_to_measure

    if low > high:
        raise ConfigError(f"The band {low:g} … {high:g} is empty.", hint="--low must not exceed --high.")
    spec, executor = asking.executor(model, asking.settings(seed))
    unseen = [task for source in evaluation or [] for task in tasks_to_measure(TasksConfig(source=source))]
    curate(
        _limited(_measurable(_training_tasks(tasks)), limit),
        unseen,
        spec,
        executor,
        out,
        report,
        settings=CurationSettings(Band(low, high), similarity, overlap_words),
        batch_tasks=asking.batch_tasks,
    )


Demonstrations = Annotated[Path, typer.Argument(help="JSONL: tasks, each with a `completion`.")]
MinTokens = Annotated[int, typer.Option(min=0, help="Shorter completions are dropped.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longer completions are dropped.")]
MaxRepetition = Annotated[float, typer.Option(min=0, max=1, help="Largest share of repeated 8-word runs.")]
Similarity = Annotated[
    float, typer.Option(min=0.01, max=1, help="At least this similar is a duplicate; 1: equal words.")
]
Correct = Annotated[bool, typer.Option(help="Drop completions that the task's verifier refuses.")]


def filter_file(
    demonstrations: Demonstrations,
    out: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    model: Model = "bundled",
    min_tokens: MinTokens = 4,
    max_tokens: MaxTokens = 16_384,
    max_repetition: MaxRepetition = 0.3,
    similarity: Similarity = 0.9,
    correct: Correct = True,
    thinking: Thinking = True,
) -> None:
    """Drop demonstrations that teach nothing good: malformed, too long, repetitive, wrong, seen before."""
    from shoal.curation import FilterSettings, write_demonstration

    settings = FilterSettings(
        min_tokens, max_tokens, max_repetition, correct=correct, similarity=similarity, thinking=thinking
    )
    kept = _kept(demonstrations, settings, model)
    write_atomic(out, "".join(write_demonstration(demonstration) + "\n" for demonstration in kept).encode())
    report(f"wrote {out}")


def warm_start(
    demonstrations: Demonstrations,
    out: Annotated[Path, typer.Argument(help="Directory of the new policy; must not exist.")],
    model: Model = "bundled",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the demonstrations.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Demonstrations of one optimiser step.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 1e-5,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 20,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Length of a packed bin; bounds memory.")] = 8192,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 100,
    filters: Annotated[bool, typer.Option(help="Filter first, as `shoal filter` does by default.")] = True,
    shuffle: Annotated[bool, typer.Option(help="Without it the order of the file is the curriculum.")] = True,
    system_prompt: SystemPrompt = "",
    thinking: Thinking = True,
    work_dir: Annotated[Path | None, typer.Option(help="Where checkpoints go; OUT.work without it.")] = None,
    threads: Threads = 0,
) -> None:
    """Warm start: learn demonstrations before reinforcement learning; works under torchrun too."""
    from shoal.curation import FilterSettings, FitSettings, WarmStart, encode, read_demonstrations, write_policy
    from shoal.policy import resolve_model
    from shoal.policy.directory import base_name, resolve_adapter
    from shoal.policy.lora.files import read_settings
    from shoal.roles.process import use_threads
    from shoal.tasks import PromptStyle, TextCodec

    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty.", hint="Name another directory, or remove it first.")
    use_threads(threads)
    directory, start = resolve_model(model), resolve_adapter(model)
    codec = TextCodec.from_directory(directory)
    wanted = FilterSettings(thinking=thinking)
    kept = _kept(demonstrations, wanted, model) if filters else list(read_demonstrations(demonstrations))
    style = PromptStyle(system_prompt, thinking=thinking)
    examples = [encode(one, codec, style) for one in kept]
    fit = FitSettings(
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        checkpoint_every=checkpoint_every,
        shuffle=shuffle,
    )
    work = work_dir or out.with_name(f"{out.name}.work")
    trainer = WarmStart(fit, directory, work_dir=work, micro_batch_tokens=micro_batch_tokens, start=start)
    curve: list[tuple[int, float]] = []
    checkpoint = trainer.train(examples, _fit_progress(curve))
    if trainer.world.is_main:
        lora = read_settings(start) if start is not None else None
        write_policy(checkpoint, directory, out, base_model=base_name(model), loss_curve=curve, lora=lora)
        report(f"wrote {out}; use it with --model.path {out}")
    trainer.world.leave()


@reward_model_app.command("train")
def train_reward(
    sources: Annotated[
        list[Path],
        typer.Argument(help="Answer files of `shoal eval` or `shoal curate`, directories of them, or run directories."),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the reward model; must not exist.")],
    model: Model = "bundled",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pairs.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Pairs of one optimiser step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule; 1e-5 for billions of parameters.")] = 2e-4,
    pairs_per_task: Annotated[int, typer.Option(min=1, help="Most pairs of one task.")] = 8,
    work_dir: Annotated[Path | None, typer.Option(help="Where checkpoints go; OUT.work without it.")] = None,
    threads: Threads = 0,
) -> None:
    """Fit a reward model to preference pairs of verified completions, and report its accuracy on held-out tasks."""
    from dataclasses import replace

    from shoal.curation import REWARD_FIT, make_pairs, read_candidates, train_reward_model
    from shoal.policy import resolve_model
    from shoal.roles.process import use_threads

    use_threads(threads)
    pairs, heldout = make_pairs(read_candidates(sources), pairs_per_task=pairs_per_task)
    report(f"{len(pairs)} pairs to learn, {len(heldout)} of other tasks to measure")
    accuracy = train_reward_model(
        resolve_model(model),
        pairs,
        heldout,
        out,
        work_dir=work_dir or out.with_name(f"{out.name}.work"),
        settings=replace(REWARD_FIT, epochs=epochs, batch=batch, learning_rate=learning_rate),
        on_step=_fit_progress([]),
    )
    report(f"held-out pair accuracy {accuracy}")
    report(f"wrote {out}; in a run file:")
    report(f'  [reward]      parts = {{task = 1.0, "reward_model:{out.name}" = 0.1}}')
    report(f'  [validation]  reward_models = {{"{out.name}" = "{out}"}}')


def _tasks_to_measure(source: str | None, asking: Asking) -> "tuple[str, list[Task]]":
    """The named tasks, or those that the run's own evaluator uses."""

    from shoal.tasks import load_tasks
    from shoal.tasks.sources import tasks_to_measure

    rules = asking.rules() if source is None else None
    if rules is None:
        config = TasksConfig(source=source or "builtin:chain-sums")
        return config.source, tasks_to_measure(config)
    if getattr(rules, "task_files", ()):
        raise ConfigError("The tasks of this run are files of its owner.", hint="Name the tasks with --tasks.")
    return rules.tasks.source, list(load_tasks(rules.tasks).heldout)


def _training_tasks(source: str) -> "list[Task]":
    """Of a generator what training draws, of a file or dataset all."""

    from shoal.tasks import load_tasks
    from shoal.tasks.sources import tasks_to_measure

    config = TasksConfig(source=source)
    generated = source.startswith(("builtin:", "reasoning-gym:"))
    return list(load_tasks(config).train) if generated else tasks_to_measure(config)


def _measurable(tasks: "list[Task]") -> "list[Task]":
    """Reports how many tasks are left out because only a reward model could score them."""

    from shoal.tasks import verifiable

    found = verifiable(tasks)
    if left_out := len(tasks) - len(found):
        report(f"{left_out} tasks are left to reward models, whose rankings measure no policy")
    return found


def _limited(tasks: "list[Task]", limit: int | None) -> "list[Task]":
    return tasks if limit is None else tasks[:limit]


def _kept(path: Path, settings: Any, model: str) -> list[Any]:
    """The demonstrations that pass; reports how many fell to which filter."""
    from shoal.curation import filter_demonstrations, read_demonstrations
    from shoal.policy import resolve_model
    from shoal.tasks import TextCodec

    codec = TextCodec.from_directory(resolve_model(model))
    reasons: Counter[str] = Counter()
    kept = []
    for demonstration, reason in filter_demonstrations(read_demonstrations(path), settings, codec):
        reasons[reason or "kept"] += 1
        if not reason:
            kept.append(demonstration)
    report(", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or f"{path} is empty")
    return kept


def _fit_progress(curve: list[tuple[int, float]]) -> Any:
    """Reports every twentieth part of the way."""
    seconds: list[float] = []

    def report_step(step: Any) -> None:
        curve.append((step.step, step.loss))
        seconds.append(step.seconds)
        if step.step % max(1, step.steps // 20) == 0 or step.step == step.steps:
            left = sum(seconds) / len(seconds) * (step.steps - step.step)
            report(f"step {step.step}/{step.steps}: loss {step.loss:.4f}, about {left:.0f} s left")

    return report_step
