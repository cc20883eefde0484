"""What interleaving episodes gains, and what their audit costs.

    python benchmarks/episodes.py [--repeats 3]

16 episodes of five turns; an environment takes a time drawn with mean 50 ms and a tail up to 1 s, the same for every way to play.
`interleave_over_lockstep`: tokens per second with interleaved turns ÷ with turns in lock step; `interleave_speedup`: ÷ with one
episode at a time. `audit_over_single_turn`: processor seconds of the audit's prefill per sampled token ÷ those of plain completions
of the same length. `replay_s_per_submission`: seconds by the clock that replaying a submission of eight episodes of three turns
takes, processes included. Medians of the repeats.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from adversaries.episodes import make_episode_arena  # noqa: E402
from shoal.config import RolloutConfig, TasksConfig  # noqa: E402
from shoal.policy import TorchEngine, bundled_directory  # noqa: E402
from shoal.policy.engine import GenerationRequest, ScoreRequest  # noqa: E402
from shoal.policy.episodes import EpisodeStream, play_all  # noqa: E402
from shoal.tasks import CODEC_FILES, TextCodec, load_tasks  # noqa: E402
from shoal.tasks.environments.episodes import Episode  # noqa: E402
from shoal.tasks.environments.host import Called  # noqa: E402
from shoal.tasks.environments.registry import refer  # noqa: E402
from shoal.tasks.workload import WorkItem, Workload  # noqa: E402
from shoal.validation.replays import replay_rows  # noqa: E402
from support.samples import descriptor  # noqa: E402

EPISODES, TURNS = 16, 5
ENDS = (1, *range(40, 52))
"""One of 25 tokens of a policy that draws nearly evenly: turns of about 25 tokens."""
MEAN_S, TAIL_S, TAIL_SHARE = 0.05, 1.0, 0.01


class Slow:
    """An environment that takes its time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def reset(self, seed: int, task: Any) -> Called:
        return Called()

    def step(self, action: str) -> Called:
        tail = self._rng.random() < TAIL_SHARE
        time.sleep(TAIL_S if tail else self._rng.expovariate(1 / (MEAN_S - TAIL_SHARE * TAIL_S)))
        return Called("warmer")

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        workload = make_workload(make_policy(Path(root) / "model"))
        engine = TorchEngine(Path(root) / "model", eos_token_ids=ENDS)
        found = [measure(engine, workload, seed) for seed in range(options.repeats)]
        replay_s = [measure_replay(Path(root) / f"arena{number}", number) for number in range(options.repeats)]
    medians = {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
    print(
        json.dumps(
            {
                "benchmark": "episodes",
                "episodes": EPISODES,
                "turns": TURNS,
                "repeats": options.repeats,
                **medians,
                "replay_s_per_submission": round(statistics.median(replay_s), 3),
            }
        )
    )


def make_policy(directory: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(bundled_directory())
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in CODEC_FILES:
        if (bundled_directory() / name).is_file():
            shutil.copy(bundled_directory() / name, directory / name)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS)}))
    return directory


def make_workload(policy: Path) -> Workload:
    tasks = TasksConfig(count=64, heldout=8, environment="guess-number")
    sets, found = load_tasks(tasks), refer("guess-number")
    limits = found.limits.model_copy(update={"max_turns": TURNS, "turn_tokens": 200})
    run = descriptor(
        tasks=tasks,
        task_set_digest=sets.train.digest,
        task_count=len(sets.train),
        environments=(found.model_copy(update={"limits": limits, "opens": False}),),
        rollouts=RolloutConfig(group_size=4, tasks_per_slot=4, max_prompt_tokens=64, max_new_tokens=440),
    )
    return Workload(run, TextCodec.from_directory(policy), sets)


def begun(workload: Workload, seed: int) -> tuple[list[WorkItem], list[GenerationRequest], list[Episode]]:
    items = workload.items(seed.to_bytes(32, "big"))[:EPISODES]
    episodes = [workload.episode(item) for item in items]
    for number, episode in enumerate(episodes):
        episode.open_session = partial(Slow, 100 * seed + number)  # type: ignore[assignment]
    return items, [GenerationRequest(item.prompt_tokens, item.seed, 440) for item in items], episodes


def measure(engine: TorchEngine, workload: Workload, seed: int) -> dict[str, float]:
    rates = {way.__name__: way(engine, workload, seed) for way in (interleaved, in_lock_step, one_at_a_time)}
    return {
        "tokens_per_s_interleaved": rates["interleaved"],
        "interleave_over_lockstep": rates["interleaved"] / rates["in_lock_step"],
        "interleave_speedup": rates["interleaved"] / rates["one_at_a_time"],
        "audit_over_single_turn": audit_ratio(engine, workload, seed),
    }


def sampled(episodes: Sequence[Episode]) -> int:
    return sum(sum(episode.lengths[::2]) for episode in episodes)


def interleaved(engine: TorchEngine, workload: Workload, seed: int) -> float:
    _, requests, episodes = begun(workload, seed)
    started = time.perf_counter()
    play_all(engine, requests, episodes, temperature=1.0)
    return sampled(episodes) / (time.perf_counter() - started)


def one_at_a_time(engine: TorchEngine, workload: Workload, seed: int) -> float:
    _, requests, episodes = begun(workload, seed)
    started = time.perf_counter()
    for request, episode in zip(requests, episodes, strict=True):
        play_all(engine, [request], [episode], temperature=1.0)
    return sampled(episodes) / (time.perf_counter() - started)


def in_lock_step(engine: TorchEngine, workload: Workload, seed: int) -> float:
    """All rows end their turn, then all environments are asked, then all go on; with the same cache between turns."""
    _, requests, episodes = begun(workload, seed)
    started = time.perf_counter()
    with LockStep(engine.open(temperature=1.0, max_tokens=512, rows=EPISODES)) as stream:
        stream.submit(requests, episodes)
        while stream.unfinished:
            stream.step()
    return sampled(episodes) / (time.perf_counter() - started)


class LockStep(EpisodeStream):
    def _answered(self) -> list[Any]:
        """Nobody goes on before everybody's environment has answered."""
        if self._stream.unfinished or not self._asked:
            return []
        found: list[Any] = []
        while self._asked:
            found += super()._answered()
        return found


def audit_ratio(engine: TorchEngine, workload: Workload, seed: int) -> float:
    items, requests, episodes = begun(workload, seed)
    play_all(engine, requests, episodes, temperature=1.0)
    rows = [
        ScoreRequest(item.prompt_tokens, tuple(episode.tokens), item.seed, tuple(episode.lengths))
        for item, episode in zip(items, episodes, strict=True)
    ]
    plain = [ScoreRequest(row.prompt_tokens, row.output_tokens, row.seed) for row in rows]
    return score_s(engine, rows) / score_s(engine, plain)


def score_s(engine: TorchEngine, rows: Sequence[ScoreRequest]) -> float:
    """Processor seconds per sampled token, the least of five."""
    spent = []
    for _ in range(5):
        started = time.process_time()
        engine.score(rows, temperature=1.0)
        spent.append(time.process_time() - started)
    return min(spent) / sum(row.sampled_count for row in rows)


def measure_replay(root: Path, slot: int) -> float:
    arena = make_episode_arena(root)
    sent, items = arena.honest(slot), arena.items(slot)
    started = time.perf_counter()
    replay_rows(sent.rollouts, items, arena.run.workload, 0.1)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
