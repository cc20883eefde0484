"""What a calibration samples: prompts of a run, honest workers of a machine, and the validator's scores of the same tokens.

The tasks of a run with an environment are played as episodes, since an honest worker's later turns continue a cache that the
validator's one prefill does not have.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shoal.config import LoraConfig, ShoalConfig
from shoal.errors import ConfigError
from shoal.policy.directory import weight_files
from shoal.policy.embedded.engine import TorchEngine
from shoal.policy.engine import Completion, Engine, GenerationRequest, Scored, ScoreRequest
from shoal.policy.engines import ENGINES, Numerics, devices_here, make_engine
from shoal.policy.episodes import play_all
from shoal.policy.lora.files import read_settings
from shoal.tasks import PromptStyle, TextCodec, load_tasks
from shoal.tasks.environments.episodes import Episode
from shoal.tasks.environments.meeting import Meeting, World

SMALL_MODEL_BYTES = 64 << 20
"""Below this, threads wait for each other longer than they compute."""

OnCompletions = Callable[[float], None]
"""Takes how many completions of a call are done so far."""


@dataclass(frozen=True)
class Machine:
    """What honest workers compute with: each dtype is a numerics class."""

    engine: str = "torch"
    device: str = "cpu"
    dtypes: Sequence[str] = ("float32",)

    def check(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"There is no engine {self.engine!r}.", hint=f"Known: {', '.join(ENGINES)}.")
        if self.engine == "vllm" and len(self.dtypes) != 1:
            raise ConfigError(
                "vLLM starts once per process, so it is calibrated for one compute type at a time.",
                hint="Name one with --dtype, and add others with --extend.",
            )


@dataclass(frozen=True)
class Setting:
    """How an honest worker runs its engine, and its share of the sample beside the others."""

    threads: int
    rows: int
    share: float = 1.0


@dataclass(frozen=True)
class Work:
    """Prompts and limits of the completions, without the numerics that make them."""

    model_directory: Path
    prompts: Sequence[tuple[int, ...]]
    eos_token_ids: Sequence[int]
    temperature: float
    max_new_tokens: int
    submission_size: int
    """Completions that are checked together."""
    worlds: Mapping[tuple[int, ...], World] = field(default_factory=dict)
    """Of the prompts whose tasks meet an environment."""
    adapter: Path | None = None
    """A PEFT directory: the policy is this adapter on the model."""

    @classmethod
    def of(cls, config: ShoalConfig, directory: Path, prompt_count: int, adapter: Path | None = None) -> "Work":
        codec, tasks, rollouts = TextCodec.from_directory(directory), load_tasks(config.tasks).train, config.rollouts
        targets, style = config.reward.target_lengths or (0,), PromptStyle.of(config.tasks)
        meeting = Meeting(codec, style, rollouts.max_new_tokens, config.tasks.environment)
        asked = [
            meeting.prompt(tasks[index % len(tasks)], targets[index % len(targets)], index)
            for index in range(prompt_count)
        ]
        size = min(rollouts.group_size * rollouts.tasks_per_slot, prompt_count)
        return cls(
            directory,
            [prompt for prompt, _ in asked],
            codec.eos_token_ids,
            rollouts.temperature,
            rollouts.max_new_tokens,
            size,
            {prompt: world for prompt, world in asked if world is not None},
            adapter,
        )

    def engine(
        self, dtype: str = "float32", max_batch: int = 256, device: str = "cpu", base: Path | None = None
    ) -> TorchEngine:
        """The policy, on another `base` if one is given."""
        engine = TorchEngine(
            base or self.model_directory,
            eos_token_ids=self.eos_token_ids,
            dtype=dtype,
            max_batch=max_batch,
            device=device,
            lora=self.lora,
        )
        if self.adapter is not None:
            engine.load(self.adapter)
        return engine

    @property
    def lora(self) -> LoraConfig | None:
        return read_settings(self.adapter) if self.adapter is not None else None

    @property
    def threads(self) -> int:
        """Compute threads for scoring and forging."""
        size = sum(path.stat().st_size for path in weight_files(self.model_directory))
        return 1 if size < SMALL_MODEL_BYTES else torch.get_num_threads()

    def parts(self, submissions: int) -> list[int]:
        """Completions of whole submissions, cut so that no part holds more than one completion of each prompt."""
        most = max(1, len(self.prompts) // self.submission_size)
        counts = [min(most, submissions - done) for done in range(0, submissions, most)]
        return [count * self.submission_size for count in counts]

    def requests(self, salt: str, count: int) -> list[GenerationRequest]:
        """The prompts in turn, with seeds of their own: another salt is another sample."""
        return [
            GenerationRequest(
                self.prompts[index % len(self.prompts)],
                random.Random(f"{salt} {index}").getrandbits(64),
                self.max_new_tokens,
            )
            for index in range(count)
        ]

    def episodes(self, requests: Sequence[GenerationRequest]) -> list[Episode | None]:
        worlds = [self.worlds.get(request.prompt_tokens) for request in requests]
        return [world.begin() if world is not None else None for world in worlds]


@dataclass
class Sample:
    """Completions, and the validator's scores of them."""

    requests: Sequence[GenerationRequest]
    completions: Sequence[Completion]
    scored: Sequence[Scored]

    def submissions(self, size: int) -> Iterator["Sample"]:
        """Whole submissions; what is left over is dropped."""
        for start in range(0, len(self.completions) - size + 1, size):
            part = slice(start, start + size)
            yield Sample(self.requests[part], self.completions[part], self.scored[part])


class HonestWorkers:
    """Honest workers of a machine, under settings that differ as honest machines do."""

    def __init__(self, work: Work, machine: Machine) -> None:
        machine.check()
        self._work, self._machine = work, machine
        self._vllm: Engine | None = None

    def generate(
        self, requests: Sequence[GenerationRequest], dtype: str, setting: Setting, on_done: OnCompletions
    ) -> tuple[str, list[Completion]]:
        """The numerics class, and what such a worker generates."""
        rows = setting.rows
        if self._machine.engine == "vllm":
            engine = self._vllm = self._vllm or self._start_vllm(dtype)
            parts = [requests[start : start + rows] for start in range(0, len(requests), rows)]
        else:
            engine, parts = self._work.engine(dtype, rows, self._machine.device), [requests]
        with threads(setting.threads):
            made = [
                done for part in parts for done in generate(engine, self._work, part, self._work.temperature, on_done)
            ]
        return engine.numerics_class, made

    def _start_vllm(self, dtype: str) -> Engine:
        # Once, and before the scorer: it looks through all modules of the process and stumbles over those of a compiler.
        engine = make_engine(
            "vllm",
            self._work.model_directory,
            self._work.eos_token_ids,
            numerics=Numerics(devices_here()[0], dtype),
            lora=self._work.lora,
        )
        if self._work.adapter is not None:
            engine.load(self._work.adapter)
        return engine


def generate(
    engine: Engine, work: Work, requests: Sequence[GenerationRequest], temperature: float, on_done: OnCompletions
) -> list[Completion]:
    longest = max((request.max_new_tokens for request in requests), default=1)
    last = len(requests)

    def on_tokens(tokens: int) -> None:
        on_done(min(tokens / longest, last))

    made = play_all(engine, requests, work.episodes(requests), temperature=temperature, on_progress=on_tokens)
    on_done(last)
    return made


def score(
    engine: Engine, requests: Sequence[GenerationRequest], completions: Sequence[Completion], temperature: float
) -> list[Scored]:
    return engine.score(
        [
            ScoreRequest(
                request.prompt_tokens, tuple(completion.tokens), request.seed, tuple(completion.segment_lengths)
            )
            for request, completion in zip(requests, completions, strict=True)
        ],
        temperature=temperature,
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
