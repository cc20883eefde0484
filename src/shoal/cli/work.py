"""`shoal work`: join a run with one command; pause, resume, finish or look at a worker that runs, from another terminal.

`shoal work WHERE` is `shoal work join WHERE`: any first word that is no verb is a run. Thin; heavy imports happen inside.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from shoal.cli.extras import with_extra
from shoal.cli.flags import Authority, EngineName, Joinable, Threads, in_home, report
from shoal.errors import ConfigError

Dir = Annotated[Path, typer.Option("--dir", help="Where your key, the weights and logs are kept.")]
WorkerDir = Annotated[Path, typer.Option("--dir", help="The worker's directory.")]
HOME = Path("~/.shoal")


class JoinsByDefault(TyperGroup):
    """A group whose first word may be left out."""

    default = "join"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args if args and args[0] in self.commands else [self.default, *args]
        return super().parse_args(ctx, words)


work_app = typer.Typer(cls=JoinsByDefault, help="Contribute: join a run, or control a worker that runs.")


def join(
    where: Joinable,
    key: Annotated[Path | None, typer.Option(help="Your key file; made at first use.")] = None,
    run_key: Annotated[str | None, typer.Option(help="Public key of the run; pinned at first use without it.")] = None,
    dir: Dir = HOME,
    name: Annotated[str, typer.Option(help="How you appear in the run's view.")] = "",
    threads: Threads = 0,
    engine: EngineName = "torch",
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            help="Code of the run's owner that may be imported here, as module:function; `all` trusts the owner."
        ),
    ] = None,
    ca: Authority = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve this worker's own metrics to Prometheus, on loopback; 0 picks a port."
        ),
    ] = None,
    when: Annotated[
        Literal["always", "idle"],
        typer.Option(help="`idle`: only while nobody has used this machine for five minutes."),
    ] = "always",
    not_on_battery: Annotated[
        bool, typer.Option("--not-on-battery", help="Rest while this machine is on battery.")
    ] = False,
    hours: Annotated[str, typer.Option(help="Only at these hours by this machine's clock, such as 22-7.")] = "",
    cpus: Annotated[int, typer.Option(min=0, help="Most cores to use; 0 uses all.")] = 0,
    memory: Annotated[float, typer.Option(min=0, help="Most gigabytes that the worker may hold; 0 is no limit.")] = 0,
    nice: Annotated[bool, typer.Option("--nice", help="Let every other process go first.")] = False,
    cheat: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Contribute: join a run with one command, on any machine. `shoal work pause`, `resume`, `finish` and `status` control it."""
    from shoal.contributor import Hours, Limits
    from shoal.owner.control import find_address
    from shoal.roles import worker as role

    limits = Limits(when == "idle", not_on_battery, Hours.parse(hours) if hours else None, memory_bytes(memory))
    url, known_key = find_address(where)
    role.work(
        url,
        report,
        root=in_home(dir),
        key_file=in_home(key) if key else None,
        run_key=run_key or known_key,
        name=name,
        threads=threads,
        engine=engine,
        own_verifiers=None if verifier == ["all"] else verifier or (),
        authority=ca,
        cheat=cheat,
        metrics_port=metrics_port,
        share=role.Share(limits, cpus, nice),
    )


def memory_bytes(gigabytes: float) -> int:
    """A number may also be none, or have no end."""
    if not math.isfinite(gigabytes):
        raise ConfigError(f"--memory {gigabytes} is no amount of memory.", hint="Give gigabytes, such as 4 or 0.5.")
    return int(gigabytes * 1e9)


work_app.command("join")(with_extra("work", join))


@work_app.command("pause")
def pause(dir: WorkerDir = HOME) -> None:
    """Let the worker rest: what it has begun ends within seconds or goes back. `shoal work resume` ends it."""
    _ask(dir, "pause")


@work_app.command("resume")
def resume(dir: WorkerDir = HOME) -> None:
    """Let a paused worker go on."""
    _ask(dir, "work")


@work_app.command("finish")
def finish(dir: WorkerDir = HOME) -> None:
    """Let the worker finish and submit what it has begun, and leave."""
    _ask(dir, "finish")


@work_app.command("status")
def status(
    dir: WorkerDir = HOME, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """What the worker does now."""
    from shoal.contributor import Control

    seen = Control(in_home(dir)).status()
    typer.echo(json.dumps(asdict(seen)) if as_json else str(seen))


def _ask(root: Path, wish: Literal["work", "pause", "finish"]) -> None:
    from shoal.contributor import Control

    seen = Control(in_home(root)).ask(wish)
    typer.echo(str(seen) if seen is not None else "the worker has ended")
