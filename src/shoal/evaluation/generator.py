"""Answers of a policy: tasks in, k scored answers to each out, with any engine; a task with an environment is an episode.

The seed of an answer depends on the settings' seed, the problem and the number of the sample alone: batching, order and number of
processes change nothing, and two policies sampled with the same settings get the same noise, which makes their comparison sharper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from shoal.evaluation.answers import Answer
from shoal.files import CONFIG_FILE, digest_file
from shoal.policy import Completion, Engine, GenerationRequest, resolve_model
from shoal.policy.directory import ADAPTER_CONFIG_FILE, base_of, is_adapter, resolve_policy
from shoal.policy.engines import policy_engine
from shoal.policy.episodes import play_all
from shoal.tasks import PromptStyle, Score, Task, TextCodec, score_all
from shoal.tasks.environments.episodes import Episode
from shoal.tasks.environments.meeting import Meeting

DEFAULT_CATEGORY_KEYS = ("category", "domain", "subject", "difficulty")


@dataclass(frozen=True)
class SamplingSettings:
    samples: int = 8
    """k: answers per task."""
    temperature: float = 1.0
    max_new_tokens: int = 64
    target_lengths: tuple[int, ...] = ()
    """Thinking budgets; each task gets one of them, by its id."""
    style: PromptStyle = PromptStyle()  # noqa: RUF009  # frozen
    seed: str = "0"
    environment: str = ""
    """The one that tasks meet which name none; empty if a verifier scores them."""
    category: str = ""
    """Metadata field that names a task's category; without it the first usual one, then the task type."""


@dataclass(frozen=True)
class Question:
    task: Task
    target_length: int
    prompt_tokens: tuple[int, ...]
    environment_seed: int = 0


class AnswerGenerator:
    def __init__(self, engine: Engine, codec: TextCodec, settings: SamplingSettings) -> None:
        self.engine, self.codec, self.settings = engine, codec, settings
        self._meeting = Meeting(codec, settings.style, settings.max_new_tokens, settings.environment)

    @classmethod
    def load(cls, model: str, engine: str, settings: SamplingSettings) -> "AnswerGenerator":
        """The policy of `bundled`, a directory (of a model or a PEFT adapter) or a Hugging Face id, in an engine of its own."""
        codec = TextCodec.from_directory(resolve_model(model))
        return cls(policy_engine(engine, resolve_policy(model), codec.eos_token_ids), codec, settings)

    def answer(self, tasks: Sequence[Task], *, on_progress: Callable[[int], None] | None = None) -> list[Answer]:
        """k answers to each task, task by task."""
        return self.answer_questions([self.question(task) for task in tasks], on_progress=on_progress)

    def question(self, task: Task) -> Question:
        settings = self.settings
        targets = settings.target_lengths or (0,)
        target = targets[derive_seed(settings.seed, task.problem_id, "target") % len(targets)]
        world = derive_seed(settings.seed, task.problem_id, "environment") >> 32
        prompt, _ = self._meeting.prompt(task, target, world)
        return Question(task, target, prompt, world)

    def _episode(self, question: Question) -> Episode | None:
        world = self._meeting.world(question.task, question.environment_seed)
        return world.begin() if world is not None else None

    def answer_questions(
        self, questions: Sequence[Question], *, on_progress: Callable[[int], None] | None = None
    ) -> list[Answer]:
        settings = self.settings
        asked = [(question, sample) for question in questions for sample in range(settings.samples)]
        requests = [
            GenerationRequest(
                question.prompt_tokens,
                derive_seed(settings.seed, question.task.problem_id, str(sample)),
                settings.max_new_tokens,
            )
            for question, sample in asked
        ]
        episodes = [self._episode(question) for question, _ in asked]
        made = play_all(self.engine, requests, episodes, temperature=settings.temperature, on_progress=on_progress)
        verdicts = self._verdicts([question.task for question, _ in asked], made, episodes)
        return [
            self._answer(*asked[number], requests[number].seed, made[number], verdicts[number])
            for number in range(len(asked))
        ]

    def _verdicts(
        self, tasks: Sequence[Task], made: Sequence[Completion], episodes: Sequence[Episode | None]
    ) -> list[Score]:
        plain = [number for number, episode in enumerate(episodes) if episode is None]
        texts = [self.codec.answer_text(made[number].tokens, self.settings.style) for number in plain]
        found = score_all([(tasks[number], text) for number, text in zip(plain, texts, strict=True)])
        scores = dict(zip(plain, found, strict=True))
        for number, episode in enumerate(episodes):
            if episode is not None:
                scores[number] = Score(episode.reward, episode.why, exact=False, limited=episode.limited)
        return [scores[number] for number in range(len(tasks))]

    def _answer(self, question: Question, sample: int, seed: int, completion: Completion, verdict: Score) -> Answer:
        task = question.task
        return Answer(
            problem_id=task.problem_id,
            category=category_of(task, self.settings.category),
            task_type=task.task_type,
            sample=sample,
            seed=seed,
            target_length=question.target_length,
            prompt_tokens=list(question.prompt_tokens),
            output_tokens=list(completion.tokens),
            segment_lengths=completion.segment_lengths or [len(completion.tokens)],
            completion=self.codec.decode(completion.tokens),
            finish_reason=completion.finish_reason,
            reward=verdict.reward,
            why=verdict.why,
        )


def derive_seed(seed: str, problem_id: str, what: str) -> int:
    """An unsigned 64-bit number; the parts are length-prefixed, so no two questions share one by accident."""
    text = "".join(f"{len(part)}:{part}" for part in (seed, problem_id, what))
    return int.from_bytes(blake3(text.encode()).digest(8), "big")


def category_of(task: Task, key: str = "") -> str:
    keys = (key,) if key else DEFAULT_CATEGORY_KEYS
    named = (str(task.metadata[name]) for name in keys if name in task.metadata)
    return next(named, task.task_type)


def policy_digest(directory: Path) -> str:
    """One name for the weights of a policy's directory: another policy never continues the answers of the first."""
    hasher = blake3()
    places = [directory]
    if is_adapter(directory):
        places.append(resolve_model(base_of(directory)))
    for place in places:
        for file in sorted([*place.glob("*.safetensors"), *place.glob(CONFIG_FILE), *place.glob(ADAPTER_CONFIG_FILE)]):
            hasher.update(file.name.encode() + digest_file(file).encode())
    return hasher.hexdigest()
