"""How small and how fast a delta is, on real GRPO updates of SmolLM2-135M.

    python benchmarks/delta.py [--model DIR] [--versions 6] [--updates DIR] [--repeats 5]

For each learning rate the model is trained by GRPO (sampled answers to sums, group-normalised rewards, AdamW, gradient clip 0.1, 8
optimiser steps per version). Its fp32 master weights are first dithered inside their rounding intervals;
without that fewer weights flip and the figure flatters us. The first version, in which AdamW warms up, is not counted. The bound is
H(p) + p·H(step) bits per weight with the measured rate p and the measured histogram of steps; a coder that knows nothing else
cannot pass it. Ours knows the exponent of each weight, so the fraction bound ÷ payload may exceed 1. Versions are kept in
`--updates`, so that a second run measures the same ones.
"""

import argparse
import json
import math
import os
import platform
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.codec.blocks import apply_block, encode_block
from shoal.broadcast.codec.pieces import Block, TensorBits, partition
from shoal.broadcast.manifest import TensorEntry
from shoal.broadcast.published import SPAN_BYTES
from shoal.files import digest_bytes

FETCH = Path(__file__).resolve().parents[1] / "examples" / "smollm2" / "fetch.py"
LEARNING_RATES = {"lr3e7": 3e-7, "lr1e6": 1e-6}
STEPS_PER_VERSION = 8
GROUP_SIZE = 6
NEW_TOKENS = 16
U16 = NDArray[np.uint16]


def train_versions(model_directory: Path, directory: Path, learning_rate: float, versions: int) -> None:
    """Write `v0.raw` … `vN.raw` (all tensors as bf16) and `tensors.json` (their names and shapes)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shoal.training.model.dithering import dither_masters

    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    named = list(model.named_parameters())
    parameters = [parameter for _, parameter in named]
    dither_masters(named, seed=0)
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    directory.mkdir(parents=True, exist_ok=True)
    for version in range(versions + 1):
        for step in range(STEPS_PER_VERSION if version else 0):
            print(f"{directory.name}: version {version}, step {step}", file=sys.stderr, flush=True)
            grpo_step(model, tokenizer, optimiser, parameters, rng)
        temporary = directory / "writing.tmp"
        with open(temporary, "wb") as file:
            for parameter in parameters:
                file.write(parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
        temporary.rename(directory / f"v{version}.raw")
    layout = [[name, list(parameter.shape)] for name, parameter in named]
    (directory / "tensors.json").write_text(json.dumps(layout))


def grpo_step(model: Any, tokenizer: Any, optimiser: Any, parameters: list[Any], rng: random.Random) -> None:
    import torch

    first, second = rng.randrange(10, 99), rng.randrange(10, 99)
    turn = {"role": "user", "content": f"What is {first} + {second}? Answer in one sentence."}
    text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.repeat(GROUP_SIZE, 1)
    with torch.no_grad():
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.eos_token_id,
        )
    outputs = tokens[:, prompt.shape[1] :]
    answers = [tokenizer.decode(row, skip_special_tokens=True) for row in outputs]
    rewards = torch.tensor([float(str(first + second) in answer) - 0.01 * len(answer) for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    ended = (outputs == tokenizer.eos_token_id).int()
    mask = torch.cumsum(ended, 1) - ended == 0
    logits = model(tokens).logits[:, prompt.shape[1] - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, outputs[..., None])[..., 0]
    ratios = torch.exp(logprobs - logprobs.detach())
    loss = -(ratios * advantages[:, None] * mask).sum() / mask.sum()
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    optimiser.step()


def load_version(directory: Path, version: int) -> TensorBits:
    layout = json.loads((directory / "tensors.json").read_text())
    data = np.memmap(directory / f"v{version}.raw", np.uint8, "r").data
    entries, at = [], 0
    for name, shape in layout:
        end = at + 2 * math.prod(shape)
        entries.append(TensorEntry(name=name, dtype="bfloat16", shape=tuple(shape), digest=digest_bytes(data[at:end])))
        at = end
    return TensorBits(entries, data)


class Measured:
    """One pair of versions: payload, bound, and the time of encoding and applying on all cores."""

    def __init__(self, base: TensorBits, new: TensorBits, base_bits: U16, new_bits: U16, repeats: int) -> None:
        blocks = partition(new.tensors, SPAN_BYTES)
        self.full_bytes = new_bits.nbytes
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

            def encode() -> list[bytes]:
                return list(pool.map(lambda block: encode_block(block, base, new), blocks))

            payloads, self.encode_s = median_seconds(encode, repeats)
            pairs = list(zip(payloads, blocks, strict=True))

            buffers: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
            for _ in range(os.cpu_count() or 1):
                buffers.put(np.empty(SPAN_BYTES, np.uint8))

            def apply(pair: tuple[bytes, Block], look: Callable[[U16], str]) -> list[str]:
                buffer = buffers.get()
                pieces = apply_block(memoryview(pair[0]), pair[1], base, new.tensors, buffer)
                seen = [look(numbers) for numbers in pieces]  # type: ignore[arg-type]
                buffers.put(buffer)
                return seen

            def apply_all() -> None:
                list(pool.map(lambda pair: apply(pair, lambda numbers: ""), pairs))

            def apply_and_verify() -> list[list[str]]:
                return list(
                    pool.map(lambda pair: apply(pair, lambda numbers: digest_bytes(numbers.data.cast("B"))), pairs)
                )

            _, self.apply_s = median_seconds(apply_all, repeats)
            digests, self.verified_s = median_seconds(apply_and_verify, repeats)
        expected = [[digest_bytes(new.bits(piece).data.cast("B")) for piece in block] for block in blocks]
        self.bit_exact = digests == expected
        self.payload_bytes = sum(len(payload) for payload in payloads)
        self.bound_fraction = bound_bytes(base_bits, new_bits) / self.payload_bytes
        self.changed = float(np.mean(base_bits != new_bits))

    @property
    def ratio(self) -> float:
        return self.full_bytes / self.payload_bytes


def bound_bytes(base: U16, new: U16) -> float:
    """The entropy of which bf16 weights changed and by how much: n·(H(p) + p·H(step)), steps in the order of the numbers."""
    changed = np.flatnonzero(base != new)
    rate = len(changed) / len(base)
    steps = (_ordered(new[changed]) - _ordered(base[changed])).astype(np.uint16)
    positions = _entropy_bits(np.array([len(changed), len(base) - len(changed)]))
    return len(base) * (positions + rate * _entropy_bits(np.bincount(steps))) / 8


def _ordered(bits: U16) -> U16:
    return np.where(bits >> 15, ~bits, bits | 0x8000).astype(np.uint16)


def _entropy_bits(counts: NDArray[Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def median_seconds(work: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    result = work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - started)
    return result, statistics.median(times)


def measure_rate(directory: Path, versions: int, repeats: int) -> list[Measured]:
    measured = []
    for version in range(2, versions + 1):
        paths = [directory / f"v{number}.raw" for number in (version - 1, version)]
        bits = [np.fromfile(path, np.uint16) for path in paths]
        pair = [load_version(directory, number) for number in (version - 1, version)]
        result = Measured(pair[0], pair[1], bits[0], bits[1], repeats)
        print(
            f"{directory.name} v{version}: {result.changed:.3%} changed, {result.ratio:.1f}x,"
            f" {result.bound_fraction:.3f} of the bound, encode {result.full_bytes / result.encode_s / 1e9:.2f} GB/s,"
            f" apply {result.full_bytes / result.apply_s / 1e9:.2f} GB/s",
            file=sys.stderr,
        )
        measured.append(result)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; SmolLM2-135M-Instruct by default")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--updates", type=Path, default=Path("runs/benchmarks/delta"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    results: dict[str, list[Measured]] = {}
    for name, learning_rate in LEARNING_RATES.items():
        directory = options.updates / name
        if not (directory / "tensors.json").exists():
            train_versions(
                options.model or runpy.run_path(str(FETCH))["fetched"](), directory, learning_rate, options.versions
            )
        results[name] = measure_rate(directory, options.versions, options.repeats)
    everything = [result for measured in results.values() for result in measured]

    def speed(seconds: Callable[[Measured], float]) -> float:
        return round(statistics.median(result.full_bytes / seconds(result) / 1e9 for result in everything), 2)

    metrics: dict[str, object] = {
        "bound_fraction_min": round(min(result.bound_fraction for result in everything), 3),
        **{
            f"ratio_{name}": round(statistics.fmean(result.ratio for result in measured), 1)
            for name, measured in results.items()
        },
        **{
            f"changed_{name}": round(statistics.fmean(result.changed for result in measured), 5)
            for name, measured in results.items()
        },
        "encode_gbps": speed(lambda result: result.encode_s),
        "apply_gbps": speed(lambda result: result.apply_s),
        "apply_verified_gbps": speed(lambda result: result.verified_s),
        "bit_exact": all(result.bit_exact for result in everything),
        "versions": options.versions - 1,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
