"""A policy that reads frames of a terminal and integrates them over time: frame head, LSTM, action head.

In: code points of screens, [L, B, rows, columns], with six colour bytes per cell behind each code point if the shape has
colours. Out: logits of the next action at every time step. The frame head sees one frame at a time; only the LSTM mixes
time, serially, so any update of the state can be represented. A window that is split and continued from the passed state
gives the same logits.

L time steps, B streams, N frames, C channels, T tokens of a frame, H hidden units, V actions.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ConfigError

NORM_EPS = 1e-5
COLOUR_BYTES = 6
"""Red, green and blue of the foreground, then of the background."""
POOL = 2
DILATION = 2

State = tuple[Tensor, Tensor]
"""Hidden and cell state of the integrator, [1, B, H] each."""
Reduction = Literal["last", "mean"]


class FrameShapeError(ConfigError):
    """A shape that no model can have, or frames that do not fit the model."""

    code = "frame_shape"


@dataclass(frozen=True)
class FrameShape:
    """Everything that fixes the sizes of a model."""

    rows: int
    columns: int
    code_points: int
    channels: int
    stages: tuple[int, ...]
    """Channels after each downsampling by two in both directions."""
    layers: int
    heads: int
    hidden: int
    actions: int
    colours: bool = False
    gated: bool = False
    """Twice the channels in each convolution, with GEGLU instead of GELU."""
    reduction: Reduction = "last"

    @classmethod
    def small(cls, **changes: object) -> Self:
        """243K parameters: 8 × 24 cells of ASCII."""
        sizes: dict[str, object] = {"rows": 8, "columns": 24, "code_points": 128, "channels": 16, "stages": (32, 64)}
        sizes |= {"layers": 1, "heads": 4, "hidden": 128, "actions": 512}
        return cls(**{**sizes, **changes})  # type: ignore[arg-type]

    @classmethod
    def large(cls) -> Self:
        """94M parameters: 48 × 160 cells with colours, the sizes of the author's debug run."""
        return cls(rows=48, columns=160, code_points=256, channels=1024, stages=(1024, 1024), layers=3, heads=8,
                   hidden=1024, actions=20_352, colours=True)  # fmt: skip

    def __post_init__(self) -> None:
        sizes = (
            self.rows,
            self.columns,
            self.code_points,
            self.channels,
            *self.stages,
            self.heads,
            self.hidden,
            self.actions,
        )
        if not all(type(size) is int for size in (*sizes, self.layers)) or self.reduction not in get_args(Reduction):
            raise FrameShapeError(f"Sizes of a frame model are whole numbers, its reduction is last or mean: {self}.")
        if min(sizes) < 1 or self.layers < 0:
            raise FrameShapeError(f"A frame model cannot have a size below 1: {self}.")
        shrink = POOL ** len(self.stages)
        if self.rows % shrink or self.columns % shrink:
            raise FrameShapeError(
                f"Frames of {self.rows} × {self.columns} cells cannot be halved {len(self.stages)} times.",
                hint=f"Choose rows and columns that {shrink} divides.",
            )
        if self.width % self.heads:
            raise FrameShapeError(f"{self.heads} attention heads do not divide a width of {self.width}.")

    @property
    def width(self) -> int:
        """Channels of a frame's embedding."""
        return self.stages[-1] if self.stages else self.channels

    @property
    def frame(self) -> tuple[int, ...]:
        return (self.rows, self.columns, 1 + COLOUR_BYTES) if self.colours else (self.rows, self.columns)


class RMSNorm(nn.Module):
    """Over the channels, which are the last dimension."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class CellEmbedding(nn.Module):
    """Code point + position + colours, per cell."""

    def __init__(self, shape: FrameShape) -> None:
        super().__init__()
        self.code_points = nn.Embedding(shape.code_points, shape.channels)
        self.positions = nn.Parameter(torch.randn(shape.rows * shape.columns, shape.channels))
        self.colours = nn.Parameter(torch.randn(COLOUR_BYTES, shape.channels)) if shape.colours else None

    def forward(self, frames: Tensor) -> Tensor:
        cells = frames.flatten(1, 2)
        if self.colours is None:
            embedded: Tensor = self.code_points(cells.long())
            return embedded + self.positions
        tint = (cells[..., 1:].to(self.colours.dtype) / 255) @ self.colours
        coloured: Tensor = self.code_points(cells[..., 0].long()) + self.positions + tint
        return coloured


class Downsampling(nn.Module):
    """RMSNorm, 3 × 3 convolution with dilation 2, GELU, average pool: a quarter of the cells."""

    def __init__(self, channels_in: int, channels_out: int, gated: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(channels_in)
        self.gated = gated
        wide = 2 * channels_out if gated else channels_out
        self.convolution = nn.Conv2d(channels_in, wide, 3, padding=DILATION, dilation=DILATION, bias=False)

    def forward(self, x_NRSC: Tensor) -> Tensor:
        x = self.convolution(self.norm(x_NRSC).permute(0, 3, 1, 2))
        if self.gated:
            value, gate = x.chunk(2, dim=1)
            x = value * F.gelu(gate)
        else:
            x = F.gelu(x)
        return F.avg_pool2d(x, POOL).permute(0, 2, 3, 1)


class Block(nn.Module):
    """Pre-norm transformer block over the tokens of one frame; every token sees every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_NTC: Tensor) -> Tensor:
        x = x_NTC + self._attend(self.norm_attention(x_NTC))
        mixed: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + mixed

    def _attend(self, x_NTC: Tensor) -> Tensor:
        split = self.qkv(x_NTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2])
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class FrameHead(nn.Module):
    """The embedding of each frame by itself, [N, C]."""

    def __init__(self, shape: FrameShape) -> None:
        super().__init__()
        self.shape = shape
        self.cells = CellEmbedding(shape)
        sizes = (shape.channels, *shape.stages)
        self.stages = nn.ModuleList(Downsampling(a, b, shape.gated) for a, b in itertools.pairwise(sizes))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))

    def forward(self, frames_N: Tensor) -> Tensor:
        x = self.cells(frames_N).unflatten(1, (self.shape.rows, self.shape.columns))
        for stage in self.stages:
            x = stage(x)
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        embedding: Tensor = x[:, -1] if self.shape.reduction == "last" else x.mean(dim=1)
        return embedding


class Integrator(nn.Module):
    """One LSTM layer with a learned initial state: the only part that mixes time."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden)
        self.first_hidden = nn.Parameter(torch.zeros(hidden))
        self.first_cell = nn.Parameter(torch.zeros(hidden))

    def first_state(self, streams: int) -> State:
        shape = (1, streams, self.lstm.hidden_size)
        return self.first_hidden.expand(shape).contiguous(), self.first_cell.expand(shape).contiguous()

    def forward(self, x_LBC: Tensor, state: State) -> tuple[Tensor, State]:
        states, last = self.lstm(x_LBC, state)
        return states, last


class FrameModel(nn.Module):
    """Frames in, logits of the next action out."""

    def __init__(self, shape: FrameShape) -> None:
        super().__init__()
        self.shape = shape
        self.frame_head = FrameHead(shape)
        self.integrator = Integrator(shape.width, shape.hidden)
        self.action_head = nn.Linear(shape.hidden, shape.actions, bias=False)
        initialise(self)

    def forward(self, frames_LB: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        check_frames(frames_LB, self.shape)
        length, streams = frames_LB.shape[:2]
        x_LBC = self.frame_head(frames_LB.flatten(0, 1)).unflatten(0, (length, streams))
        states_LBH, last = self.integrator(x_LBC, state or self.integrator.first_state(streams))
        return self.action_head(states_LBH), last


def check_frames(frames_LB: Tensor, shape: FrameShape) -> None:
    if tuple(frames_LB.shape[2:]) != shape.frame or 0 in frames_LB.shape[:2]:
        raise FrameShapeError(
            f"Frames of shape {tuple(frames_LB.shape)} do not fit [L, B, {', '.join(map(str, shape.frame))}]."
        )
    if frames_LB.is_floating_point() or frames_LB.is_complex():
        raise FrameShapeError(f"Frames are whole numbers, not {frames_LB.dtype}.")
    _check_range(frames_LB[..., 0] if shape.colours else frames_LB, shape.code_points, "code point")
    if shape.colours:
        _check_range(frames_LB[..., 1:], 256, "colour")


def check_targets(targets_LB: Tensor, frames_LB: Tensor, shape: FrameShape) -> None:
    if targets_LB.shape != frames_LB.shape[:2]:
        raise FrameShapeError(
            f"Actions of shape {tuple(targets_LB.shape)} do not fit frames of {tuple(frames_LB.shape)}."
        )
    _check_range(targets_LB, shape.actions, "action")


def _check_range(values: Tensor, end: int, what: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        raise FrameShapeError(f"There is {what} {low if low < 0 else high}; the model knows {end}.")


def initialise(model: nn.Module) -> None:
    """Weights and biases U(±1/√fan_in), LSTM U(±1/√H), embeddings N(0, 1), norms 1, first state 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = (module.weight[0].numel()) ** -0.5
            nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
