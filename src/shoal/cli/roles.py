"""The commands of the roles: `init`, `coordinator`, `train`, `validate`, `evaluator`, `relay`, `up`, `demo`.

Thin: each parses its flags and calls one function. Heavy imports happen inside.
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import (
    Authority,
    DryRun,
    Threads,
    Where,
    print_dry_run,
    report,
    report_join_command,
    report_page_links,
    run_config,
    run_directory,
)
from shoal.config.schema import EngineKind

AutoRewind = Annotated[
    bool,
    typer.Option(
        "--auto-rewind",
        help="If a repeated step gives other weights than those published, return to the last checkpoint (see `run rewind`).",
    ),
]


def init(context: typer.Context, where: Where = None, dry_run: DryRun = False) -> None:
    """Make a run: keys, secret, base files and the signed descriptor."""
    directory = run_directory(context, where, dry_run)
    report(f"run {directory.descriptor().run_id} in {directory.root}")
    report_join_command(directory)


def coordinator(context: typer.Context, where: Where = None, dry_run: DryRun = False) -> None:
    """Serve steps, leases, verdicts and the ledger of a run."""
    from shoal.roles import coordinator as role

    role.coordinate(run_directory(context, where, dry_run), report)


def train(
    context: typer.Context,
    where: Where = None,
    dry_run: DryRun = False,
    threads: Threads = 0,
    replay: Annotated[
        Path | None, typer.Option(help="Train from the rollout files of this directory, without a swarm.")
    ] = None,
    auto_rewind: AutoRewind = False,
) -> None:
    """Train on accepted rollouts and publish every version; works under torchrun too."""
    from shoal.roles import trainer
    from shoal.roles.process import use_threads

    if replay is None:
        trainer.train(run_directory(context, where, dry_run), report, threads=threads, auto_rewind=auto_rewind)
        return
    config = run_config(context, where, dry_run)
    from shoal.owner.records import replay_rollouts

    use_threads(threads)
    replay_rollouts(config, replay, config.run.dir / "replay", report)


def validate(
    context: typer.Context,
    where: Where = None,
    dry_run: DryRun = False,
    threads: Threads = 0,
    engine: Annotated[
        EngineKind | None, typer.Option(help="`torch` or `vllm`; default: `validation.engine` of the run.")
    ] = None,
) -> None:
    """Validate submissions; start as many as you like."""
    from shoal.roles import validator as role

    role.validate(run_directory(context, where, dry_run), report, threads=threads, engine=engine or "")


def evaluator(context: typer.Context, where: Where = None, dry_run: DryRun = False, threads: Threads = 0) -> None:
    """Measure published versions on held-out tasks."""
    from shoal.roles import evaluator as role

    role.evaluate(run_directory(context, where, dry_run), report, threads=threads)


def relay(
    upstream: Annotated[list[str], typer.Option(help="Origin or relay to follow; may be given several times.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks one.")] = 7302,
    dir: Annotated[Path, typer.Option(help="Where shards and the relay's key are kept.")] = Path("relay"),
    run_key: Annotated[str | None, typer.Option(help="Public key of the run; pinned at first use without it.")] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(help="Coordinator to register with, so that workers find it: address, run file or directory."),
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
    from shoal.broadcast import RelaySettings, ServerLimits
    from shoal.owner.control import find_address
    from shoal.roles import relay as role

    limits = ServerLimits(
        connections_per_client=max_client_connections,
        connections_total=max_connections,
        bytes_s_per_client=max_client_mb_s * 1e6,
        bytes_s_total=max_upload_mb_s * 1e6,
    )
    settings = RelaySettings(
        dir,
        upstream,
        run_key,
        host,
        port,
        public_url,
        peers=peer,
        limits=limits,
        max_download_bytes_s=max_download_mb_s * 1e6,
    )
    url = find_address(coordinator)[0] if coordinator is not None else None
    role.relay(settings, report, coordinator=url, authority=ca)


def up(
    context: typer.Context,
    where: Where = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers to start beside the owner's roles.")] = 0,
    relays: Annotated[int, typer.Option(min=0, help="Relays to start, on the ports after the origin's.")] = 2,
    threads: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute threads: 8 for each role, or trainer=8; also validator, evaluator, workers."
            " Default: `run.threads`, or what the machine has."
        ),
    ] = None,
    auto_rewind: AutoRewind = False,
    dry_run: DryRun = False,
) -> None:
    """Start and supervise the owner's roles of a run on this host, with workers of its own if you like."""
    from shoal.host.swarm import run_swarm
    from shoal.host.threads import parse_threads

    parse_threads(threads or [])  # refused before anything is printed or made
    config = run_config(context, where, dry_run)
    chosen = parse_threads(threads or [], each=config.run.threads)
    directory = run_directory(context, where)
    report_join_command(directory)
    report_page_links(directory)
    run_swarm(directory, report, workers=workers, relays=relays, threads=chosen, auto_rewind=auto_rewind)


def demo(
    context: typer.Context,
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
    from shoal.host.demo import demo_config, run_demo

    config = demo_config(context.obj, steps=steps, async_level=async_level, seed=seed)
    if dry_run:
        print_dry_run(config)
        return
    raise SystemExit(run_demo(config, honest_workers=workers, fresh=fresh))
