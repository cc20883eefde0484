"""Full backpropagation through time whose activation memory does not grow with the length of the window.

Three phases. (1) The frame head runs without gradient, a few time steps at a time; only the embeddings are kept. (2)
Integrator, action head and loss run with gradient over the embeddings, in chunks that are computed again on the way back.
(3) The frame head runs again, with gradient, and receives the gradient of its embeddings. The gradients are those of plain
autograd: nothing is truncated. What grows with the window is the frames and one embedding with its gradient per frame.

L time steps, B streams, C channels, V actions.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.frames.model import FrameModel, State, check_frames, check_targets

CHUNK = 16
"""Time steps that are recomputed together: small against any window, large enough that the LSTM's loop stays in one call."""


def backward_window(model: FrameModel, frames_LB: Tensor, targets_LB: Tensor, *, chunk: int = CHUNK) -> float:
    """Adds the gradient of the mean cross-entropy over the window to the parameters; returns the loss."""
    check_frames(frames_LB, model.shape)
    check_targets(targets_LB, frames_LB, model.shape)
    x_LBC = _embed(model, frames_LB, chunk)
    loss = window_loss(model, x_LBC, targets_LB, chunk=chunk)
    torch.autograd.backward(loss)
    gradient = x_LBC.grad
    assert gradient is not None
    for start in range(0, len(frames_LB), chunk):
        part = frames_LB[start : start + chunk].flatten(0, 1)
        torch.autograd.backward(model.frame_head(part), gradient[start : start + chunk].flatten(0, 1))
    return float(loss.detach())


def _embed(model: FrameModel, frames_LB: Tensor, chunk: int) -> Tensor:
    """The embeddings of all frames as one leaf."""
    length, streams = frames_LB.shape[:2]
    like = model.action_head.weight
    x_LBC = torch.empty(length, streams, model.shape.width, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        for start in range(0, length, chunk):
            part = frames_LB[start : start + chunk]
            x_LBC[start : start + chunk] = model.frame_head(part.flatten(0, 1)).unflatten(0, part.shape[:2])
    return x_LBC.requires_grad_()


def window_loss(model: FrameModel, x_LBC: Tensor, targets_LB: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """Mean cross-entropy of the window; chunks keep only the state at their borders."""
    hidden, cell = model.integrator.first_state(x_LBC.shape[1])
    total = x_LBC.new_zeros(())
    for start in range(0, len(x_LBC), chunk):
        loss, hidden, cell = checkpoint(
            _chunk_loss, model, x_LBC[start : start + chunk], targets_LB[start : start + chunk], (hidden, cell),
            use_reentrant=False,
        )  # fmt: skip
        total = total + loss
    return total / targets_LB.numel()


def _chunk_loss(model: FrameModel, x_LBC: Tensor, targets_LB: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    states_LBH, (hidden, cell) = model.integrator(x_LBC, state)
    logits = model.action_head(states_LBH).flatten(0, 1)
    return F.cross_entropy(logits, targets_LB.flatten(), reduction="sum"), hidden, cell
