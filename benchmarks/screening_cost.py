"""What the check of a proposed batch adds to a training step: the statistic of every group, and the question to the coordinator.

    python benchmarks/screening_cost.py [--model DIR] [--groups 8] [--group-size 8] [--length 40] [--steps 12] [--minibatches 2]

Old log-probabilities are computed anyway and reused, so there is no further forward pass: `extra_forward_passes` counts them. Timed
are, inside real steps of the bundled policy, the sums per group and their reduction; beside them, on logits of the same shape, the
variance of log p, which comes from the same pass over the logits as the entropy; and one request to a coordinator on loopback, with
signature, transaction and ledger entry. `screening_share` is all three ÷ the median step. Steps with and without the check take
turns; `step_ratio` is the ratio of their medians.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.config import TrainingConfig
from shoal.policy import bundled_directory
from shoal.protocol import api
from shoal.training import Group, Sample, Trainer
from shoal.training.model.logprobs import CHUNK_ELEMENTS
from shoal.training.screening import GroupScores

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.swarm import running, small_config  # noqa: E402


class Timed:
    """Adds up the time inside a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments: object, **settings: object) -> object:
        started = time.perf_counter()
        try:
            return self.function(*arguments, **settings)
        finally:
            self.seconds, self.calls = self.seconds + time.perf_counter() - started, self.calls + 1


def make_groups(vocabulary: int, groups: int, size: int, length: int) -> list[Group]:
    draw = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(count)]

    made = []
    for number in range(groups):
        prompt = tokens(24)
        samples = [Sample(prompt, tokens(length), float(place % 2), float(place % 2)) for place in range(size)]
        made.append(Group(f"0/0/{number}", samples))
    return made


def variance_s(tokens: int, vocabulary: int, repeats: int = 5) -> float:
    """The two lines of the chunked head that nothing but the statistic needs, over all tokens of a batch."""
    chunk = max(1, CHUNK_ELEMENTS // vocabulary)
    rows = min(chunk, tokens)
    exp_CV, logits_CV = torch.rand(rows, vocabulary), torch.randn(rows, vocabulary)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        square_C = torch.linalg.vecdot(exp_CV.mul_(logits_CV), logits_CV)
        square_C.clamp_(min=0.0)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * math.ceil(tokens / rows)


def request_s(groups: int, repeats: int = 9) -> float:
    """A screening request of N groups, through client, signature and transaction, without a network."""
    times = []
    with tempfile.TemporaryDirectory() as scratch:
        training: dict[str, object] = {"groups_per_step": 2, "oversampling": 8.0}
        with running(Path(scratch), small_config(run={"steps": 99}, training=training)) as swarm:
            (ann,) = swarm.join("ann")
            swarm.publish(0)
            trainer = swarm.client("trainer")
            for step in range(repeats):
                swarm.produce(ann)
                batch = swarm.batch(step)
                assert batch is not None
                assert batch.state == "proposed"
                values = {group.group_id: 0.1 for group in batch.groups}
                values |= {f"padding/{number}": 0.1 for number in range(groups - len(values))}
                body = api.ScreeningBody(step=step, attempt=0, statistics=values)
                started = time.perf_counter()
                trainer.screen(body)
                times.append(time.perf_counter() - started)
                swarm.publish(step + 1)
    return statistics.median(times)


def train(arguments: argparse.Namespace, scratch: Path) -> dict[str, float]:
    model = Path(arguments.model) if arguments.model else bundled_directory()
    config = TrainingConfig(learning_rate=1e-9, kl_beta=0.0, minibatches=arguments.minibatches, device="cpu")
    trainer = Trainer(config, model, work_dir=scratch, temperature=1.0, seed=1)
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    groups = make_groups(vocabulary, arguments.groups, arguments.group_size, arguments.length)
    counted: list[object] = []
    trainer.policy.register_forward_hook(lambda *_: counted.append(None))
    add, reduce = Timed(GroupScores.add), Timed(GroupScores.statistics)
    times: dict[bool, list[float]] = {True: [], False: []}
    passes: dict[bool, int] = {}
    sums: list[float] = []
    for step in range(2 + 2 * arguments.steps):
        screened = step % 2 == 0
        use(add if screened else None, reduce)
        before, forward = add.seconds + reduce.seconds, len(counted)
        started = time.perf_counter()
        trainer.train_step(groups, (lambda _: None) if screened else None)
        seconds = time.perf_counter() - started
        passes[screened] = len(counted) - forward
        if step >= 2:
            times[screened].append(seconds)
            sums += [add.seconds + reduce.seconds - before] if screened else []
    trainer.close()
    tokens = arguments.groups * arguments.group_size * arguments.length
    return {
        "step_s": statistics.median(times[True]),
        "step_ratio": statistics.median(times[True]) / statistics.median(times[False]),
        "extra_forward_passes": passes[True] - passes[False],
        "sums_s": statistics.median(sums),
        "variance_s": variance_s(tokens, vocabulary),
        "tokens": tokens,
        "vocabulary": vocabulary,
    }


def use(add: Timed | None, reduce: Timed) -> None:
    """Measures the sums of the next step, or leaves them out."""

    def noted(*arguments: object) -> object:
        return add(*arguments) if add is not None else None

    setattr(GroupScores, "add", noted)  # noqa: B010
    setattr(GroupScores, "statistics", lambda *arguments: reduce(*arguments))  # noqa: B010


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--minibatches", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as scratch:
        result = train(arguments, Path(scratch))
    result["request_s"] = request_s(arguments.groups)
    cost = result["sums_s"] + result["variance_s"] + result["request_s"]
    result["screening_share"] = cost / result["step_s"]
    settings = {"groups": arguments.groups, "group_size": arguments.group_size, "length": arguments.length}
    place = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({name: round(value, 6) for name, value in result.items()} | settings | place))


if __name__ == "__main__":
    main()
