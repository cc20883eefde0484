"""Does lag hurt? GRPO on the demo task at asynchrony 0, 1, 2 and 4, at equal trained samples.

    python benchmarks/async_ablation.py [--levels 0 1 2 4] [--seeds 5] [--steps 40] [--groups 16] [--jobs 1]

One process stands for the swarm: step s trains on groups that version s−k (not younger) generated, the worst case inside the
bound. Everything else is the demo's recipe: bundled policy, online filter with its cap, engine, trainer. `final_reward` is the
mean task reward at temperature 1 on held-out problems, averaged over the last three of the evaluations made every 4 steps.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.config import ShoalConfig, TrainingConfig, load_config
from shoal.policy import GenerationRequest, TorchEngine, bundled_directory
from shoal.tasks import Task, TextCodec, length_penalty, load_tasks, score
from shoal.training import Group, Sample, StepReport, Trainer

ROOT = Path(__file__).resolve().parents[1]
EVALUATE_EVERY = 4
LAST_EVALUATIONS = 3
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26}
"""Student's t for a 95 % interval, by number of seeds."""


Question = tuple[Task, int]
"""A task and its target length."""
Answer = tuple[tuple[int, ...], list[int], str]
"""Prompt, output, finish reason."""


class Simulation:
    """A swarm in one process: an engine that may lag behind the trainer."""

    def __init__(self, config: ShoalConfig, training: TrainingConfig, seed: int, scratch: Path) -> None:
        torch.set_num_threads(1)
        self.config, self.training = config, training
        self.tasks = load_tasks(config.tasks)
        self.codec = TextCodec.from_directory(bundled_directory())
        self.engine = TorchEngine(bundled_directory(), eos_token_ids=self.codec.eos_token_ids)
        self.trainer = Trainer(
            training,
            bundled_directory(),
            work_dir=scratch / "trainer",
            temperature=config.rollouts.temperature,
            seed=seed,
            max_new_tokens=config.rollouts.max_new_tokens,
        )
        self._draw = random.Random(f"rollouts/{seed}")
        self._weights = scratch / "weights"
        self.publish()

    def publish(self) -> None:
        """Keep the current weights as the swarm would get them: in bf16, by version."""
        directory = self._weights / str(self.trainer.step)
        directory.mkdir(parents=True)
        tensors = {
            tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(tensor.shape)
            for tensor in self.trainer.wire_tensors()
        }
        save_file(tensors, directory / "model.safetensors")

    def step(self, lag: int) -> StepReport | None:
        """Generate with a version `lag` behind, train, publish; None if no group had a signal."""
        version = max(0, self.trainer.step - lag)
        groups = self.useful_groups(version)
        report = self.trainer.train_step(groups) if groups else None
        self.trainer.step += not groups
        self.publish()
        return report

    def useful_groups(self, version: int) -> list[Group]:
        self.engine.load(self._weights / str(version))
        wanted, cap = self.training.groups_per_step, int(self.training.oversampling * self.training.groups_per_step)
        useful: list[Group] = []
        for start in range(0, cap, wanted):
            made = self.generate(version, min(wanted, cap - start))
            useful += [group for group in made if len({sample.task_reward for sample in group.samples}) > 1]
            if len(useful) >= wanted:
                break
        return useful[:wanted]

    def generate(self, version: int, count: int) -> list[Group]:
        targets = self.config.reward.target_lengths or (0,)
        chosen = [
            (self.tasks.train[self._draw.randrange(len(self.tasks.train))], self._draw.choice(targets))
            for _ in range(count)
        ]
        size = self.config.rollouts.group_size
        completions = self._sample([(task, target) for task, target in chosen for _ in range(size)])
        return [
            Group(
                f"{version}/0/{number}",
                [self._judge(chosen[number], made, version) for made in completions[number * size :][:size]],
            )
            for number in range(count)
        ]

    def heldout_reward(self, count: int) -> float:
        """Mean task reward of the newest version on problems that training never draws."""
        self.engine.load(self._weights / str(self.trainer.step))
        targets = self.config.reward.target_lengths or (0,)
        asked = [(self.tasks.heldout[index], targets[index % len(targets)]) for index in range(count)]
        completions = self._sample(asked)
        judged = [self._judge(question, made, 0) for question, made in zip(asked, completions, strict=True)]
        return statistics.fmean(sample.task_reward for sample in judged)

    def _sample(self, asked: Sequence[Question]) -> list[Answer]:
        tasks, rollouts = self.config.tasks, self.config.rollouts
        prompts = [
            tuple(
                self.codec.prompt_tokens(
                    task, target, system_prompt=tasks.system_prompt, length_instruction=tasks.length_instruction
                )
            )
            for task, target in asked
        ]
        requests = [
            GenerationRequest(prompt, self._draw.getrandbits(64), rollouts.max_new_tokens) for prompt in prompts
        ]
        made = self.engine.generate(requests, temperature=rollouts.temperature)
        return [(prompt, done.tokens, done.finish_reason) for prompt, done in zip(prompts, made, strict=True)]

    def _judge(self, asked: Question, made: Answer, version: int) -> Sample:
        (task, target), (prompt, output, reason) = asked, made
        task_reward = score(task, self.codec.decode(output)).reward
        penalty = length_penalty(target, len(output), self.config.reward.length_alpha)
        return Sample(prompt, output, task_reward - penalty, task_reward, None, version, reason == "length")


@dataclass
class Curve:
    level: int
    seed: int
    heldout: list[tuple[int, float]] = field(default_factory=list)
    trained_samples: int = 0

    @property
    def final_reward(self) -> float:
        return statistics.fmean(value for _, value in self.heldout[-LAST_EVALUATIONS:])


def run(level: int, seed: int, steps: int, groups: int, heldout: int) -> Curve:
    config = load_config(ROOT / "configs" / "demo.toml")
    training = config.training.model_copy(update={"async_level": level, "groups_per_step": groups})
    curve = Curve(level, seed)
    with tempfile.TemporaryDirectory() as scratch:
        simulation = Simulation(config, training, seed, Path(scratch))
        curve.heldout.append((0, simulation.heldout_reward(heldout)))
        for step in range(1, steps + 1):
            report = simulation.step(level)
            curve.trained_samples += report.samples if report else 0
            if step % EVALUATE_EVERY == 0:
                curve.heldout.append((step, simulation.heldout_reward(heldout)))
    return curve


def all_curves(arguments: argparse.Namespace) -> Iterator[Curve]:
    """Seed by seed, level by level, so that an interrupted run still compares like with like."""
    jobs = [(level, seed) for seed in range(arguments.seeds) for level in arguments.levels]
    settings = (arguments.steps, arguments.groups, arguments.heldout)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(run, level, seed, *settings) for level, seed in jobs]:
            curve = future.result()
            print(
                f"async {curve.level}, seed {curve.seed}: held-out {curve.heldout[0][1]:.3f} → {curve.final_reward:.3f}",
                flush=True,
            )
            yield curve


def interval(values: Sequence[float]) -> float:
    """Half width of the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return 0.0
    return float(T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values)))


def plot(curves: Sequence[Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    for level in sorted({curve.level for curve in curves}):
        chosen = [curve for curve in curves if curve.level == level]
        steps = [step for step, _ in chosen[0].heldout]
        rows = [[value for _, value in curve.heldout] for curve in chosen]
        means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        errors = [interval(column) for column in zip(*rows, strict=True)]
        axes.plot(steps, means, label=f"async {level}")
        axes.fill_between(
            steps,
            [mean - error for mean, error in zip(means, errors, strict=True)],
            [mean + error for mean, error in zip(means, errors, strict=True)],
            alpha=0.15,
        )
    axes.set(
        xlabel="training step", ylabel="held-out task reward", title="Demo task, mean and 95 % interval over seeds"
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "async_ablation.png")
    arguments = parser.parse_args()
    started = time.monotonic()
    curves = list(all_curves(arguments))
    finals = {level: [curve.final_reward for curve in curves if curve.level == level] for level in arguments.levels}
    means = {level: statistics.fmean(values) for level, values in finals.items()}
    plot(curves, arguments.plot)
    result = {
        "benchmark": "async_ablation",
        "final_reward": {str(level): round(mean, 4) for level, mean in means.items()},
        "confidence_95": {str(level): round(interval(values), 4) for level, values in finals.items()},
        "delta_2_vs_0": round(means[2] - means[0], 4) if {0, 2} <= set(means) else None,
        "start_reward": round(statistics.fmean(curve.heldout[0][1] for curve in curves), 4),
        "trained_samples": {
            str(level): sorted({curve.trained_samples for curve in curves if curve.level == level})
            for level in arguments.levels
        },
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "groups_per_step": arguments.groups,
        "wall_s": round(time.monotonic() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
