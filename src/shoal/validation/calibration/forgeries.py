"""Forgeries that a calibration is tested with: the same work, with one thing wrong.

Other weights, other adapters and other temperatures are sampled honestly from the wrong policy; edits keep the honest text but for
one token; forged proofs keep everything but the commitments.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shoal.files import CONFIG_FILE, WEIGHTS_FILE
from shoal.policy.directory import ADAPTER_CONFIG_FILE, weight_files
from shoal.policy.engine import Completion
from shoal.protocol.segments import sampled_places

Tensors = dict[str, torch.Tensor]
Forge = Callable[[Tensors], Tensors]
Edit = Callable[[Sequence[Completion]], list[Completion]]
"""Changes one submission."""


@contextmanager
def forged_weights(directory: Path, forge: Forge) -> Iterator[Path]:
    """A copy of a model or an adapter with changed weights, for as long as the block lasts."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as temporary:
        weights = {name: tensor for path in weight_files(directory) for name, tensor in load_file(path).items()}
        save_file(forge(weights), Path(temporary) / WEIGHTS_FILE, {"format": "pt"})
        for config in (CONFIG_FILE, ADAPTER_CONFIG_FILE):
            if (directory / config).is_file():
                shutil.copyfile(directory / config, Path(temporary) / config)
        yield Path(temporary)


def noisy(relative: float, seed: int = 0) -> Forge:
    def forge(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (tensor.float() * (1 + relative * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
            for name, tensor in tensors.items()
        }

    return forge


def quantised(bits: int) -> Forge:
    """Symmetric rounding of every matrix with one scale per row, as common quantisers do."""
    levels = 2 ** (bits - 1) - 1

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / levels
        on_grid: torch.Tensor = (tensor.float() / scale).round() * scale
        return on_grid.to(tensor.dtype)

    return lambda tensors: {name: rounded(tensor) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


WEIGHTS: dict[str, Forge] = {"weights_noise_1e-3": noisy(1e-3), "int8": quantised(8), "int4": quantised(4)}


def adapter_off(tensors: Tensors) -> Tensors:
    """The bare base: what an engine serves that never got the adapter."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def lower_rank(tensors: Tensors) -> Tensors:
    """Half of the rank, as a cheaper adapter has; of rank 1 nothing is left."""
    return {name: _half(name, tensor) for name, tensor in tensors.items()}


def _half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    kept = tensor.clone()
    ranks = kept if name.endswith("lora_A.weight") else kept.t()
    ranks[len(ranks) // 2 :] = 0
    return kept


ADAPTERS: dict[str, Forge] = {"adapter_off": adapter_off, "adapter_lower_rank": lower_rank}
TEMPERATURES = (0.7, 0.9, 1.1, 1.3)


def edited_token(completions: Sequence[Completion]) -> list[Completion]:
    """One sampled token of one completion of the submission, in the middle, becomes its neighbour in the vocabulary."""
    number = max(range(len(completions)), key=lambda index: len(completions[index].tokens))
    tokens = list(completions[number].tokens)
    places = sampled_places(completions[number].segment_lengths or [len(tokens)])
    middle = places[len(places) // 2]
    tokens[middle] -= 1 if tokens[middle] else -1
    return [
        replace(completion, tokens=tokens) if index == number else completion
        for index, completion in enumerate(completions)
    ]


def constant_polynomials(completions: Sequence[Completion]) -> list[Completion]:
    """The same value everywhere: cheap, and near most of the largest states."""
    return _with_proofs(completions, lambda number, index, proof: proof[:4] + bytes(len(proof) - 4))


def copied_proofs(completions: Sequence[Completion]) -> list[Completion]:
    """Proofs of another completion, wherever their sizes fit."""

    def other(number: int, index: int, proof: bytes) -> bytes:
        proofs = completions[(number + 1) % len(completions)].proofs
        return proofs[index] if index < len(proofs) and len(proofs[index]) == len(proof) else proof

    return _with_proofs(completions, other)


EDITS: dict[str, Edit] = {
    "edited_token": edited_token,
    "constant_polynomials": constant_polynomials,
    "copied_proofs": copied_proofs,
}


def _with_proofs(completions: Sequence[Completion], forge: Callable[[int, int, bytes], bytes]) -> list[Completion]:
    return [
        replace(completion, proofs=[forge(number, index, proof) for index, proof in enumerate(completion.proofs)])
        for number, completion in enumerate(completions)
    ]
