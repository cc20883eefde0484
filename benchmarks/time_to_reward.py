"""Time to a held-out accuracy of 0.85 on the demo's task: the whole swarm with every check on, against TRL's GRPOTrainer.

    python benchmarks/time_to_reward.py [--rounds 3] [--groups 16 32] [--learning-rates 1e-4 3e-4] [--search-only] [--minutes 8]

Same policy (the bundled one), tasks, prompts, rewards, group size, trained samples per step, mini-batches, loss (two-sided clip,
no KL), Adam moments and gradient clip; both use all cores. Ours is `shoal up` with the demo's settings and honest workers:
coordinator, trainer, relays, validator, evaluator, workers, each its own process. TRL generates with Transformers' `generate`,
scores with the same functions, and trains every group, since it has no online filter.

The clock starts when version 0 is published, or TRL's trainer is built: after imports. It stops when the weights exist whose
held-out accuracy (the demo's problems, sampled at temperature 1, every EVERY steps) first reaches GOAL. Our evaluator runs beside
the training and costs its share; TRL's evaluation is taken out of its time. Batch size and learning rate are searched first, one
run for each pair and side, stopped when it is slower than the fastest before it; the fastest pair of each side counts. Rounds of
both sides take turns; medians count. CPU time is that of all processes, imports included. `cpu_share` says which role used how much
of ours. Runs are kept in `--pieces`; with `--minutes` the same command goes on later.
"""

import argparse
import importlib
import json
import math
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal.config import ShoalConfig, build_config, to_toml
from shoal.host.demo import demo_config
from shoal.protocol.client import CoordinatorClient

ROOT = Path(__file__).resolve().parents[1]
GOAL, EVERY, MOST_STEPS = 0.85, 2, 80
DEADLINE_S = 1800.0
LOOK_INTERVAL_S = 0.5
HONEST_WORKERS = 2
ROLES = ("coordinator", "train", "relay", "validate", "evaluator", "work")
Pair = tuple[int, float]
"""Groups per step, learning rate."""


def settings(root: Path, pair: Pair, ports: list[int]) -> ShoalConfig:
    tree = demo_config(steps=MOST_STEPS).model_dump()
    tree["run"] |= {"name": "time-to-reward", "dir": str(root / "run")}
    tree["training"] |= {"groups_per_step": pair[0], "learning_rate": pair[1]}
    tree["evaluation"]["every"] = EVERY
    tree["coordinator"]["port"], tree["broadcast"]["port"] = ports
    return build_config(tree)


def run_ours(pair: Pair, limit_s: float) -> dict[str, Any]:
    broadcast = importlib.import_module("broadcast")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = settings(root, pair, [broadcast.free_port(), broadcast.free_port()])
        (root / "run.toml").write_text(to_toml(config))
        command = [sys.executable, "-m", "shoal", "up", str(root / "run.toml"), "--workers", str(HONEST_WORKERS)]
        before = _children_cpu_s()
        with (root / "up.log").open("wb") as log:
            swarm = subprocess.Popen(command, stdout=log, stderr=log, cwd=root)
            try:
                result = _follow(swarm, config, root, limit_s)
            finally:
                if swarm.poll() is None:
                    swarm.send_signal(signal.SIGTERM)
                swarm.wait(timeout=120)
        return result | {"cpu_s": _children_cpu_s() - before}


def _follow(swarm: "subprocess.Popen[bytes]", config: ShoalConfig, root: Path, limit_s: float) -> dict[str, Any]:
    """Until an evaluation reaches the goal, or a version after the limit does not; the run is over, or stands still."""
    seen, deadline = -1, time.monotonic() + DEADLINE_S
    cpu: dict[str, float] = {}
    with CoordinatorClient(config.coordinator_url, None, deadline_s=DEADLINE_S) as client:
        while True:
            history = client.history()
            published = {version.version: version.published_s for version in history.versions}
            cpu = cpu_by_role(root) or cpu
            best = {one.version: one.accuracy for one in history.evaluations}
            reached = [version for version, accuracy in sorted(best.items()) if accuracy >= GOAL]
            if reached:
                seconds = published[reached[0]] - published[0]
                return {"seconds": seconds, "steps": reached[0], "accuracy": best[reached[0]], "cpu_by_role": cpu}
            if max(published, default=-1) > seen:
                seen, deadline = max(published), time.monotonic() + DEADLINE_S
            is_late = any(published[version] - published[0] > limit_s for version in best)
            if is_late or MOST_STEPS in best or swarm.poll() is not None or time.monotonic() > deadline:
                print((root / "up.log").read_text()[-1500:], file=sys.stderr)
                accuracy = max(best.values(), default=0.0)
                return {"seconds": float("inf"), "steps": seen, "accuracy": accuracy, "cpu_by_role": cpu}
            time.sleep(LOOK_INTERVAL_S)


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


def run_trl(pair: Pair, python: Path, limit_s: float) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    before = _children_cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), __file__, "--trl", json.dumps([*pair, limit_s])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result | {"cpu_s": _children_cpu_s() - before}


def trl_side(pair: Pair, limit_s: float) -> None:
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
    stopped_s = 0.0

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
            nonlocal stopped_s
            version, rest = divmod(state.global_step, config.training.minibatches)
            if rest or version % EVERY:
                return
            begun = time.perf_counter()
            seconds = begun - started - stopped_s
            accuracy = heldout_accuracy(version)
            stopped_s += time.perf_counter() - begun
            print(f"TRL, step {version}: accuracy {accuracy:.3f} after {seconds:.1f} s", file=sys.stderr, flush=True)
            if accuracy >= GOAL or version >= MOST_STEPS or seconds > limit_s:
                reached = seconds if accuracy >= GOAL else float("inf")
                print("RESULT " + json.dumps({"seconds": reached, "steps": version, "accuracy": accuracy}), flush=True)
                control.should_training_stop = True

    per_update = samples // config.training.minibatches
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir="trl",
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
    started = time.perf_counter()
    trainer.train()


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def search(side: str, pairs: list[Pair], python: Path, pieces: Any) -> Pair:
    """The pair that is fastest to the goal."""
    if len(pairs) == 1:
        return pairs[0]
    seconds: dict[Pair, float] = {}
    for pair in pairs:
        limit_s = min(seconds.values(), default=math.inf)
        name = f"search {side} {pair[0]} {pair[1]:g}"
        found = pieces.get(name, lambda pair=pair, limit_s=limit_s: run_side(side, pair, python, limit_s))
        seconds[pair] = found["seconds"]
    return min(pairs, key=lambda pair: seconds[pair])


def run_side(side: str, pair: Pair, python: Path, limit_s: float = math.inf) -> dict[str, Any]:
    return run_ours(pair, limit_s) if side == "ours" else run_trl(pair, python, limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--search-only", action="store_true")
    pieces_module = importlib.import_module("pieces")
    pieces_module.add_flags(parser, ROOT / "build" / "time_to_reward.json")
    parser.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl:
        groups, rate, limit_s = arguments.trl
        trl_side((groups, rate), limit_s)
        return
    python = importlib.import_module("trainer_vs_trl").trl_python()
    pairs = [(groups, rate) for groups in arguments.groups for rate in arguments.learning_rates]
    pieces = pieces_module.of(arguments, (GOAL,))
    best = {side: search(side, pairs, python, pieces) for side in ("ours", "trl")}
    if arguments.search_only:
        print(json.dumps({"benchmark": "time_to_reward", "chosen": best}))
        return
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for number in range(arguments.rounds):
        for side in ("ours", "trl") if number % 2 == 0 else ("trl", "ours"):
            pair = best[side]
            name = f"round {number} {side} {pair[0]} {pair[1]:g}"
            runs[side].append(pieces.get(name, lambda side=side, pair=pair: run_side(side, pair, python)))
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
    return {
        "benchmark": "time_to_reward",
        "speedup_vs_trl": round(seconds["trl"] / seconds["ours"], 3),
        "speedup_cpu_time": round(cpu_s["trl"] / cpu_s["ours"], 3),
        "seconds": {side: round(value, 1) for side, value in seconds.items()},
        "cpu_s": {side: round(value, 1) for side, value in cpu_s.items()},
        "steps": {side: [one["steps"] for one in rows] for side, rows in runs.items()},
        "cpu_share": {role: round(used / sum(by_role.values()), 3) for role, used in by_role.items()},
        "chosen": {side: {"groups_per_step": pair[0], "learning_rate": pair[1]} for side, pair in best.items()},
        "searched": searched,
        "goal": GOAL,
        "rounds": len(runs["ours"]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


if __name__ == "__main__":
    main()
