"""A policy of frames as the embedded engine runs it: a row keeps its screen and the state of the LSTM.

A step presses the keys of one action per row, renders one frame each, and advances the LSTM by it. There is no cache that
grows: a row costs the same after any number of actions. Scoring renders all frames of a completion at once.

Shapes: P prompts, B sequences, S positions after the prompt, R rows, N states, H hidden units.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.frames.policy import MODEL_TYPE
from shoal.policy.embedded.prompts import PrefilledPrompts, Prompt
from shoal.policy.prefixes import PrefixTree
from shoal.tasks.editor import Frame

SCREEN_BYTES = 1 << 13
"""Generous for the text of a screen and its objects."""


class FrameCache:
    def __init__(self, runner: "FrameRunner", rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self._runner = runner
        self.screens: list[Any] = [None] * rows
        self.state_RH = torch.zeros(2, rows, runner.hidden_size, dtype=runner.dtype, device=runner.device)
        """Hidden and cell state of each row."""

    def enter(self, first_row: int, source_R: Tensor, prompts: PrefilledPrompts) -> None:
        rows = slice(first_row, first_row + len(source_R))
        self.state_RH[:, rows] = prompts.entries[0][source_R].transpose(0, 1)
        names = list(prompts.index)
        started = {source: self._runner.screen(names[source]) for source in set(source_R.tolist())}
        self.screens[rows] = [started[source].copy() for source in source_R.tolist()]

    def copy(self, to_rows: Tensor, from_rows: Tensor, length: int) -> None:
        self.state_RH[:, to_rows] = self.state_RH[:, from_rows]
        for to_row, from_row in zip(to_rows.tolist(), from_rows.tolist(), strict=True):
            self.screens[to_row] = self.screens[from_row].copy()


class FrameRunner:
    reads_trees = False

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.max_tokens = 1 << 30
        self._renderer = model.model.renderer

    @staticmethod
    def fits(model: Any) -> bool:
        return bool(getattr(model.config, "model_type", "") == MODEL_TYPE)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def prepare(self) -> None:
        """Nothing is taken over: the modules are the model's own."""

    def weight_tensors(self) -> list[Tensor]:
        return list(self.model.state_dict(keep_vars=True).values())

    def weights_changed(self) -> None:
        """Nothing is copied from them."""

    def row_bytes(self, capacity: int) -> int:
        return 2 * self.hidden_size * self.dtype.itemsize + SCREEN_BYTES

    def new_cache(self, rows: int, capacity: int) -> FrameCache:
        return FrameCache(self, rows, capacity)

    def logits(self, states_ND: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(states_ND)
        return logits

    def screen(self, prompt: Prompt) -> Any:
        """The screen after a prompt, its actions included if it has any."""
        first = prompt.index(self._renderer.go) if self._renderer.go in prompt else len(prompt)
        screen = self._renderer.start(prompt[:first])
        for action in prompt[first + 1 :]:
            screen.press(self._renderer.entries[action])
        return screen

    def read_prompts(self, prompts: Sequence[Prompt]) -> PrefilledPrompts:
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        state_P2H = torch.zeros(len(prompts), 2, self.hidden_size, dtype=self.dtype, device=self.device)
        frames_P = [self._renderer.read(prompt)[1] for prompt in prompts]
        for count in {len(frames) for frames in frames_P} - {0}:
            chosen = [at for at, frames in enumerate(frames_P) if len(frames) == count]
            state_P2H[chosen] = self._states_after([frames_P[at] for at in chosen])
        return PrefilledPrompts(
            {prompt: at for at, prompt in enumerate(prompts)}, lengths_P, [state_P2H], state_P2H[:, 0]
        )

    def _states_after(self, streams: Sequence[Sequence[Frame]]) -> Tensor:
        """Hidden and cell state behind streams of equal length, [B, 2, H]."""
        first = self.model.model.integrator.first_state(len(streams))
        _, (hidden, cell) = self.model.model.advance(streams, first)
        return torch.stack([hidden[0], cell[0]], dim=1)

    def continue_prompts(self, prompts: PrefilledPrompts, source_B: Tensor, trees: Sequence[PrefixTree]) -> Tensor:
        assert all(tree.is_path for tree in trees)
        names = list(prompts.index)
        shown = [
            self._renderer.frames(self.screen(names[source]), tree.tokens)
            for source, tree in zip(source_B.tolist(), trees, strict=True)
        ]
        hidden_cell = prompts.entries[0][source_B].transpose(0, 1).contiguous()
        states_SBH, _ = self.model.model.advance(shown, (hidden_cell[:1], hidden_cell[1:]))
        states: Tensor = states_SBH.transpose(0, 1)
        return states

    def decode(self, tokens_R: Tensor, positions_R: Tensor, cache: FrameCache, longest: int) -> Tensor:
        rows = len(tokens_R)
        frames = []
        for screen, token in zip(cache.screens[:rows], tokens_R.tolist(), strict=True):
            screen.press(self._renderer.entries[token])
            frames.append([screen.frame()])
        before = cache.state_RH[:, None, :rows].contiguous()
        states_1RH, (hidden, cell) = self.model.model.advance(frames, (before[0], before[1]))
        cache.state_RH[0, :rows], cache.state_RH[1, :rows] = hidden[0], cell[0]
        states: Tensor = states_1RH[0]
        return states
