"""The flags that `shoal eval` and `shoal curate` share: how a policy is asked, and by how many."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import EngineName
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import ShoalConfig
    from shoal.evaluation import SamplingSettings
    from shoal.evaluation.executors import EngineSpec, Executor
    from shoal.protocol.descriptor import RunDescriptor

Samples = Annotated[int, typer.Option("--samples", "-k", min=1, help="k: completions per task.")]
Run = Annotated[
    str | None,
    typer.Option(help="Sample as this run does: temperature, lengths and prompts. Run file, directory or address."),
]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sampling temperature; default: the run's, or 1.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Limit of a completion; default: the run's, or 4096.")]
Targets = Annotated[
    str | None, typer.Option(help="Thinking budgets, such as 1000,2000, or none; default: the run's, or none.")
]
AskedPrompt = Annotated[str | None, typer.Option(help="System turn of the chat; default: the run's, or none.")]
AskedThinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Open a think tag; without it the whole completion is the answer. Default: as the run does, or yes.",
    ),
]
Environment = Annotated[
    str | None,
    typer.Option(
        help="What tasks meet that name no environment: a built-in one or module:Class; default: the run's, or none."
    ),
]
Processes = Annotated[int, typer.Option(min=1, help="Copies of the model that work at once.")]
RayAddress = Annotated[
    str | None, typer.Option("--ray", help="Address of a Ray cluster to work on; `auto` finds the one of this machine.")
]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs of each copy on Ray.")]
BatchTasks = Annotated[int, typer.Option(min=1, help="Tasks of one batch: what a kill may lose.")]
SystemPrompt = Annotated[str, typer.Option(help="System turn of the chat.")]
Thinking = Annotated[bool, typer.Option(help="Open a think tag; without it the whole completion is the answer.")]
Threads = Annotated[int, typer.Option(min=0, help="Compute threads of each copy; 0 lets torch decide.")]


@dataclass(frozen=True)
class Asking:
    """The flags of commands that ask a policy."""

    samples: Samples = 8
    run: Run = None
    temperature: Temperature = None
    max_new_tokens: MaxNewTokens = None
    target_lengths: Targets = None
    system_prompt: AskedPrompt = None
    thinking: AskedThinking = None
    environment: Environment = None
    engine: EngineName = "torch"
    processes: Processes = 1
    ray: RayAddress = None
    gpus: Gpus = 0.0
    batch_tasks: BatchTasks = 32
    threads: Threads = 0

    def settings(self, seed: str, category: str = "") -> "SamplingSettings":
        """What a flag says, else what the run does, else the default."""
        given = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "target_lengths": _lengths(self.target_lengths),
            "environment": self.environment,
        }
        style = {"system_prompt": self.system_prompt, "thinking": self.thinking}
        usual = self._usual_settings()
        return replace(
            usual,
            samples=self.samples,
            style=replace(usual.style, **_chosen(style)),
            seed=seed,
            category=category,
            **_chosen(given),
        )

    def _usual_settings(self) -> "SamplingSettings":
        """As the run samples, or the defaults."""
        from shoal.evaluation import SamplingSettings
        from shoal.tasks import PromptStyle

        rules = self.rules()
        if rules is None:
            return SamplingSettings(temperature=1.0, max_new_tokens=4096)
        return SamplingSettings(
            temperature=rules.rollouts.temperature,
            max_new_tokens=rules.rollouts.max_new_tokens,
            target_lengths=rules.reward.target_lengths,
            style=PromptStyle.of(rules.tasks),
            environment=rules.tasks.environment,
        )

    def rules(self) -> "ShoalConfig | RunDescriptor | None":
        """The run whose way of sampling is used."""
        from shoal.owner.control import find_rules

        return None if self.run is None else find_rules(self.run)

    def executor(self, model: str, settings: "SamplingSettings") -> "tuple[EngineSpec, Executor]":
        from shoal.evaluation.answering import make_executor
        from shoal.evaluation.executors import EngineSpec
        from shoal.roles.process import use_threads

        use_threads(0)
        spec = EngineSpec(model, self.engine, settings, self.threads)
        return spec, make_executor(spec, count=self.processes, ray_address=self.ray, gpus=self.gpus)


def _chosen(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip() and text != "none")
    except ValueError:
        raise ConfigError(
            f"--target-lengths {text} is no list of lengths.", hint="Such as 1000,2000, or none."
        ) from None


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of `Asking` beside its own, and hands them over as one value: typer has no groups of parameters."""
    names = [field.name for field in fields(Asking)]

    def with_flags(**given: Any) -> None:
        asking = Asking(**{name: given.pop(name) for name in names})
        command(**given, asking=asking)

    own = [one for one in signature(command).parameters.values() if one.name != "asking"]
    plain = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own, *signature(Asking).parameters.values())]
    with_flags.__signature__ = Signature(plain)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {one.name: one.annotation for one in plain}
    with_flags.__doc__ = command.__doc__
    return with_flags
