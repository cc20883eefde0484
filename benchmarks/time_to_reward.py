"""Time to a held-out accuracy of 0.85 on the demo's task: the whole swarm with every check on, against TRL's GRPOTrainer.

    python benchmarks/time_to_reward.py [--rounds 5] [--groups 16 32] [--learning-rates 1e-4 3e-4] [--search-runs 2]
        [--async-level 1] [--workers 1] [--minutes 8]

Same policy (the bundled one), tasks, prompts, rewards, group size, trained samples per step, mini-batches, loss (two-sided clip,
no KL), Adam moments and gradient clip; both use all cores. Ours is `shoal up` with the demo's settings and an honest worker:
coordinator, trainer, relays, validator, worker, each its own process. (Two workers would share the same two cores.) TRL
generates with Transformers' `generate`, scores with the same functions, and trains every group, since it has no online filter.

The clock starts when version 0 is published and every worker has asked for work, or TRL's trainer is built: after imports. It stops
when the weights exist whose held-out accuracy (the demo's problems at temperature 1, every EVERY steps) first reaches GOAL.
The time of evaluations does not count on either side: our versions are evaluated after the swarm has ended, TRL's with the clock
stopped. Batch size and learning rate are searched first, --search-runs of each pair and side, each stopped after twice the time of
the best pair so far; the pair with the least mean counts. Rounds of both sides take turns; medians count. Each round has other
samples: ours follow from the secret of a new run, TRL's from the number of the round. `cpu_s` is CPU time while the clock runs, of
all processes; `cpu_by_role` says which part of the swarm used how much of it. Runs are kept in `--pieces`; with `--minutes` the
same command goes on later.
"""

import argparse
import importlib
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config import ShoalConfig, build_config, to_toml
from shoal.host.demo import demo_config
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
GOAL, EVERY, MOST_STEPS = 0.85, 2, 48
DEADLINE_S = 1800.0
SEARCH_SEED = 42
FIRST_LOOK_INTERVAL_S, LOOK_INTERVAL_S = 0.05, 0.5
"""Until the clock starts, which is the time of a look, and afterwards."""
ROLES = ("coordinator", "train", "relay", "validate", "evaluator", "work")
Pair = tuple[int, float]
"""Groups per step, learning rate."""
RunSide = Callable[[str, Pair, float, int], dict[str, Any]]
"""Side, pair, seconds after which it is stopped, number of the run."""


def settings(root: Path, pair: Pair, async_level: int, ports: list[int]) -> ShoalConfig:
    """The demo's, with more steps than are needed: the evaluator measures the last version, which nobody waits for."""
    tree = demo_config(steps=10 * MOST_STEPS, async_level=async_level).model_dump()
    tree["run"] |= {"name": "time-to-reward", "dir": str(root / "run")}
    tree["training"] |= {"groups_per_step": pair[0], "learning_rate": pair[1]}
    tree["evaluation"]["every"] = 10 * MOST_STEPS
    tree["broadcast"]["keep_versions"] = 10 * MOST_STEPS
    tree["coordinator"]["port"], tree["broadcast"]["port"] = ports
    return build_config(tree)


def run_ours(pair: Pair, async_level: int, workers: int, limit_s: float) -> dict[str, Any]:
    broadcast = importlib.import_module("broadcast")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = settings(root, pair, async_level, [broadcast.free_port(), broadcast.free_port()])
        (root / "run.toml").write_text(to_toml(config))
        command = [sys.executable, "-m", "shoal", "up", str(root / "run.toml"), "--workers", str(workers)]
        with (root / "up.log").open("wb") as log:
            swarm = subprocess.Popen(command, stdout=log, stderr=log, cwd=root)
            try:
                seen = _follow(swarm, config, root, limit_s, workers)
                evaluator, kept = _keep_versions(seen, config, root, limit_s)
            finally:
                if swarm.poll() is None:
                    swarm.send_signal(signal.SIGTERM)
                swarm.wait(timeout=120)
        return _evaluate(seen, evaluator, kept)


@dataclass
class Seen:
    """A run by the clock of its coordinator."""

    started_s: float = math.nan
    published_s: dict[int, float] = field(default_factory=dict)
    cpu: dict[int, dict[str, float]] = field(default_factory=dict)
    """CPU time of every role when a version was first seen; -1: when the clock started."""


def _follow(swarm: "subprocess.Popen[bytes]", config: ShoalConfig, root: Path, limit_s: float, workers: int) -> Seen:
    """Until MOST_STEPS versions are published or the limit has passed."""
    seen, before_s, progress = Seen(), 0.0, time.monotonic()
    with CoordinatorClient(config.coordinator.url_here, None, deadline_s=DEADLINE_S) as client:
        while swarm.poll() is None and time.monotonic() < progress + DEADLINE_S:
            status, used = client.status(), cpu_by_role(root)
            versions = {version.version: version.published_s for version in client.history().versions}
            if math.isnan(seen.started_s) and versions and len(status.workers) >= workers:
                seen.started_s, seen.cpu[-1] = max(versions[0], before_s), used
            before_s = status.uptime_s
            if versions.keys() - seen.published_s.keys():
                seen.cpu[max(versions)], progress = used, time.monotonic()
                seen.published_s = versions
            newest = max(versions, default=-1)
            if newest >= MOST_STEPS or versions.get(newest, 0.0) - seen.started_s > limit_s:
                return seen
            time.sleep(FIRST_LOOK_INTERVAL_S if math.isnan(seen.started_s) else LOOK_INTERVAL_S)
    raise RuntimeError(f"the swarm ended or stood still: {(root / 'up.log').read_text()[-1500:]}")


def _keep_versions(seen: Seen, config: ShoalConfig, root: Path, limit_s: float) -> tuple[Any, dict[int, Path]]:
    """Copies of the versions that may reach the goal, so that the swarm can end before they are evaluated."""
    from shoal.evaluation import Evaluator
    from shoal.joined import join_run

    directory = RunDirectory(config.run.dir)
    descriptor, key = directory.descriptor(), directory.existing_key("evaluator")
    client = CoordinatorClient.for_run(descriptor, key, config.coordinator_url, deadline_s=DEADLINE_S)
    run = join_run(descriptor, directory.root / "evaluated", heldout=True, clock=client.server_time)
    digests = {view.version: view.manifest_digest for view in client.history().versions}
    kept: dict[int, Path] = {}
    for version in sorted(seen.published_s):
        if version and version % EVERY == 0 and seen.published_s[version] - seen.started_s <= limit_s:
            fetched = run.weights.fetch_version(version, digests[version])
            kept[version] = Path(shutil.copytree(fetched, root / f"version-{version}"))
    return Evaluator(run, client, run.make_engine(), every=EVERY, samples=1, steps=MOST_STEPS), kept


def _evaluate(seen: Seen, evaluator: Any, kept: dict[int, Path]) -> dict[str, Any]:
    """Evaluates the versions, oldest first, until one reaches the goal."""
    accuracy = 0.0
    for version, directory in kept.items():
        seconds = seen.published_s[version] - seen.started_s
        evaluator.engine.load(directory)
        accuracy = evaluator.measure(version).avg.mean
        print(f"ours, step {version}: accuracy {accuracy:.3f} after {seconds:.1f} s", file=sys.stderr, flush=True)
        if accuracy >= GOAL:
            used = seen.cpu[min(known for known in seen.cpu if known >= version)]
            roles = {role: round(used[role] - seen.cpu[-1].get(role, 0.0), 2) for role in used}
            found = {"seconds": seconds, "steps": version, "accuracy": accuracy}
            return found | {"cpu_s": sum(roles.values()), "cpu_by_role": roles}
    return {"seconds": math.inf, "steps": max(seen.published_s), "accuracy": accuracy, "cpu_s": math.inf}


def cpu_by_role(root: Path) -> dict[str, float]:
    """Seconds of CPU time of the running roles of the run in this directory."""
    used: dict[str, float] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        role = next((word for word in words if word in ROLES), None)
        if role is not None and any(str(root) in word for word in words):
            used[role] = used.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def run_trl(pair: Pair, python: Path, limit_s: float, seed: int) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), __file__, "--trl", json.dumps([*pair, limit_s, seed])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def trl_side(pair: Pair, limit_s: float, seed: int) -> None:
    """In the child, inside TRL's environment."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from shoal.policy import GenerationRequest, TorchEngine, resolve_model
    from shoal.tasks import PromptStyle, TextCodec, load_tasks
    from shoal.tasks.workload import rewards_of

    config = demo_config(steps=MOST_STEPS)
    directory = resolve_model(config.model.path)
    codec, style, tasks = TextCodec.from_directory(directory), PromptStyle.of(config.tasks), load_tasks(config.tasks)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    targets, size = config.reward.target_lengths or (0,), config.rollouts.group_size
    samples = pair[0] * size
    pad = codec.eos_token_ids[0]
    stopped_s = stopped_cpu_s = 0.0

    def question(number: int) -> tuple[Any, int]:
        draw = random.Random(number)
        return tasks.train[draw.randrange(len(tasks.train))], draw.choice(targets)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [codec.prompt_tokens(*question(int(prompt)), style) for prompt in prompts]
        longest = max(map(len, chosen))
        ids = torch.tensor([[pad] * (longest - len(one)) + one for one in chosen])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in chosen])
        with torch.no_grad():
            made = trainer.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=config.rollouts.temperature,
                top_k=0,
                max_new_tokens=config.rollouts.max_new_tokens,
                eos_token_id=list(codec.eos_token_ids),
                pad_token_id=pad,
            )[:, longest:].tolist()
        return {"prompt_ids": chosen, "completion_ids": [_until_end(one) for one in made], "logprobs": None}

    def _until_end(tokens: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(tokens) if token in codec.eos_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        outputs = [(*question(int(prompt)), ids) for prompt, ids in zip(prompts, completion_ids, strict=True)]
        return [one.total for one in rewards_of(outputs, codec, style, config.reward)]

    engine = TorchEngine(directory, eos_token_ids=codec.eos_token_ids)

    def heldout_accuracy(version: int) -> float:
        weights = Path(f"weights-{version}")
        weights.mkdir()
        names = set(dict(model.named_parameters(remove_duplicate=True)))
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name in names}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights / "model.safetensors")
        engine.load(weights)
        asked = [(task, targets[number % len(targets)]) for number, task in enumerate(tasks.heldout)]
        requests = [
            GenerationRequest(tuple(codec.prompt_tokens(*one, style)), number, config.rollouts.max_new_tokens)
            for number, one in enumerate(asked)
        ]
        made = engine.generate(requests, temperature=config.rollouts.temperature)
        outputs = [(*one, done.tokens) for one, done in zip(asked, made, strict=True)]
        return statistics.fmean(one.task_reward for one in rewards_of(outputs, codec, style, config.reward))

    class Stopwatch(TrainerCallback):  # type: ignore[misc]  # the base class is untyped here
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            nonlocal stopped_s, stopped_cpu_s
            version, rest = divmod(state.global_step, config.training.minibatches)
            if rest or version % EVERY:
                return
            begun, begun_cpu_s = time.perf_counter(), time.process_time()
            seconds, cpu_s = begun - started - stopped_s, begun_cpu_s - started_cpu_s - stopped_cpu_s
            accuracy = heldout_accuracy(version)
            stopped_s += time.perf_counter() - begun
            stopped_cpu_s += time.process_time() - begun_cpu_s
            print(f"TRL, step {version}: accuracy {accuracy:.3f} after {seconds:.1f} s", file=sys.stderr, flush=True)
            if accuracy >= GOAL or version >= MOST_STEPS or seconds > limit_s:
                reached = seconds if accuracy >= GOAL else math.inf
                found = {"seconds": reached, "steps": version, "accuracy": accuracy, "cpu_s": cpu_s}
                print("RESULT " + json.dumps(found), flush=True)
                control.should_training_stop = True

    per_update = samples // config.training.minibatches
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir="trl",
            seed=seed,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=per_update,
            steps_per_generation=config.training.minibatches,
            gradient_checkpointing=False,
            num_generations=size,
            max_completion_length=config.rollouts.max_new_tokens,
            loss_type="dapo",
            epsilon=0.2,
            delta=4.0,
            beta=0.0,
            temperature=config.rollouts.temperature,
            learning_rate=pair[1],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=config.training.warmup_steps,
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=config.training.max_grad_norm,
            max_steps=config.training.minibatches * MOST_STEPS,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=AutoTokenizer.from_pretrained(directory),
        train_dataset=importlib.import_module("datasets").Dataset.from_dict(
            {"prompt": [str(number) for number in range(20_000)]}
        ),
        reward_funcs=reward,
        rollout_func=rollout,
        callbacks=[Stopwatch()],
    )
    started, started_cpu_s = time.perf_counter(), time.process_time()
    trainer.train()


def search(side: str, pairs: list[Pair], runs: int, run_side: RunSide, pieces: Any) -> Pair:
    """The pair that is fastest to the goal."""
    if len(pairs) == 1:
        return pairs[0]
    seconds: dict[Pair, float] = {}
    for pair in pairs:
        limit_s = 2 * min(seconds.values(), default=math.inf)
        found = []
        for number in range(SEARCH_SEED, SEARCH_SEED + runs):
            name = f"search {side} {pair[0]} {pair[1]:g} {number}"
            run = pieces.get(name, lambda pair=pair, limit_s=limit_s, seed=number: run_side(side, pair, limit_s, seed))
            found.append(min(run["seconds"], limit_s))
        seconds[pair] = statistics.fmean(found)
    return min(pairs, key=lambda pair: seconds[pair])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--search-runs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="Of ours.")
    parser.add_argument("--async-level", type=int, default=1, help="Of ours: how many versions old a group may be.")
    parser.add_argument("--search-only", action="store_true")
    pieces_module = importlib.import_module("pieces")
    pieces_module.add_flags(parser, ROOT / "build" / "time_to_reward.json")
    parser.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl:
        groups, rate, limit_s, seed = arguments.trl
        trl_side((groups, rate), limit_s, seed)
        return
    python = importlib.import_module("trainer_vs_trl").trl_python()
    pairs = [(groups, rate) for groups in arguments.groups for rate in arguments.learning_rates]
    pieces = pieces_module.of(arguments, (GOAL, f"lag{arguments.async_level}", f"workers{arguments.workers}"))

    def run_side(side: str, pair: Pair, limit_s: float, seed: int) -> dict[str, Any]:
        if side == "trl":
            return run_trl(pair, python, limit_s, seed)
        return run_ours(pair, arguments.async_level, arguments.workers, limit_s)

    best = {side: search(side, pairs, arguments.search_runs, run_side, pieces) for side in ("ours", "trl")}
    if arguments.search_only:
        print(json.dumps({"benchmark": "time_to_reward", "chosen": best}))
        return
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for number in range(arguments.rounds):
        for side in ("ours", "trl") if number % 2 == 0 else ("trl", "ours"):
            pair = best[side]
            name = f"round {number} {side} {pair[0]} {pair[1]:g}"
            runs[side].append(
                pieces.get(name, lambda side=side, pair=pair, number=number: run_side(side, pair, math.inf, number))
            )
    searched = {
        name.removeprefix("search "): round(found["seconds"], 1) if math.isfinite(found["seconds"]) else None
        for name, found in pieces.known.items()
        if name.startswith("search ")
    }
    print(json.dumps(summary(runs, best, searched)))


def summary(
    runs: dict[str, list[dict[str, Any]]], best: dict[str, Pair], searched: dict[str, float | None]
) -> dict[str, Any]:
    seconds = {side: statistics.median(one["seconds"] for one in rows) for side, rows in runs.items()}
    cpu_s = {side: statistics.median(one["cpu_s"] for one in rows) for side, rows in runs.items()}
    by_role = runs["ours"][-1]["cpu_by_role"]
    every = {side: [round(one["seconds"], 1) for one in rows] for side, rows in runs.items()}
    return {
        "benchmark": "time_to_reward",
        "speedup_vs_trl": round(seconds["trl"] / seconds["ours"], 3),
        "speedup_cpu_time": round(cpu_s["trl"] / cpu_s["ours"], 3),
        "seconds": {side: round(value, 1) for side, value in seconds.items()},
        "cpu_s": {side: round(value, 1) for side, value in cpu_s.items()},
        "seconds_by_round": every,
        "steps": {side: [one["steps"] for one in rows] for side, rows in runs.items()},
        "cpu_by_role": by_role,
        "cpu_share": {role: round(used / sum(by_role.values()), 3) for role, used in by_role.items()},
        "chosen": {side: {"groups_per_step": pair[0], "learning_rate": pair[1]} for side, pair in best.items()},
        "searched": searched,
        "goal": GOAL,
        "rounds": len(runs["ours"]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


if __name__ == "__main__":
    main()
