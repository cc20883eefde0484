"""The flags that `shoal eval` and `shoal curate` share: how a policy is asked, and by how many."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import EngineName
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.evaluation import SamplingSettings
    from shoal.evaluation.executors import EngineSpec, Executor

Samples = Annotated[int, typer.Option("--samples", "-k", min=1, help="k: completions per task.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Hard limit of a completion.")]
Targets = Annotated[str, typer.Option(help="Thinking budgets to ask for, such as 1000,2000; none by default.")]
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
    temperature: Temperature = 1.0
    max_new_tokens: MaxNewTokens = 4096
    target_lengths: Targets = ""
    system_prompt: SystemPrompt = ""
    thinking: Thinking = True
    engine: EngineName = "torch"
    processes: Processes = 1
    ray: RayAddress = None
    gpus: Gpus = 0.0
    batch_tasks: BatchTasks = 32
    threads: Threads = 0

    def settings(self, seed: str, category: str = "") -> "SamplingSettings":
        from shoal.evaluation import SamplingSettings
        from shoal.tasks import PromptStyle

        try:
            lengths = tuple(int(part) for part in self.target_lengths.split(",") if part.strip())
        except ValueError:
            raise ConfigError(
                f"--target-lengths {self.target_lengths} is no list of lengths.", hint="Such as 1000,2000."
            ) from None
        return SamplingSettings(
            samples=self.samples,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            target_lengths=lengths,
            style=PromptStyle(self.system_prompt, thinking=self.thinking),
            seed=seed,
            category=category,
        )

    def executor(self, model: str, settings: "SamplingSettings") -> "tuple[EngineSpec, Executor]":
        from shoal.evaluation.answering import make_executor
        from shoal.evaluation.executors import EngineSpec
        from shoal.roles.process import use_threads

        use_threads(0)
        spec = EngineSpec(model, self.engine, settings, self.threads)
        return spec, make_executor(spec, count=self.processes, ray_address=self.ray, gpus=self.gpus)


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
