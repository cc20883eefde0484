"""Episodes without a run: which environment a task meets here, its prompt, and a fresh episode of it as often as wanted.

For what an owner does with the code that is installed on the own machine: evaluate, curate, calibrate. Workers and validators
follow the run's descriptor instead (`tasks/workload.py`).
"""

from dataclasses import dataclass

from shoal.tasks.bridge import build_bridge
from shoal.tasks.codec import PromptStyle, TextCodec
from shoal.tasks.environments.episodes import Episode, Rules, episode_prompt, task_arguments
from shoal.tasks.environments.host import shared_host
from shoal.tasks.environments.registry import environment_of, refer
from shoal.tasks.task import Task


@dataclass(frozen=True)
class World:
    """What one task meets: the same at each beginning."""

    rules: Rules
    task: Task
    seed: int

    def begin(self) -> Episode:
        host, step_s = shared_host(self.rules.reference.name), self.rules.reference.limits.step_s
        return Episode(self.rules, self.seed, task_arguments(self.task), lambda: host.open(step_s))


class Meeting:
    """Tasks and their environments; `usual` is the one of tasks that name none, empty if a verifier scores them."""

    def __init__(self, codec: TextCodec, style: PromptStyle, max_tokens: int, usual: str) -> None:
        self._codec, self._style, self._max_tokens, self._usual = codec, style, max_tokens, usual
        self._known: dict[str, Rules] = {}

    def world(self, task: Task, seed: int) -> World | None:
        name = environment_of(task, self._usual)
        return World(self._rules(name), task, seed) if name else None

    def prompt(self, task: Task, target_length: int, seed: int) -> tuple[tuple[int, ...], World | None]:
        """The prompt, and the world if the task has one."""
        world = self.world(task, seed)
        if world is None:
            return tuple(self._codec.prompt_tokens(task, target_length, self._style)), None
        return tuple(episode_prompt(world.rules, task, target_length, seed)), world

    def _rules(self, name: str) -> Rules:
        if name not in self._known:
            reference = refer(name)
            bridge = build_bridge(self._codec, self._style, reference)
            self._known[name] = Rules(reference, bridge, self._codec, self._style, self._max_tokens)
        return self._known[name]
