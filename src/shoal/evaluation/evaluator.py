"""The evaluator role: measures the published policy versions on held-out tasks, which training never uses.

Every N-th version and the last one are sampled at the run's temperature. Seeds depend on version and task alone, so an
evaluation can be repeated. Versions that were superseded while an evaluation ran are skipped, not queued; version 0, with which
all others are compared, is measured first unless it cannot be fetched.
"""

import threading
import time

from shoal.broadcast import VersionEntry
from shoal.broadcast.download import ProgressLine
from shoal.errors import RefusedError, ShoalError
from shoal.evaluation.generator import AnswerGenerator, Question, SamplingSettings, derive_seed
from shoal.evaluation.metrics import AnswerMetrics, answer_metrics
from shoal.joined import JoinedRun
from shoal.metrics import Report, silent
from shoal.policy.engine import Engine
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.tasks import is_learned

LONG_POLL_S = 5.0
RETRY_S = 1.0


class Evaluator:
    def __init__(
        self,
        run: JoinedRun,
        client: CoordinatorClient,
        engine: Engine,
        *,
        every: int,
        samples: int,
        steps: int,
        report: Report = silent,
    ) -> None:
        self.joined, self.client, self.engine = run, client, engine
        self.every, self.samples, self.steps, self.report = every, samples, steps, report
        self.tasks = [task for task in run.workload.tasks.heldout if not is_learned(task.task_type)]
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Evaluates until the final version has been measured."""
        if not self.tasks:
            self.report("nothing to measure: only reward models could score the held-out tasks")
            return
        done = self._measured()
        counter: int | None = None
        baseline_failed = False
        while not self._stopping.is_set() and self.steps not in {version for version, _ in done}:
            chosen = None
            try:
                head = self.joined.weights.head(newer_than=counter, wait_s=LONG_POLL_S if counter else 0.0)
                due = [entry for entry in head.versions if self._is_due(entry.version) and _identity(entry) not in done]
                if due:
                    chosen = due[0] if due[0].version == 0 and not baseline_failed else due[-1]
                if chosen is not None:
                    self._evaluate(chosen.version, chosen.manifest_digest)
            except RefusedError:
                raise
            except (ShoalError, OSError) as error:  # OSError: a full disk, which the owner can cure
                self.report(str(error))
                baseline_failed |= chosen is not None and chosen.version == 0
                self._stopping.wait(RETRY_S)
                continue
            if chosen is not None:
                done |= {_identity(entry) for entry in due if entry.version <= chosen.version}
            # After an evaluation look again at once: the next version may have come meanwhile.
            counter = None if due else head.counter

    def _measured(self) -> set[tuple[int, str]]:
        """Versions that were measured; after a rewind the same number is another version."""
        history = self.client.history()
        digests = {view.version: view.manifest_digest for view in history.versions}
        return {(view.version, digests.get(view.version, "")) for view in history.evaluations}

    def _is_due(self, version: int) -> bool:
        return version % self.every == 0 or version == self.steps

    def _evaluate(self, version: int, manifest_digest: str) -> None:
        started = time.monotonic()
        line = ProgressLine(self.report)
        self.engine.load(self.joined.weights.fetch_version(version, manifest_digest, deadline_s=600, on_progress=line))
        metrics = self.measure(version)
        body = api.EvaluationBody(
            version=version,
            accuracy=metrics.avg.mean,
            problems=metrics.problems,
            samples=self.samples,
            mean_tokens=metrics.mean_tokens,
            seconds=time.monotonic() - started,
            manifest_digest=manifest_digest,
        )
        self.client.report_evaluation(body)
        self.report(f"version {version}: held-out accuracy {metrics.avg} on {body.problems} problems")

    def measure(self, version: int) -> AnswerMetrics:
        """The metrics of the loaded policy on the held-out tasks; thinking budgets are taken in turn."""
        workload, rollouts = self.joined.workload, self.joined.descriptor.rollouts
        targets = self.joined.descriptor.reward.target_lengths or (0,)
        settings = SamplingSettings(
            samples=self.samples,
            temperature=rollouts.temperature,
            max_new_tokens=rollouts.max_new_tokens,
            style=workload.style,
            environment=self.joined.descriptor.tasks.environment,
            seed=f"evaluation {version}",
        )
        questions = []
        for index, task in enumerate(self.tasks):
            target = targets[index % len(targets)]
            world = derive_seed("evaluation", task.problem_id, "environment") >> 32
            questions.append(Question(task, target, workload.prompt_tokens(task, target, world), world))
        return answer_metrics(AnswerGenerator(self.engine, workload.codec, settings).answer_questions(questions))


def _identity(entry: VersionEntry) -> tuple[int, str]:
    return entry.version, entry.manifest_digest
