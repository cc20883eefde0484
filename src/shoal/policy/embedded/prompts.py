"""Prompts that went through the model once, for all the sequences that start with them.

G samples of one task share their prompt. Generation copies its cache entries into each row; scoring attends to them where they are.

Shapes: P prompts, L longest prompt, B sequences, S positions after the prompt, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.policy.embedded.attention import ContinuationStep
from shoal.policy.embedded.runner import ModelRunner

Prompt = tuple[int, ...]


@dataclass
class PrefilledPrompts:
    index: dict[Prompt, int]
    lengths_P: Tensor
    entries: list[Tensor]
    """Keys and values alternately, layer by layer, each [P, heads, L, size]."""
    states_PD: Tensor
    """The state at the last position of each prompt: it produces the first output token."""

    def sources(self, prompts: Sequence[Prompt]) -> Tensor:
        return torch.tensor([self.index[prompt] for prompt in prompts], device=self.states_PD.device)

    def only(self, prompt: Prompt) -> "PrefilledPrompts":
        part = slice(self.index[prompt], self.index[prompt] + 1)
        entries = [entry[part].clone() for entry in self.entries]
        return PrefilledPrompts({prompt: 0}, self.lengths_P[part], entries, self.states_PD[part].clone())


def prefill_prompts(runner: ModelRunner, prompts: Sequence[Prompt]) -> PrefilledPrompts:
    """One pass over distinct prompts."""
    lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=runner.device)
    states_PLD, entries = runner.prefill(padded(prompts, runner.device))
    last_PD = states_PLD[torch.arange(len(prompts), device=runner.device), lengths_P - 1]
    return PrefilledPrompts({prompt: at for at, prompt in enumerate(prompts)}, lengths_P, entries, last_PD)


def continue_prompts(
    runner: ModelRunner, prompts: PrefilledPrompts, source_B: Tensor, continuations: Sequence[Sequence[int]]
) -> Tensor:
    """States at every position of the continuations, right-padded: [B, S, D]."""
    ids_BS = padded(continuations, runner.device)
    starts_B = prompts.lengths_P[source_B]
    positions_BS = starts_B[:, None] + torch.arange(ids_BS.shape[1], device=runner.device)
    return runner.run(ids_BS, positions_BS, ContinuationStep(prompts.entries, source_B, positions_BS))


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(map(len, sequences))
    return torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences], device=device)
