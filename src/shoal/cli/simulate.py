"""`shoal simulate`: a scenario, or a run as it was measured, on the event clock. Needs no model, no GPU and no network."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import report
from shoal.errors import ConfigError
from shoal.files import write_atomic

if TYPE_CHECKING:
    from shoal.simulation.swarm import SwarmSpec


def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
            help="home-swarm, university-lab, intellect-2, ten-thousand-laptops, a file, or a run's directory."
        ),
    ],
    steps: Annotated[int | None, typer.Option(min=2, help="Training steps; those of the scenario by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another draw of lengths, speeds and audits.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw a figure: a .svg or .png file.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the scenario that was measured from a run to this file, and stop.")
    ] = None,
) -> None:
    """Simulate a swarm with the rules of a real one: time per step, who waits, waste, bytes, and what the run needs."""
    from shoal.cli.progress import progress_bar
    from shoal.observe.simulated import simulated_curve, simulated_table, write_figure
    from shoal.simulation.swarm import run_swarm
    from shoal.simulation.swarm.spec import with_values

    if write is not None:
        _write_measured(scenario, write)
        return
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"A figure is a .svg or .png file, not {plot.name}.", hint="Give --plot a name that ends so.")
    given = {name: value for name, value in (("steps", steps), ("seed", seed)) if value is not None}
    spec = with_values(_spec(scenario), run=given)
    with progress_bar(f"simulating {spec.machines} workers") as progress:
        result = run_swarm(spec, progress)
    report(simulated_table(result))
    report(f"\n{simulated_curve(result)}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(json_file, json.dumps(result.to_json(), indent=1).encode() + b"\n")
    if plot is not None:
        write_figure([result], plot)


def _spec(scenario: str) -> "SwarmSpec":
    from shoal.rundir import RunDirectory
    from shoal.simulation.swarm import load_scenario
    from shoal.simulation.swarm.trial import measured_scenario

    if Path(scenario).is_dir():
        return measured_scenario(RunDirectory(Path(scenario)))
    return load_scenario(scenario)


def _write_measured(scenario: str, target: Path) -> None:
    from shoal.rundir import RunDirectory
    from shoal.simulation.swarm.trial import measure, to_toml

    if not Path(scenario).is_dir():
        raise ConfigError(
            f"{scenario} is no run's directory.", hint="--write measures a run; a scenario is a file already."
        )
    write_atomic(target, to_toml(measure(RunDirectory(Path(scenario)))).encode())
    report(f"wrote {target}; edit it, then: shoal simulate {target}")
