"""What LoRA costs in memory, bytes and time: a large model that trains on this machine, and a small one beside full training.

    python benchmarks/lora_memory.py [--small] [--pieces DIR] [--write]

Each part is a process of its own, whose largest resident memory counts, everything that it imports included; its result is kept
in --pieces. Weights are random:
memory and bytes do not depend on their values.

`peak_gb`: a Llama of 1.5B parameters, stored in bf16, rank 8 on all linear layers: optimiser steps on 4 completions, each
version staged and announced by a real origin, with the base published beside it. Full training of it would hold 24 GB of weights,
gradients and moments alone. SmolLM2-135M's shape: `trainer_memory_ratio` is the peak of a trainer with rank 16 ÷ that of full
training on the same batch with the same settings; `bytes_per_version` what a follower downloads per version, next to
`bytes_per_full_version` (the first version of full training); `swap_ms` the median time in which an engine changes between two
resident versions, `load_ms` the time to read one that is not.
"""

import argparse
import json
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shoal.config import LoraConfig, TrainingConfig

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "lora_memory.json"
LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32_000,
}
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
}
SMALL: dict[str, Any] = {
    **SMOLLM2,
    "hidden_size": 144,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
STEPS, SWAPS = 2, 200
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32


def write_model(shape: dict[str, Any], directory: Path) -> int:
    """A random Llama in bf16; returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=2048))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_groups(vocabulary: int, seed: int, groups: int, size: int = 4) -> list[Any]:
    from shoal.training import Group, Sample

    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    made = []
    for number in range(groups):
        prompt, rewards = tokens(PROMPT_TOKENS), [float(place % 2) for place in range(size)]
        samples = [Sample(prompt, tokens(OUTPUT_TOKENS), reward, reward) for reward in rewards]
        made.append(Group(f"0/0/{number}", samples))
    return made


def train(directory: Path, scratch: Path, *, rank: int, groups: int, kl_beta: float) -> dict[str, Any]:
    """A few steps, each followed by a published version; what they took."""
    from shoal.broadcast import Origin, OriginSettings
    from shoal.identity import Keypair
    from shoal.policy.weights import stored_tensors
    from shoal.training import Trainer

    lora = LoraConfig(rank=rank) if rank else None
    config = TrainingConfig(
        device="cpu",
        learning_rate=1e-4,
        warmup_steps=0,
        minibatches=1,
        kl_beta=kl_beta,
        kl_limit=1e6,
        micro_batch_tokens=512,
    )
    key, settings = Keypair.generate(), OriginSettings(run_id="memory")
    if lora is not None:
        base = Origin(scratch / "origin", key, settings).add_base(stored_tensors(directory))
        settings = OriginSettings(run_id="memory", adapts=base, delta_from_bytes=None)
    origin = Origin(scratch / "origin", key, settings)
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    published, seconds = [], []
    with Trainer(config, directory, work_dir=scratch / "trainer", temperature=1.0, seed=0, lora=lora) as trainer:
        for step in range(STEPS):
            started = time.perf_counter()
            trainer.train_step(make_groups(vocabulary, step, groups))
            seconds.append(time.perf_counter() - started)
            published.append(origin.stage(trainer.step, trainer.wire_tensors()))
            origin.announce(ledger_head="")
    return {
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "bytes_per_version": published[0].follow_bytes,
        "versions": len(published),
        "step_s": statistics.median(seconds),
    }


def swap(directory: Path, scratch: Path, *, rank: int) -> dict[str, Any]:
    """Time to change between resident versions, and to read one."""
    from shoal.policy import GenerationRequest, TorchEngine
    from shoal.validation.calibration.adapters import write_typical

    lora = LoraConfig(rank=rank)
    adapters = [write_typical(scratch / str(seed), directory, lora, seed) for seed in range(2)]
    engine = TorchEngine(directory, eos_token_ids=[], lora=lora)
    engine.load(adapters[0])
    started = time.perf_counter()
    engine.load(adapters[1])
    load_s = time.perf_counter() - started
    times = []
    for number in range(SWAPS):
        started = time.perf_counter()
        engine.load(adapters[number % 2])
        times.append(time.perf_counter() - started)
    request = [GenerationRequest((1, 2, 3), 5, 16)]
    first = engine.generate(request, temperature=1.0)[0].tokens
    engine.load(adapters[0])
    engine.load(adapters[1])
    assert engine.generate(request, temperature=1.0)[0].tokens == first, "the same version gives the same tokens"
    return {"swap_ms": 1e3 * statistics.median(times), "load_ms": 1e3 * load_s}


def run_part(name: str, small: bool, directory: Path, scratch: Path) -> dict[str, Any]:
    torch.set_num_threads(1 if small else torch.get_num_threads())
    match name:
        case "write-large":
            return {"parameters": write_model(SMALL if small else LARGE, directory)}
        case "write-smollm2":
            return {"parameters": write_model(SMALL if small else SMOLLM2, directory)}
        case "large":
            return train(directory, scratch, rank=8, groups=1, kl_beta=0.001)
        case "full":
            return train(directory, scratch, rank=0, groups=4, kl_beta=0.001)
        case "adapter":
            return train(directory, scratch, rank=16, groups=4, kl_beta=0.001)
        case _:
            return swap(directory, scratch, rank=16)


def in_process(name: str, small: bool, directory: Path, pieces: Path) -> dict[str, Any]:
    piece = pieces / f"{name}{'-small' if small else ''}.json"
    if piece.exists():
        known: dict[str, Any] = json.loads(piece.read_bytes())
        return known
    if not name.startswith("write") and not directory.exists():
        in_process(f"write-{directory.name}", small, directory, Path(tempfile.mkdtemp()))
    scratch = Path(tempfile.mkdtemp())
    command = [sys.executable, __file__, "--part", name, str(directory), str(scratch), *(["--small"] if small else [])]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    finally:
        shutil.rmtree(scratch)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {result}", flush=True)
    piece.write_text(json.dumps(result))
    return result


def measure(small: bool, pieces: Path) -> dict[str, Any]:
    pieces.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp())
    try:
        large, smollm2 = root / "large", root / "smollm2"
        adapter, full = (in_process(name, small, smollm2, pieces) for name in ("adapter", "full"))
        swapped = in_process("swap", small, smollm2, pieces)
        parameters = in_process("write-large", small, large, pieces)["parameters"]
        big = in_process("large", small, large, pieces)
    finally:
        shutil.rmtree(root)
    return {
        "parameters": parameters,
        "peak_gb": round(big["peak_gb"], 2),
        "full_training_gb": round(16 * parameters / 1e9, 1),
        "large_versions": big["versions"],
        "large_bytes_per_version": big["bytes_per_version"],
        "large_step_s": round(big["step_s"], 1),
        "trainer_memory_ratio": round(adapter["peak_gb"] / full["peak_gb"], 3),
        "adapter_peak_gb": round(adapter["peak_gb"], 2),
        "full_peak_gb": round(full["peak_gb"], 2),
        "bytes_per_version": adapter["bytes_per_version"],
        "bytes_per_full_version": full["bytes_per_version"],
        "swap_ms": round(swapped["swap_ms"], 3),
        "load_ms": round(swapped["load_ms"], 1),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script out")
    parser.add_argument("--pieces", type=Path, default=RESULT.parents[2] / "build" / "lora_memory")
    parser.add_argument("--write", action="store_true", help=f"store the result in {RESULT.name}")
    parser.add_argument("--part", nargs=3, metavar=("NAME", "MODEL", "SCRATCH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, directory, scratch = arguments.part
        print(json.dumps(run_part(name, arguments.small, Path(directory), Path(scratch))))
        return
    result = measure(arguments.small, arguments.pieces)
    if arguments.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
