"""The policies of the benchmark, each with the weights that a cheat might run instead.

`bundled` is the demo's policy, the last of six versions, with the demo's slots. `smollm2` is SmolLM2-135M-Instruct, moved off the
4-bit grid that its weights come from and trained for three steps at the learning rate of its example, in slots of four completions.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from adversaries.arena import OFF_THE_GRID, make_workload, train_versions, with_model
from shoal.config import load_config
from shoal.files import CONFIG_FILE, WEIGHTS_FILE
from shoal.policy import TorchEngine, build_model, bundled_directory
from shoal.policy.engine import Completion, GenerationRequest
from shoal.policy.weights import unique_tensors
from shoal.tasks.workload import WorkItem, Workload
from shoal.validation.calibration.forgeries import Tensors, noisy, quantised
from support.tiny_run import make_lease

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.toml"
SMOLLM2 = ROOT / "build" / "smollm2-135m-instruct"
SMOLLM2_SLOT = {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 128, "max_new_tokens": 64}
SMOLLM2_LEARNING_RATE = 1.5e-5
"""That of examples/smollm2."""
SMOLLM2_STEPS = 3
LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Policy:
    name: str
    root: Path
    workload: Workload
    true: Path
    stale: Path
    """One version older."""
    layer: int
    """Of which one cheat keeps the old weights."""

    @property
    def temperature(self) -> float:
        return self.workload.descriptor.rollouts.temperature

    def items(self, slot: int) -> list[WorkItem]:
        return self.workload.items(bytes.fromhex(make_lease(slot).slot_seed))

    def requests(self, slots: Sequence[int], most_tokens: int = 0) -> list[GenerationRequest]:
        limit = most_tokens or self.workload.descriptor.rollouts.max_new_tokens
        return [GenerationRequest(item.prompt_tokens, item.seed, limit) for slot in slots for item in self.items(slot)]

    def engine(self, weights: str, dtype: str, max_batch: int = 256) -> TorchEngine:
        return TorchEngine(
            self.weights(weights),
            eos_token_ids=self.workload.codec.eos_token_ids,
            dtype=dtype,
            max_batch=max_batch,
        )

    def weights(self, name: str) -> Path:
        if name in ("true", "stale"):
            return self.true if name == "true" else self.stale
        path = self.root / name
        if not (path / WEIGHTS_FILE).exists():
            write_policy(path, self.true, self._forged(name))
        return path

    def _forged(self, name: str) -> Tensors:
        tensors = load_file(self.true / WEIGHTS_FILE)
        if name == "stale_layer":
            old, part = load_file(self.stale / WEIGHTS_FILE), f".layers.{self.layer}."
            return {key: old[key] if part in key else tensor for key, tensor in tensors.items()}
        return {"int8": quantised(8), "int4": quantised(4), "fp8": float8}[name](tensors)


def float8(tensors: Tensors) -> Tensors:
    """e4m3 with one scale per row, as vLLM and others store fp8 weights."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / LARGEST_FP8
        return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)

    return {name: rounded(tensor) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


def write_policy(path: Path, like: Path, tensors: Tensors) -> Path:
    shutil.copytree(like, path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / WEIGHTS_FILE, {"format": "pt"})
    return path


def bundled(root: Path) -> Policy:
    workload = make_workload(load_config(DEMO), bundled_directory(), ("torch/bfloat16/cpu",))
    versions = train_versions(root, bundled_directory(), workload)
    return Policy("bundled", root, workload, versions[-1], versions[-2], layer=1)


def smollm2(root: Path) -> Policy:
    first, last = root / "v0", root / f"v{SMOLLM2_STEPS}"
    if not (first / WEIGHTS_FILE).exists():
        write_policy(first, SMOLLM2, noisy(OFF_THE_GRID)(load_file(SMOLLM2 / WEIGHTS_FILE)))
    workload = make_workload(with_model(load_config(DEMO), SMOLLM2, **SMOLLM2_SLOT), first, ("torch/bfloat16/cpu",))
    policy = Policy("smollm2", root, workload, last, root / f"v{SMOLLM2_STEPS - 1}", layer=15)
    if not (last / WEIGHTS_FILE).exists():
        train(policy, first)
    return policy


def train(policy: Policy, first: Path) -> None:
    """Steps of the example's size. Advantages are drawn: the size of Adam's step does not depend on theirs, and a model that
    solves none of the tasks would have none. Masters lie anywhere in their bf16 cells, as a run's do with `dither_masters`."""
    torch.manual_seed(0)
    model = build_model(first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += (torch.rand_like(parameter) - 0.5) * bf16_steps(parameter)
    optimiser = torch.optim.AdamW(model.parameters(), lr=SMOLLM2_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    engine = TorchEngine(first, eos_token_ids=policy.workload.codec.eos_token_ids, dtype="bfloat16")
    for step in range(1, SMOLLM2_STEPS + 1):
        requests = policy.requests(range(900_000 + 4 * step, 900_004 + 4 * step), 24)
        optimiser.zero_grad()
        for request, made in zip(requests, engine.generate(requests, temperature=1.0), strict=True):
            tokens = torch.tensor([[*request.prompt_tokens, *made.tokens]])
            logits = model(tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, len(request.prompt_tokens) :])
            (float(torch.randn(())) * loss / len(requests)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in unique_tensors(model).items()}
        write_policy(policy.root / f"v{step}", first, tensors)


def bf16_steps(tensor: torch.Tensor) -> torch.Tensor:
    """The distance to the next bf16 number."""
    _, exponents = torch.frexp(tensor)
    return torch.ldexp(torch.full_like(tensor, math.ldexp(1.0, -8)), exponents)


POLICIES = {"bundled": bundled, "smollm2": smollm2}


LONG_TOKENS = {"bundled": 4000, "smollm2": 1000}
LONG_ROWS = 4
LONG_SPREAD = 3.0


def long_texts(policy: Policy, number: int) -> tuple[Policy, tuple[list[GenerationRequest], list[Completion]]]:
    """Long completions, with the policy to score them: the bundled architecture with random weights and random tokens, since the
    bundled policy has 512 positions; SmolLM2 with text that it samples itself and does not end."""
    generator, length = torch.Generator().manual_seed(number), LONG_TOKENS[policy.name]
    if policy.name == "smollm2":
        unending = TorchEngine(policy.true, eos_token_ids=[])
        requests = policy.requests([600_000 + number], length)[:LONG_ROWS]
        return policy, (requests, unending.generate(requests, temperature=1.0))
    path = policy.root / "long"
    if not (path / WEIGHTS_FILE).exists():
        write_random(path, policy.true, length + 64)
    requests = [GenerationRequest((5, 6, 7), 1000 * number + row, length) for row in range(LONG_ROWS)]
    tokens = torch.randint(8, 300, (LONG_ROWS, length), generator=generator).tolist()
    return replace(policy, true=path), (requests, [Completion(row, [0.0] * length) for row in tokens])


def write_random(path: Path, like: Path, positions: int) -> None:
    shutil.copytree(like, path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | {"max_position_embeddings": positions}))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(like / WEIGHTS_FILE).items():
        spread = (LONG_SPREAD if "embed" in name else 1.0) * tensor.shape[-1] ** -0.5
        random = spread * torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor if tensor.dim() < 2 else random.to(torch.bfloat16)
    save_file(tensors, path / WEIGHTS_FILE, {"format": "pt"})
