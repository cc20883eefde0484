"""The same GRPO update by Shoal's trainer and by TRL's GRPOTrainer: trained tokens per second, SmolLM2-135M, fp32, CPU.

    python benchmarks/trainer_vs_trl.py [--rounds 3] [--threads 2] [--trl-batches 2 4 8 16] [--choose-only]

Both get the same 2 prompts with 8 completions each as token ids, with fixed rewards, and do one optimiser step: group advantages,
two-sided clip, token-level loss, no KL, AdamW, gradient clip. LENGTHS is the committed set of completion lengths: log-normal,
cut at 256, mean 86. Timed is everything from tokens and rewards in hand to updated weights; generation, scoring, loading, saving
and the first update of each process are not. `update_cosine` compares the first updates of all weights: 1 means the same update.

Ours packs into bins of `--micro-batch-tokens`; TRL gets the fastest of the given micro-batch sizes, which are measured first and
kept in `--candidates` (`--choose-only` stops there). Activation checkpointing is on for both (TRL's default),
`--no-checkpointing` turns it off for both. Sides live in processes of their own and take turns; medians count. Memory is the
peak resident size during timed steps minus the size after imports. TRL is installed once into a venv in the cache directory
that sees this environment's torch; the model is converted from a published wheel once (see generation.py).
"""

import argparse
import importlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl==1.16.0"
PROMPT_LENGTHS = (44, 61)
LENGTHS = (31, 74, 118, 22, 256, 63, 47, 95, 150, 38, 85, 29, 66, 201, 54, 41)
GROUP_SIZE = len(LENGTHS) // len(PROMPT_LENGTHS)
LEARNING_RATE, BETAS, MAX_GRAD_NORM, EPSILON, DELTA = 1e-6, (0.9, 0.99), 0.1, 0.2, 4.0


def make_batch(model: Path) -> list[tuple[list[int], list[int], float]]:
    """Prompt, completion and reward of every sample, group by group; tokens are random, speed does not depend on them."""
    draw = random.Random(0)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def tokens(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    prompts = [tokens(length) for length in PROMPT_LENGTHS]
    return [
        (prompts[place // GROUP_SIZE], tokens(length), float(place % 3 == 0)) for place, length in enumerate(LENGTHS)
    ]


class Side:
    """A child process that does one update on each command."""

    def __init__(self, python: Path, name: str, arguments: argparse.Namespace, scratch: Path, micro_batch: int) -> None:
        self.name, self.dump = name, scratch / f"{name}-{micro_batch}.pt"
        settings = {
            "micro_batch": micro_batch,
            "threads": arguments.threads,
            "model": str(arguments.model.resolve()),
            "checkpointing": not arguments.no_checkpointing,
            "dump": str(self.dump),
        }
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(arguments.threads),
        }
        self._process = subprocess.Popen(
            [str(python), __file__, "--side", name, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=scratch,
        )

    def update(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
                return result
        raise SystemExit(f"The {self.name} side ended with exit code {self._process.wait()}.")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


class Reporter:
    """In the child: waits for the word, measures, answers; the first update is a warm-up whose weights are kept."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._updates = 0
        self._base_bytes = 0
        self._started = (0.0, 0.0)

    def after_imports(self) -> None:
        self._base_bytes = _status("VmRSS")

    def wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._started = (time.perf_counter(), time.process_time())

    def stop(self, weights: Callable[[], dict[str, Any]]) -> None:
        import torch

        wall_s, cpu_s = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        result = {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": _status("VmHWM") - self._base_bytes}
        if self._updates == 0:
            torch.save(weights(), self.settings["dump"])
        self._updates += 1
        print("RESULT " + json.dumps(result), flush=True)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def run_ours(settings: dict[str, Any]) -> None:
    import torch

    from shoal.config import TrainingConfig
    from shoal.training import Group, Sample, Trainer

    reporter = Reporter(settings)
    reporter.after_imports()
    torch.set_num_threads(settings["threads"])
    config = TrainingConfig(
        learning_rate=LEARNING_RATE,
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        clip_epsilon=EPSILON,
        clip_delta=DELTA,
        kl_beta=0.0,
        entropy_eta=0.0,
        minibatches=1,
        micro_batch_tokens=settings["micro_batch"],
        activation_checkpointing=settings["checkpointing"],
        device="cpu",
    )
    trainer = Trainer(config, Path(settings["model"]), work_dir=Path("ours"), temperature=1.0, seed=0)
    batch = make_batch(Path(settings["model"]))
    samples = [Sample(prompt, output, reward, reward) for prompt, output, reward in batch]
    starts = range(0, len(samples), GROUP_SIZE)
    groups = [Group(str(start), samples[start : start + GROUP_SIZE]) for start in starts]
    while True:
        reporter.wait()
        reporter.start()
        trainer.train_step(groups)
        reporter.stop(lambda: {name: tensor.detach() for name, tensor in trainer.policy.model.named_parameters()})


def run_trl(settings: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    reporter = Reporter(settings)
    reporter.after_imports()
    torch.set_num_threads(settings["threads"])
    batch = make_batch(Path(settings["model"]))
    reward_of = {tuple(output): reward for _, output, reward in batch}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        reporter.wait()
        chosen = [batch[int(prompt) * GROUP_SIZE + place % GROUP_SIZE] for place, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [prompt for prompt, _, _ in chosen],
            "completion_ids": [output for _, output, _ in chosen],
            "logprobs": None,
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [reward_of[tuple(ids)] for ids in completion_ids]
        reporter.start()
        return rewards

    class Stopwatch(TrainerCallback):  # type: ignore[misc]  # the base class is untyped here
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            model = parts["model"]
            reporter.stop(lambda: {name: tensor.detach() for name, tensor in model.named_parameters()})

    config = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=len(batch) // settings["micro_batch"],
        gradient_checkpointing=settings["checkpointing"],
        num_generations=GROUP_SIZE,
        max_completion_length=max(LENGTHS),
        loss_type="dapo",
        epsilon=EPSILON,
        delta=DELTA,
        beta=0.0,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        max_steps=10_000,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        train_dataset=importlib.import_module("datasets").Dataset.from_dict(
            {"prompt": [str(number) for number in range(len(PROMPT_LENGTHS))]}
        ),
        reward_funcs=reward,
        rollout_func=rollout,
        callbacks=[Stopwatch()],
    )
    trainer.train()


def trl_python() -> Path:
    """Python of a venv with TRL that shares this environment's torch and transformers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shoal" / "bench" / "trl"
    python = cache / "bin" / "python"
    if not (cache / "ready").is_file():
        venv.create(cache, with_pip=True)
        (next(cache.glob("lib/python*/site-packages")) / "base.pth").write_text(
            f"{Path(json.__file__).parents[1]}\n{site()}\n"
        )
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", TRL, "accelerate", "datasets", "gguf"],
            check=True,
            stdout=sys.stderr,
        )
        (cache / "ready").touch()
    return python


def site() -> str:
    import torch

    return str(Path(torch.__file__).parents[1])


def smollm2(python: Path) -> Path:
    """SmolLM2-135M as a plain directory, made the first time."""
    fetch = ROOT / "examples" / "smollm2" / "fetch.py"
    done = subprocess.run([str(python), str(fetch)], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


def update_cosine(ours: Path, theirs: Path, base: Path) -> float:
    """Cosine between the two first updates of all weights: 1 if they are the same update."""
    import torch

    from shoal.policy import build_model

    start = dict(build_model(base).named_parameters())
    left, right = torch.load(ours), torch.load(theirs)
    dot = 0.0
    squares = [0.0, 0.0]
    for name, tensor in start.items():
        one, two = (left[name] - tensor.detach()).flatten(), (right[name] - tensor.detach()).flatten()
        dot += float(one @ two)
        squares = [squares[0] + float(one @ one), squares[1] + float(two @ two)]
    return dot / math.sqrt(squares[0] * squares[1])


def choose_micro_batch(python: Path, arguments: argparse.Namespace, scratch: Path) -> dict[int, float]:
    """Seconds of TRL's second update by micro-batch size; what was measured before is not measured again."""
    file: Path = arguments.candidates
    key = f"threads {arguments.threads}, checkpointing {not arguments.no_checkpointing}"
    known: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    seconds = known.setdefault(key, {})
    for size in arguments.trl_batches:
        if str(size) not in seconds:
            side = Side(python, "trl", arguments, scratch, size)
            side.update()
            seconds[str(size)] = side.update()["wall_s"]
            side.close()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(known))
        print(f"TRL, micro-batch {size}: {seconds[str(size)]:.1f} s", flush=True)
    return {size: seconds[str(size)] for size in arguments.trl_batches}


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    python = trl_python()
    arguments.model = arguments.model or smollm2(python)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        candidates = choose_micro_batch(python, arguments, scratch)
        if arguments.choose_only:
            return {"benchmark": "trainer_vs_trl", "trl_seconds_by_micro_batch": candidates}
        best = min(candidates, key=lambda size: candidates[size])
        ours = Side(Path(sys.executable), "ours", arguments, scratch, arguments.micro_batch_tokens)
        theirs = Side(python, "trl", arguments, scratch, best)
        for side in (ours, theirs):
            side.update()
        results: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
        for number in range(arguments.rounds):
            for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
                results[side.name].append(side.update())
                print(f"round {number}, {side.name}: {results[side.name][-1]}", flush=True)
        cosine = update_cosine(ours.dump, theirs.dump, arguments.model)
        ours.close()
        theirs.close()
    tokens = sum(len(output) for _, output, _ in make_batch(arguments.model))
    median = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in results.items()
    }
    return {
        "benchmark": "trainer_vs_trl",
        "speedup": round(median["trl"]["wall_s"] / median["ours"]["wall_s"], 3),
        "speedup_cpu_time": round(median["trl"]["cpu_s"] / median["ours"]["cpu_s"], 3),
        "memory_ratio": round(median["ours"]["peak_bytes"] / median["trl"]["peak_bytes"], 3),
        "trained_tokens_per_s": {name: round(tokens / values["wall_s"], 1) for name, values in median.items()},
        "peak_gb": {name: round(values["peak_bytes"] / 1e9, 3) for name, values in median.items()},
        "update_cosine": round(cosine, 5),
        "trained_tokens": tokens,
        "completions": len(LENGTHS),
        "trl_micro_batch": best,
        "trl_seconds_by_micro_batch": {str(size): round(seconds, 1) for size, seconds in candidates.items()},
        "ours_micro_batch_tokens": arguments.micro_batch_tokens,
        "activation_checkpointing": not arguments.no_checkpointing,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "peer": TRL,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-batches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--candidates", type=Path, default=ROOT / "build" / "trainer_vs_trl.json")
    parser.add_argument("--choose-only", action="store_true")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        {"ours": run_ours, "trl": run_trl}[arguments.side](arguments.settings)
    else:
        print(json.dumps(compare(arguments)))


if __name__ == "__main__":
    main()
