"""What a run leaves behind and what it needs, as commands: `export`, `reproduce`, `inspect`, `plan-memory`,
`calibrate`, `verify`, `ledger`.

Thin: each parses its flags and calls a package. Heavy imports happen inside.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.flags import Joinable, Where, report, run_config
from shoal.config.schema import EngineKind
from shoal.errors import ConfigError
from shoal.rundir import RunDirectory

LOOK_DEADLINE_S = 5.0

ledger_app = typer.Typer(no_args_is_help=True, help="Look at the ledger of a run and re-check it.")


def export(
    context: typer.Context,
    output: Annotated[Path, typer.Argument(help="Directory to write; must not exist.")],
    where: Where = None,
    version: Annotated[
        int | None,
        typer.Option(help="An intermediate version that has a checkpoint; without it, the last one of a finished run."),
    ] = None,
    policy_only: Annotated[
        bool, typer.Option("--policy-only", help="Leave out the rollouts and what others repeat the run from.")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Add a LoRA adapter to its base and write the whole model, not a PEFT directory."),
    ] = False,
) -> None:
    """Write the trained policy as a plain model directory, or the adapter as a PEFT one, with a card, its rollouts as a dataset,
    and the run's evidence."""
    from shoal.owner.records import export_run

    directory = RunDirectory(run_config(context, where).run.dir)
    export_run(directory, output, report, version=version, policy_only=policy_only, merge=merge)


def inspect(
    paths: Annotated[
        list[str],
        typer.Argument(help="A run file or run directory, or rollout files (*.parquet) and directories of them."),
    ],
    step: Annotated[int | None, typer.Option(help="Only rollouts of this step.")] = None,
    slot: Annotated[int | None, typer.Option(help="Only rollouts of this slot.")] = None,
    version: Annotated[int | None, typer.Option(help="Only rollouts of this policy version.")] = None,
    worker: Annotated[str, typer.Option(help="Only of this worker: its name, or the beginning of its key.")] = "",
    task: Annotated[str, typer.Option(help="Only of this task.")] = "",
    state: Annotated[
        str, typer.Option(help="waiting, accepted, no_signal, consumed, expired, withdrawn, rejected or recorded.")
    ] = "",
    min_reward: Annotated[float | None, typer.Option(help="Smallest reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Largest reward.")] = None,
    min_age: Annotated[int | None, typer.Option(help="Smallest lag behind the trainer, in versions.")] = None,
    max_age: Annotated[int | None, typer.Option(help="Largest lag behind the trainer, in versions.")] = None,
    truncated: Annotated[
        bool | None, typer.Option("--truncated/--finished", help="Only cut completions, or only finished ones.")
    ] = None,
    grep: Annotated[str, typer.Option(help="Regular expression that prompt or completion must match.")] = "",
    sort: Annotated[str, typer.Option(help="run, reward, length, age or margin.")] = "run",
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest or newest first.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rollouts to print; 0 prints all.")] = 10,
    max_characters: Annotated[int, typer.Option(min=0, help="Longer texts lose their middle; 0 keeps it.")] = 2000,
    policy: Annotated[Path | None, typer.Option(help="Model directory under which margins are computed.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer of files that lie in no run directory.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Print and filter recorded rollouts: text, reward and why, margins, age, verdict."""
    from shoal.inspection.filters import Filter, known_order, known_pattern
    from shoal.owner.records import inspect_rollouts, recorded_path

    chosen = Filter(
        step=step,
        slot=slot,
        version=version,
        worker=worker,
        task=task,
        state=state,
        min_reward=min_reward,
        max_reward=max_reward,
        min_age=min_age,
        max_age=max_age,
        truncated=truncated,
        pattern=known_pattern(grep),
    )
    inspect_rollouts(
        [recorded_path(path) for path in paths],
        chosen,
        order=known_order(sort),
        reverse=reverse,
        limit=limit,
        tokenizer=tokenizer,
        policy=policy,
        as_lines=json,
        max_characters=max_characters,
    )


def view(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a file of `shoal run backup`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser if there is one.")] = True,
) -> None:
    """Open the page on the files of a stopped, crashed or backed-up run; changes nothing."""
    from shoal.owner.viewing import view_run

    view_run(where, report, host=host, port=port, opens_browser=browser)


def plan_memory(
    context: typer.Context,
    where: Where = None,
    role: Annotated[Literal["trainer", "worker", "validator"], typer.Option(help="Whose memory.")] = "trainer",
    ranks: Annotated[int, typer.Option(min=1, help="Trainer processes that share the model.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Sequences that a worker generates at once.")] = 16,
) -> None:
    """What the trainer, a worker or a validator of a run will hold in memory, before anything is loaded."""
    from shoal.owner.records import show_engine_plan, show_memory_plan

    shapes, config = Path(where).parent / "shapes" if where is not None else None, run_config(context, where)
    if role == "trainer":
        show_memory_plan(config, ranks, report, shapes=shapes)
    else:
        show_engine_plan(config, role, report, rows=rows, shapes=shapes)


def reproduce(
    where: Annotated[str, typer.Argument(help="A run directory, its run file, or a directory of `shoal export`.")],
    steps: Annotated[
        str, typer.Option(help="Training steps to repeat, such as 3 or 0-4; `all` begins at the base model.")
    ] = "all",
    sample: Annotated[
        int, typer.Option(min=0, help="Verdicts to repeat by a full audit, drawn by the ledger's head.")
    ] = 8,
    out: Annotated[Path | None, typer.Option(help="Page to write; default: reproduction.md in the directory.")] = None,
    model: Annotated[Path | None, typer.Option(help="The base model, if it is not where the run had it.")] = None,
    run_key: Annotated[str | None, typer.Option(help="Key of the run, from a source that you trust.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 takes as many as the run's trainer.")] = 0,
) -> None:
    """Repeat a run from what it left behind: training bit for bit, verdicts from their files. Exit code 1 if anything differs."""
    from shoal.owner.reproduce import parse_steps, reproduce_run
    from shoal.roles.process import use_threads

    done = reproduce_run(
        where,
        out,
        report,
        steps=parse_steps(steps),
        sample=sample,
        model=model,
        run_key=run_key,
        threads=threads,
        use_threads=use_threads,
    )
    raise SystemExit(0 if done else 1)


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Calibration file to write.")],
    where: Where = None,
    prompts: Annotated[
        int, typer.Option(help="Honest completions of a full batch: more make the limits tighter.")
    ] = 384,
    submissions: Annotated[
        int, typer.Option(min=1, help="Honest submissions that test the limits, and half as many of each forgery.")
    ] = 30,
    engine: Annotated[EngineKind, typer.Option(help="What honest workers generate with.")] = "torch",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the torch engine computes.")] = "cpu",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Compute type, each a numerics class; default: float32.")
    ] = None,
    extend: Annotated[bool, typer.Option("--extend", help="Keep the other classes that OUT has already.")] = False,
) -> None:
    """Measure honest numerics and forgeries for a model, and write the limits of its verdicts."""
    from shoal.cli.progress import progress_bar
    from shoal.validation.calibration.measure import calibrate_run, table
    from shoal.validation.calibration.work import Machine

    machine = Machine(engine, device, tuple(dtype or Machine.dtypes))
    config = run_config(context, where)
    with progress_bar("calibrating") as on_share:
        made = calibrate_run(
            config, prompts, out, machine=machine, extend=extend, on_share=on_share, honest_submissions=submissions
        )
    for line in table(made):
        report(line)
    report(f"wrote {out}")


def verify(
    rollouts: Annotated[Path, typer.Argument(help="A rollout file, as a worker uploaded it.")],
    policy: Annotated[Path, typer.Option(help="Directory with the policy version that the file names.")],
    descriptor: Annotated[Path, typer.Option(help="The signed descriptor of the run.")],
    ledger: Annotated[
        Path | None,
        typer.Option(help="Export of the run's ledger: brings the step's secret and the draw of the audit."),
    ] = None,
    step_secret: Annotated[str, typer.Option(help="Secret of the file's step, if there is no --ledger.")] = "",
    calibration: Annotated[str, typer.Option(help="`bundled`, or the calibration file of the run.")] = "bundled",
    tasks: Annotated[
        Path | None, typer.Option(help="The tasks, if the owner served them: a worker's DIR/cache/tasks/*.arrow.")
    ] = None,
) -> None:
    """Repeat the verdict on a rollout file offline, with an audit of every token."""
    from shoal.coordinator import verify_export
    from shoal.files import digest_bytes
    from shoal.protocol.descriptor import open_descriptor
    from shoal.validation.offline import recorded, verdict_lines, verify_file

    data, run = _read_bytes(rollouts), _read_bytes(descriptor)
    if ledger is not None:
        entries, _ = verify_export(_read_lines(ledger), open_descriptor(run).coordinator_key)
        known = recorded(entries, digest_bytes(data))
        report(str(known))
        secret = known.step_secret
    else:
        secret = _secret_bytes(step_secret)
    verdict = verify_file(data, policy, run, secret, calibration=calibration, tasks=tasks)
    for line in verdict_lines(verdict):
        report(line)
    raise SystemExit(0 if verdict.accepted else 1)


@ledger_app.command("export")
def ledger_export(where: Joinable, out: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """Save the whole ledger with its signed seal."""
    from shoal.files import write_atomic
    from shoal.owner.control import find_run

    write_atomic(out, replace(find_run(where), deadline_s=LOOK_DEADLINE_S).ledger())
    report(f"wrote {out}")


@ledger_app.command("verify")
def ledger_verify(
    where: Annotated[
        str, typer.Argument(help="An exported ledger; or a run: its file, its directory or its coordinator's address.")
    ],
    coordinator_key: Annotated[
        str | None, typer.Option(help="Key that must have signed; default: the key in the seal, which proves little.")
    ] = None,
    descriptor: Annotated[
        Path | None,
        typer.Option(help="The signed descriptor of the run: brings the coordinator's key and the run key."),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            help="A head that was kept: 64 hex digits, a file of heads, or a worker's or relay's directory. Repeatable."
        ),
    ] = None,
    receipts: Annotated[
        list[Path] | None,
        typer.Option(help="Receipts that a worker kept: its directory or receipts.jsonl. Repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of sentences.")] = False,
) -> None:
    """Re-check a ledger offline: chain, signatures, secrets, audit draws, credit, and what others have kept."""
    from shoal.owner.ledger_check import check_ledger, json_of, sentences_of
    from shoal.roles.joining import check_public_key

    if coordinator_key is not None:
        check_public_key(coordinator_key)
    result = check_ledger(where, coordinator_key, descriptor, head or [], receipts or [])
    if json:
        typer.echo(json_of(result))
    else:
        for line in sentences_of(result):
            typer.echo(line)
    raise SystemExit(0 if result.ok else 1)


@ledger_app.command("show")
def ledger_show(
    where: Annotated[
        str, typer.Argument(help="An exported ledger; or a run: its file, its directory or its coordinator's address.")
    ],
) -> None:
    """Print what happened, with names, and the balances that follow from it."""
    from shoal.coordinator import verify_export
    from shoal.owner.ledger_check import ledger_source, seal_key
    from shoal.owner.ledger_text import ledger_lines

    lines = ledger_source(where)
    for line in ledger_lines(verify_export(lines, seal_key(where, lines))[0]):
        typer.echo(line)


def _secret_bytes(text: str) -> bytes:
    if not text:
        raise ConfigError("The secret of the file's step is missing.", hint="Give --ledger or --step-secret.")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError("The step's secret is not hexadecimal.") from None


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None


def _read_lines(file: Path) -> list[bytes]:
    lines = _read_bytes(file).splitlines()
    if not lines:
        raise ConfigError(f"{file} is empty.")
    return lines
