"""The frame model as a causal language model of Transformers: tokens in, states and logits out, frames rendered inside.

A sequence is a prompt, its mark, and actions. The state at the mark or at an action is the output of the LSTM after the frame
that shows its effect; before the mark there is no frame, and states are zero. So everything that trains, publishes, samples or
verifies tokens works on this family as on any other, and the states that are committed to are the LSTM's outputs.

B sequences, S positions, L frames, N all frames, H hidden units.
"""

from dataclasses import asdict, fields
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

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        first_B, frames_N, lengths_B = self._render(input_ids.tolist())
        states_BSH = self.integrator.first_hidden.new_zeros(*input_ids.shape, self.integrator.lstm.hidden_size)
        if len(frames_N):
            x_LBC = self._side_by_side(self.embed(frames_N), lengths_B)
            states_LBH, _ = self.integrator(x_LBC, self.integrator.first_state(len(lengths_B)))
            states_BSH = self._in_place(states_LBH, first_B, input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=states_BSH)

    def embed(self, frames: list[Any]) -> Tensor:
        """Of each frame by itself, [N, C]. Equal frames, as samples of one prompt and padding have them, are computed once."""
        places: dict[bytes, int] = {}
        index_N = [places.setdefault(frame.tobytes(), len(places)) for frame in frames]
        distinct = np.frombuffer(b"".join(places), np.uint8).reshape(len(places), *frames[0].shape)
        device = self.integrator.first_hidden.device
        x_UC = self._embed(torch.from_numpy(distinct.copy()).to(device))
        return x_UC.index_select(0, torch.tensor(index_N, device=device))

    def _embed(self, frames_U: Tensor) -> Tensor:
        if not (self.gradient_checkpointing and self.training):
            embedded: Tensor = self.frame_head(frames_U)
            return embedded
        parts = torch.split(frames_U, FRAME_CHUNK)
        return torch.cat([checkpoint(self.frame_head, part, use_reentrant=False) for part in parts])

    def advance(self, frames_LB: list[list[Any]], state: State) -> tuple[Tensor, State]:
        """As many frames for each of B streams, from their states on."""
        x_N = self.embed([frame for frames_B in frames_LB for frame in frames_B])
        states, last = self.integrator(x_N.reshape(len(frames_LB), -1, x_N.shape[-1]), state)
        return states, last

    def _render(self, rows: list[list[int]]) -> tuple[list[int], list[Any], list[int]]:
        read = [self.renderer.read(tokens) for tokens in rows]
        frames = [frame for _, found in read for frame in found]
        return [first for first, _ in read], frames, [len(found) for _, found in read]

    @staticmethod
    def _side_by_side(x_NC: Tensor, lengths_B: list[int]) -> Tensor:
        """[L, B, C], each stream from its first frame on, padded behind its last."""
        parts = x_NC.split_with_sizes(lengths_B)
        return nn.utils.rnn.pad_sequence(list(parts))

    @staticmethod
    def _in_place(states_LBH: Tensor, first_B: list[int], length: int) -> Tensor:
        """[B, S, H]: the first frame of each stream at its place, zeros before it."""
        device = states_LBH.device
        at_BS = torch.arange(length, device=device) - torch.tensor(first_B, device=device)[:, None]
        shown_BS = (at_BS >= 0).unsqueeze(-1)
        index_BS = at_BS.clamp(0, len(states_LBH) - 1)
        streams_B1 = torch.arange(len(first_B), device=device)[:, None]
        return torch.where(shown_BS, states_LBH[index_BS, streams_B1], 0.0)


class FramePolicy(PreTrainedModel):  # type: ignore[misc]
    config_class = FrameConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["Block"]
    _supports_sdpa = True

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
