"""Families of policies: what the embedded engine needs of a model, and which runner gives it.

To everything else a policy is a causal language model of Transformers: config.json names its type, tokens go in, states and
logits come out. Families differ in what a row keeps between two tokens: keys and values of all positions, or one recurrent
state and a screen. A runner reads prompts and advances rows; the cache that it makes keeps what they need.

Shapes: P prompts, B sequences, S positions after the prompt, R rows, N states, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.frames.policy import MODEL_TYPE
from shoal.policy.directory import read_config
from shoal.policy.embedded.frame_runner import FrameRunner
from shoal.policy.embedded.prompts import PrefilledPrompts, Prompt
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.prefixes import PrefixTree


class RowCache(Protocol):
    """What rows keep between two tokens. Live rows are the first ones."""

    rows: int
    capacity: int

    def enter(self, first_row: int, source_R: Tensor, prompts: PrefilledPrompts) -> None:
        """Rows from `first_row` on begin behind the prompts that `source_R` names."""
        ...

    def copy(self, to_rows: Tensor, from_rows: Tensor, length: int) -> None:
        """Of the first `length` positions; no row is both, and rows that are copied from may live on."""
        ...


class Runner(Protocol):
    model: Any
    vocab_size: int
    hidden_size: int
    max_tokens: int

    @property
    def reads_trees(self) -> bool:
        """Whether continuations may share prefixes; what keeps one state per row reads them one by one."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        ...

    def prepare(self) -> None:
        """Called once, after the first weights were loaded."""
        ...

    def weight_tensors(self) -> list[Tensor]:
        """Every tensor that holds weights, views included."""
        ...

    def weights_changed(self) -> None: ...

    def row_bytes(self, capacity: int) -> int:
        """What a row of that many positions keeps."""
        ...

    def new_cache(self, rows: int, capacity: int) -> Any:
        """A `RowCache`; the one that `decode` is given."""
        ...

    def read_prompts(self, prompts: Sequence[Prompt]) -> PrefilledPrompts: ...

    def continue_prompts(self, prompts: PrefilledPrompts, source_B: Tensor, trees: Sequence[PrefixTree]) -> Tensor:
        """States of every token of the continuations, right-padded: [B, S, D]."""
        ...

    def decode(self, tokens_R: Tensor, positions_R: Tensor, cache: Any, longest: int) -> Tensor:
        """States after one more token per row."""
        ...

    def logits(self, states_ND: Tensor) -> Tensor: ...


def make_runner(model: Any, *, widens: bool = False) -> Runner:
    """`widens`: the matrices stay as they are stored, and everything is computed in float32."""
    return FrameRunner(model) if FrameRunner.fits(model) else ModelRunner(model, widens=widens)


def can_widen(model_files: Path, stored: str, dtype: str) -> bool:
    """Whether weights of that family may stay in `stored` while it computes in `dtype`: only if widening loses nothing."""
    return (stored, dtype) == ("bfloat16", "float32") and read_config(model_files).model_type != MODEL_TYPE
