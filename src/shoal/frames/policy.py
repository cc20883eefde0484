"""The frame model as a causal language model of Transformers: tokens in, states and logits out, frames rendered inside.

A sequence is a prompt, its mark, and actions. The state at the mark or at an action is the output of the LSTM after the frame
that shows its effect; before the mark there is no frame, and states are zero. So everything that trains, publishes, samples or
verifies tokens works on this family as on any other, and the states that are committed to are the LSTM's outputs.

B sequences, S positions, L frames, N all frames, H hidden units.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from shoal.frames.actions import ActionTable
from shoal.frames.model import FrameHead, FrameShape, FrameShapeError, Integrator, State, initialise
from shoal.frames.screens import GO, GOAL, REVERSED, SCREEN_CODE_POINTS, Renderer
from shoal.tasks.editor import Frame

MODEL_TYPE = "shoal_frames"
FRAME_CHUNK = 512
"""Frames that go through the frame head together when activations are computed again."""


class FrameConfig(PretrainedConfig):  # type: ignore[misc]
    """The sizes of the model and the keys of its tokens."""

    model_type = MODEL_TYPE

    def __init__(self, shape: dict[str, Any] | None = None, entries: list[str] | None = None, **other: Any) -> None:
        super().__init__(**{"tie_word_embeddings": False, **other})
        self.shape = shape or asdict(policy_shape(8))
        self.entries = entries or []
        self.vocab_size: int = self.shape["actions"]
        self.hidden_size: int = self.shape["hidden"]
        self.num_hidden_layers: int = self.shape["layers"]

    @classmethod
    def of(cls, shape: FrameShape, table: ActionTable) -> "FrameConfig":
        entries = [*table.entries, GOAL, GO]
        if shape.actions != len(entries) or shape.colours or shape.rows % 2:
            raise FrameShapeError(
                f"A policy of {len(table)} actions needs {len(entries)} outputs, an even number of rows and no colours."
            )
        return cls(asdict(shape), entries)

    @property
    def frame_shape(self) -> FrameShape:
        known = {field.name for field in fields(FrameShape)}
        if not isinstance(self.shape, dict) or set(self.shape) != known:
            raise FrameShapeError("config.json has no shape of a frame model.")
        if not isinstance(self.shape["stages"], list | tuple):
            raise FrameShapeError("config.json has no list of stages.")
        return FrameShape(**{**self.shape, "stages": tuple(self.shape["stages"])})

    @property
    def renderer(self) -> Renderer:
        shape = self.frame_shape
        if not all(isinstance(entry, str) for entry in self.entries):
            raise FrameShapeError("config.json names actions that are not keys.")
        if len(self.entries) != shape.actions or GO not in self.entries:
            raise FrameShapeError(f"config.json names {len(self.entries)} actions; the model has {shape.actions}.")
        return Renderer(tuple(self.entries), shape.rows, shape.columns)


def policy_shape(actions: int, **changes: object) -> FrameShape:
    """A screen of 4 × 16 cells: two lines to edit above the two that are wanted."""
    sizes: dict[str, object] = {"rows": 4, "columns": 16, "code_points": SCREEN_CODE_POINTS, "actions": actions}
    return FrameShape.small(**{**sizes, **changes})


class FrameBackbone(nn.Module):
    """Token sequences to states."""

    def __init__(self, config: FrameConfig) -> None:
        super().__init__()
        shape = config.frame_shape
        self.renderer = config.renderer
        self.frame_head = FrameHead(shape)
        self.integrator = Integrator(shape.width, shape.hidden)
        self.gradient_checkpointing = False

    def forward(self, input_ids: Tensor, attention_plan: Any = None, **_: Any) -> BaseModelOutput:
        """A plan says which positions of one line form a sequence; without one each line is a sequence."""
        rows, row_T, place_T = _lines(input_ids) if attention_plan is None else _packed(input_ids, attention_plan)
        read = [self.renderer.read(tokens) for tokens in rows]
        states_TH = self.integrator.first_hidden.new_zeros(len(row_T), self.integrator.lstm.hidden_size)
        if any(frames for _, frames in read):
            x_LBC = self.embed([frames for _, frames in read])
            states_LBH, _ = self.integrator(x_LBC, self.integrator.first_state(len(read)))
            first_B = torch.tensor([first for first, _ in read], device=input_ids.device)
            states_TH = _in_place(states_LBH, row_T, place_T - first_B[row_T])
        return BaseModelOutput(last_hidden_state=states_TH.view(*input_ids.shape, -1))

    def embed(self, streams: Sequence[Sequence[Frame]]) -> Tensor:
        """Of each frame by itself, [L, B, C]; a stream that ends early goes on with any frame. Equal frames, as samples of one
        prompt have them, are computed once."""
        places: dict[bytes, int] = {}
        index_BL = np.zeros((len(streams), max(map(len, streams))), np.int64)
        for row, frames in enumerate(streams):
            index_BL[row, : len(frames)] = [places.setdefault(frame.tobytes(), len(places)) for frame in frames]
        shape = self.frame_head.shape
        distinct = np.frombuffer(b"".join(places), np.uint8).reshape(len(places), shape.rows, shape.columns)
        device = self.integrator.first_hidden.device
        x_UC = self._embed(torch.from_numpy(distinct.copy()).to(device))
        index_LB = torch.from_numpy(index_BL.T.copy()).to(device)
        return x_UC.index_select(0, index_LB.flatten()).view(*index_LB.shape, -1)

    def _embed(self, frames_U: Tensor) -> Tensor:
        if not (self.gradient_checkpointing and self.training):
            embedded: Tensor = self.frame_head(frames_U)
            return embedded
        parts = torch.split(frames_U, FRAME_CHUNK)
        return torch.cat([checkpoint(self.frame_head, part, use_reentrant=False) for part in parts])

    def advance(self, streams: Sequence[Sequence[Frame]], state: State) -> tuple[Tensor, State]:
        """The frames of each of B streams, from their states on. The last state is that of streams of equal length."""
        states, last = self.integrator(self.embed(streams), state)
        return states, last


def _lines(input_ids: Tensor) -> tuple[list[list[int]], Tensor, Tensor]:
    """Sequences, and of each position its sequence and its place there."""
    rows, length = input_ids.shape
    row_T = torch.arange(rows, device=input_ids.device).repeat_interleave(length)
    return input_ids.tolist(), row_T, torch.arange(length, device=input_ids.device).repeat(rows)


def _packed(input_ids: Tensor, plan: Any) -> tuple[list[list[int]], Tensor, Tensor]:
    """The same of one line that has a prompt once for all of its sequences: its states are taken from one of them."""
    rows = plan.rows
    starts = rows.starts.long()
    row_T = torch.searchsorted(starts, rows.back_T, right=True) - 1
    tokens = input_ids[0].index_select(0, rows.index_L).tolist()
    borders = starts.tolist()
    return [tokens[a:b] for a, b in pairwise(borders)], row_T, rows.back_T - starts[row_T]


def _in_place(states_LBH: Tensor, row_T: Tensor, frame_T: Tensor) -> Tensor:
    """[T, H]: the state of the frame of each position; zeros where there is none yet."""
    states_TH = states_LBH[frame_T.clamp(0, len(states_LBH) - 1), row_T]
    return torch.where((frame_T >= 0).unsqueeze(-1), states_TH, 0.0)


class FramePolicy(PreTrainedModel):  # type: ignore[misc]
    config_class = FrameConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["Block"]
    _supports_sdpa = True
    _supports_attention_backend = True
    """Positions of a packed line are mixed only as its plan says."""

    def __init__(self, config: FrameConfig) -> None:
        super().__init__(config)
        self.model = FrameBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Parameters are drawn where modules are made, or come from files."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        self.model.gradient_checkpointing = True

    def get_input_embeddings(self) -> nn.Module:
        return self.model.frame_head.cells.code_points

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def fresh_policy(shape: FrameShape, table: ActionTable, seed: int) -> FramePolicy:
    """A policy that has learnt nothing yet, but that a cell in reverse has the character of the same cell without."""
    torch.manual_seed(seed)
    policy = FramePolicy(FrameConfig.of(shape, table))
    initialise(policy)
    cells = policy.model.frame_head.cells.code_points.weight
    with torch.no_grad():
        cells[REVERSED:] = cells[:REVERSED] + torch.randn(cells.shape[1])
    return policy


def register() -> None:
    """Makes the family known to Transformers, by the type that config.json names."""
    AutoConfig.register(MODEL_TYPE, FrameConfig, exist_ok=True)
    AutoModelForCausalLM.register(FrameConfig, FramePolicy, exist_ok=True)
