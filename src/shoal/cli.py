"""The `shoal` command: one thin command per role. Heavy imports happen inside the roles.

Settings of a run are given as `--section.name VALUE` to any command that takes a run file; they are collected before the
command line is parsed, so they may stand anywhere. A ShoalError becomes one sentence and a non-zero exit code.
"""

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from shoal import __version__, data_commands
from shoal.config import ShoalConfig, describe, reference_page, to_toml
from shoal.errors import ConfigError, IntegrityError, ShoalError
from shoal.run_commands import run_app
from shoal.rundir import RunDirectory, load_run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
ledger_app = typer.Typer(no_args_is_help=True, help="Look at the ledger of a run and re-check it.")
app.add_typer(ledger_app, name="ledger")
app.add_typer(run_app, name="run")
data_commands.register(app)

HOPELESS = {
    *("config", "key_file", "port_taken", "banned", "protocol_version", "pinned_key", "numerics_class"),
    *("model", "architecture", "role_key", "busy", "diverged", "too_slow", "schema", "repeated_step"),
    *("sandbox", "own_verifier", "malformed_task"),
}
"""Codes of errors that starting again cannot cure."""
LOOK_DEADLINE_S = 5.0
TAKE_SETTINGS = {
    "init",
    "coordinator",
    "train",
    "validate",
    "evaluate",
    "up",
    "demo",
    "calibrate",
    "export",
    "plan-memory",
}

_settings: list[str] = []

RunFile = Annotated[Path | None, typer.Argument(help="TOML file that describes the run; defaults apply without one.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and stop.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0 lets torch decide.")]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", help="Also trust the TLS certificates of this PEM file, such as a private authority's."),
]
Url = Annotated[str, typer.Argument(help="Address of the coordinator, such as http://host:7300.")]


def main(arguments: Sequence[str] | None = None) -> None:
    rest, settings = _split_settings(list(sys.argv[1:] if arguments is None else arguments))
    _settings[:] = settings
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else somebody said nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        app(rest, prog_name="shoal")
    except ShoalError as error:
        _fail(error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(ShoalError("The disk is full.", hint="Make room; the same command goes on where it was."))
        if error.filename is None:
            raise
        _fail(ShoalError(f"{error.filename} cannot be used: {(error.strerror or str(error)).lower()}."))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(error: ShoalError) -> None:
    """One sentence; exit code 78 tells a supervisor that starting again cannot help."""
    print(f"shoal: {error}", file=sys.stderr)
    raise SystemExit(os.EX_CONFIG if error.code in HOPELESS else 1)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _split_settings(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Dotted flags with their values, and everything else."""
    rest: list[str] = []
    settings: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        if argument.startswith("--") and "." in argument.partition("=")[0]:
            settings.append(argument)
            if "=" not in argument and arguments:
                settings.append(arguments.pop(0))
        else:
            rest.append(argument)
    return rest, settings


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Train language models by reinforcement learning on compute that nobody has to trust."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if _settings and context.invoked_subcommand not in TAKE_SETTINGS:
        raise ConfigError(
            f"`shoal {context.invoked_subcommand}` takes no settings such as {_settings[0]}.",
            hint=f"They belong to {', '.join(sorted(TAKE_SETTINGS))}.",
        )


def _config(run_file: Path | None, dry_run: bool = False) -> ShoalConfig:
    config = load_run(run_file, _settings)
    if dry_run:
        typer.echo(to_toml(config))
        raise SystemExit(0)
    return config


def _directory(run_file: Path | None, dry_run: bool = False) -> RunDirectory:
    """The run directory of a run file, made if it is new."""
    from shoal.runs import initialise

    return initialise(_config(run_file, dry_run))


def _report(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


@app.command()
def init(run_file: RunFile = None, dry_run: DryRun = False) -> None:
    """Make a run: keys, secret, base files and the signed descriptor."""
    directory = _directory(run_file, dry_run)
    descriptor = directory.descriptor()
    _report(f"run {descriptor.run_id} in {directory.root}")
    _report(f"contributors join with: shoal work {descriptor.coordinator_url} --run-key {descriptor.run_key}")


@app.command()
def coordinator(run_file: RunFile = None, dry_run: DryRun = False) -> None:
    """Serve steps, leases, verdicts and the ledger of a run."""
    from shoal import roles

    roles.coordinate(_directory(run_file, dry_run), _report)


@app.command()
def train(
    run_file: RunFile = None,
    dry_run: DryRun = False,
    threads: Threads = 0,
    replay: Annotated[
        Path | None, typer.Option(help="Train from the rollout files of this directory, without a swarm.")
    ] = None,
) -> None:
    """Train on accepted rollouts and publish every version; works under torchrun too."""
    from shoal import roles, tools

    if replay is None:
        roles.train(_directory(run_file, dry_run), _report, threads=threads)
        return
    config = _config(run_file, dry_run)
    roles.use_threads(threads)
    tools.replay_rollouts(config, replay, config.run.dir / "replay", _report)


@app.command()
def export(
    output: Annotated[Path, typer.Argument(help="Directory to write; must not exist.")],
    run_file: RunFile = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; the newest without it.")] = None,
) -> None:
    """Write the trained policy as a plain model directory with a card."""
    from shoal.tools import export_run

    export_run(RunDirectory(_config(run_file).run.dir), output, _report, step=step)


@app.command()
def inspect(
    paths: Annotated[
        list[Path], typer.Argument(help="A run directory, or rollout files (*.parquet) and directories of them.")
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
    from shoal.tools import inspect_rollouts

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
        paths,
        chosen,
        order=known_order(sort),
        reverse=reverse,
        limit=limit,
        tokenizer=tokenizer,
        policy=policy,
        as_lines=json,
        max_characters=max_characters,
    )


@app.command("plan-memory")
def plan_memory(
    run_file: RunFile = None,
    ranks: Annotated[int, typer.Option(help="Trainer processes that share the model.")] = 1,
) -> None:
    """What the trainer of a run will hold in memory, before anything is loaded."""
    from shoal.tools import show_memory_plan

    show_memory_plan(_config(run_file), ranks, _report)


@app.command()
def validate(run_file: RunFile = None, dry_run: DryRun = False, threads: Threads = 0) -> None:
    """Judge submissions; start as many as you like."""
    from shoal import roles

    roles.validate(_directory(run_file, dry_run), _report, threads=threads)


@app.command()
def evaluate(run_file: RunFile = None, dry_run: DryRun = False, threads: Threads = 0) -> None:
    """Measure published versions on held-out tasks."""
    from shoal import roles

    roles.evaluate(_directory(run_file, dry_run), _report, threads=threads)


@app.command()
def relay(
    upstream: Annotated[list[str], typer.Option(help="Origin or relay to follow; may be given several times.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks one.")] = 7302,
    dir: Annotated[Path, typer.Option(help="Where shards and the relay's key are kept.")] = Path("relay"),
    run_key: Annotated[str | None, typer.Option(help="Public key of the run; pinned at first use without it.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Coordinator to register with, so that workers find it.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="How others reach this relay, if not by host and port.")
    ] = None,
    peer: Annotated[
        list[str], typer.Option(help="Relay to exchange shards with, besides those that the coordinator knows.")
    ] = [],  # noqa: B006
    max_upload_mb_s: Annotated[float, typer.Option(min=0, help="Most MB/s sent to all; 0 is no limit.")] = 0,
    max_client_mb_s: Annotated[float, typer.Option(min=0, help="Most MB/s sent to one client; 0 is no limit.")] = 0,
    max_download_mb_s: Annotated[float, typer.Option(min=0, help="Most MB/s received; 0 is no limit.")] = 0,
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections in all.")] = 4096,
    max_client_connections: Annotated[int, typer.Option(min=1, help="Open connections of one client.")] = 512,
    ca: Authority = None,
) -> None:
    """Pass weights on; nobody has to trust you for it."""
    from shoal import roles
    from shoal.broadcast import ServerLimits

    limits = ServerLimits(
        connections_per_client=max_client_connections,
        connections_total=max_connections,
        bytes_s_per_client=max_client_mb_s * 1e6,
        bytes_s_total=max_upload_mb_s * 1e6,
    )
    roles.relay(
        upstream,
        _report,
        root=dir,
        host=host,
        port=port,
        run_key=run_key,
        coordinator=coordinator,
        public_url=public_url,
        peers=peer,
        limits=limits,
        max_download_bytes_s=max_download_mb_s * 1e6,
        authority=ca,
    )


@app.command()
def work(
    url: Url,
    key: Annotated[Path | None, typer.Option(help="Your key file; made at first use.")] = None,
    run_key: Annotated[str | None, typer.Option(help="Public key of the run; pinned at first use without it.")] = None,
    dir: Annotated[Path, typer.Option(help="Where your key, the weights and logs are kept.")] = Path("~/.shoal"),
    name: Annotated[str, typer.Option(help="How you appear in the run's view.")] = "",
    threads: Threads = 0,
    engine: Annotated[str, typer.Option(help="`torch`, or `vllm` where it is installed.")] = "torch",
    verifier: Annotated[
        list[str] | None, typer.Option(help="Code of the run's owner that may be imported here, as module:function.")
    ] = None,
    ca: Authority = None,
    cheat: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Contribute: join a run with one command, on any machine."""
    from shoal import roles

    roles.work(
        url,
        _report,
        root=dir.expanduser(),
        key_file=key.expanduser() if key else None,
        run_key=run_key,
        name=name,
        threads=threads,
        engine=engine,
        own_verifiers=verifier or (),
        authority=ca,
        cheat=cheat,
    )


@app.command()
def up(run_file: RunFile = None, dry_run: DryRun = False) -> None:
    """Start and supervise the owner's roles of a run on this host."""
    from shoal.demo import run_owner_roles

    run_owner_roles(_directory(run_file, dry_run), _report)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Honest workers.")] = 3,
    async_level: Annotated[
        int | None, typer.Option(help="How many versions rollouts may lag behind; 0 is synchronous.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run's secret and so of every task and sample.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an earlier demo away and start over.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Train the bundled policy with a whole swarm on this machine, two cheaters included."""
    from shoal.demo import demo_config, run_demo

    config = demo_config(_settings, steps=steps, async_level=async_level, seed=seed)
    if dry_run:
        typer.echo(to_toml(config))
        return
    raise SystemExit(run_demo(config, honest_workers=workers, fresh=fresh))


@app.command()
def doctor() -> None:
    """Check this machine and say what is missing."""
    from shoal.doctor import examine

    raise SystemExit(examine(_report))


@app.command("config")
def show_settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the reference page of the docs.")] = False,
) -> None:
    """Every setting with its default and its reason."""
    if markdown:
        typer.echo(reference_page(), nl=False)
        return
    for key, default, reason in describe():
        typer.echo(f"{key} = {default}\n    {reason}")


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(help="Calibration file to write.")],
    run_file: RunFile = None,
    prompts: Annotated[int, typer.Option(help="Honest completions per setting.")] = 512,
    engine: Annotated[str, typer.Option(help="What honest workers generate with: torch or vllm.")] = "torch",
    device: Annotated[str, typer.Option(help="Where the torch engine computes: cpu or cuda.")] = "cpu",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Compute type, each a numerics class; default: float32 and bfloat16.")
    ] = None,
    extend: Annotated[bool, typer.Option("--extend", help="Keep the other classes that OUT has already.")] = False,
) -> None:
    """Measure honest arithmetic and forgeries for a model, and write the limits of its verdicts."""
    from shoal.validation.calibrate import Machine, calibrate_run

    machine = Machine(engine, device, tuple(dtype or Machine.dtypes))
    calibrate_run(_config(run_file), prompts, out, _report, machine=machine, extend=extend)


@app.command()
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
        _report(str(known))
        secret = known.step_secret
    else:
        secret = _secret_bytes(step_secret)
    verdict = verify_file(data, policy, run, secret, calibration=calibration, tasks=tasks)
    for line in verdict_lines(verdict):
        _report(line)
    raise SystemExit(0 if verdict.accepted else 1)


@ledger_app.command("export")
def ledger_export(url: Url, out: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """Save the whole ledger with its signed seal."""
    from shoal.files import write_atomic
    from shoal.protocol import CoordinatorClient

    with CoordinatorClient(url, None, deadline_s=LOOK_DEADLINE_S) as client:
        write_atomic(out, client.ledger_export())
    _report(f"wrote {out}")


@ledger_app.command("verify")
def ledger_verify(
    file: Annotated[Path, typer.Argument(help="An exported ledger.")],
    coordinator_key: Annotated[
        str | None, typer.Option(help="Key that must have signed; default: the key in the seal.")
    ] = None,
) -> None:
    """Re-check an exported ledger offline: chain, signatures, count, and the draw of every audit."""
    from shoal.coordinator import check_draws, verify_export

    lines = _read_lines(file)
    key = coordinator_key or _seal_key(lines)
    entries, run_id = verify_export(lines, key)
    draws = check_draws(entries)
    _report(
        f"ok: {len(entries)} entries of run {run_id}, signed by {key[:12]}…, head {entries[-1].hash if entries else '-'}"
    )
    _report(f"ok: {draws} audit draws repeated with the published secrets")


@ledger_app.command("show")
def ledger_show(file: Annotated[Path, typer.Argument(help="An exported ledger.")]) -> None:
    """Print the entries and the balances that follow from them."""
    from shoal.coordinator import balances, verify_export

    lines = _read_lines(file)
    entries, _ = verify_export(lines, _seal_key(lines))
    for entry in entries:
        typer.echo(f"{entry.seq:6d} {entry.kind:10s} {entry.body}")
    for worker, account in balances(entries).items():
        typer.echo(f"{worker[:12]}… {account}")


def _seal_key(lines: Sequence[bytes]) -> str:
    """The key that the export says it is signed with."""
    from shoal.coordinator import LedgerError
    from shoal.identity import Envelope

    try:
        return Envelope.from_bytes(lines[-1]).key
    except IntegrityError:
        raise LedgerError("The export does not end with a seal: it is truncated, or not a ledger export.") from None


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


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
