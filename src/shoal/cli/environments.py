"""`shoal env`: environments of one's own, checked before a run depends on them."""

import json
from typing import Annotated, Any

import typer

from shoal.errors import ConfigError

env_app = typer.Typer(no_args_is_help=True, help="Environments that episodes meet.")

EXAMPLES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "calculator": (
        {"answer": 66},
        [
            '</think><tool_call>{"name": "calculate", "arguments": {"expression": "47+38-19"}}</tool_call>',
            "</think>66",
        ],
        ["</think>66"],
    ),
    "guess-number": ({}, ["50", "25", "12", "6", "75"], ["18"]),
    "reasoning-gym": (
        {"dataset": "basic_arithmetic", "entry": {"question": "1 + 1", "answer": "2", "metadata": {}}},
        ["</think>3", "</think>2"],
        ["</think>2"],
    ),
}
"""Task, actions and a solution for the first seed of each built-in environment."""


@env_app.command("check")
def check(
    name: Annotated[str, typer.Argument(help="A built-in environment, or module:Class.")],
    task: Annotated[str, typer.Option(help="What `reset` gets beside the seed, as JSON.")] = "",
    action: Annotated[list[str] | None, typer.Option(help="What the policy says in a turn; once per turn.")] = None,
    solution: Annotated[
        list[str] | None, typer.Option(help="Turns that earn the top reward with seed 1; once per turn.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=2, max=64, help="Seeds to play.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play episodes in fresh processes under other conditions, and say whether a validator could replay them."""
    from shoal.tasks.environments.checking import check_environment, check_lines

    example_task, example_actions, example_solution = EXAMPLES.get(name, ({}, ["", "1", "</think>1"], []))
    is_example = name in EXAMPLES and not task and not action
    found = check_environment(
        name,
        task=_parsed(task) if task else example_task,
        actions=action or example_actions,
        solution=solution or (example_solution if is_example else []),
        episodes=episodes,
    )
    if as_json:
        rows = [vars(one) for one in found.checks]
        typer.echo(json.dumps({"environment": name, "replay": found.replay, "passed": found.passed, "checks": rows}))
    else:
        typer.echo("\n".join(check_lines(found)))
    raise SystemExit(0 if found.passed else 1)


def _parsed(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError("--task is no JSON object.", hint="Such as '{\"answer\": 66}'.")
    return tree
