"""Prompts that went through the model once, for all the sequences that start with them.

G samples of one task share their prompt. Generation copies its cache entries into each row; scoring attends to them where they are.

Shapes: P prompts, L longest prompt, B sequences, S positions after the prompt, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Prompt = tuple[int, ...]


@dataclass
class PrefilledPrompts:
    index: dict[Prompt, int]
    lengths_P: Tensor
    entries: list[Tensor]
    """What the runner keeps of them, each [P, …]: keys and values alternately, layer by layer, as [P, heads, L, size]."""
    states_PD: Tensor
    """The state at the last position of each prompt: it produces the first output token."""

    def sources(self, prompts: Sequence[Prompt]) -> Tensor:
        return torch.tensor([self.index[prompt] for prompt in prompts], device=self.states_PD.device)

    def only(self, prompt: Prompt) -> "PrefilledPrompts":
        part = slice(self.index[prompt], self.index[prompt] + 1)
        entries = [entry[part].clone() for entry in self.entries]
        return PrefilledPrompts({prompt: 0}, self.lengths_P[part], entries, self.states_PD[part].clone())


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(map(len, sequences))
    return torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences], device=device)
