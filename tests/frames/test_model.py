"""The frame model: its sizes, its state, and gradients that do not depend on how the window is computed."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from shoal.frames import FrameModel, FrameShape, FrameShapeError, backward_window, parameter_count

TINY = FrameShape.small(rows=4, columns=8, channels=4, stages=(6, 8), heads=2, hidden=10, actions=12)


def window(length: int, streams: int, shape: FrameShape = TINY) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    high = 256 if shape.colours else shape.code_points
    frames = torch.randint(0, high, (length, streams, *shape.frame), generator=generator, dtype=torch.uint8)
    return frames, torch.randint(0, shape.actions, (length, streams), generator=generator)


def test_the_small_shape_has_243_thousand_parameters() -> None:
    assert parameter_count(FrameModel(FrameShape.small())) == 243_184


def test_the_large_shape_has_94_million_parameters() -> None:
    with torch.device("meta"):
        assert round(parameter_count(FrameModel(FrameShape.large())) / 1e6, 1) == 94.0


@pytest.mark.parametrize("changes", [{}, {"colours": True, "code_points": 256}, {"gated": True}, {"reduction": "mean"}])
@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (16, 16), (37, 16), (37, 5), (37, 100)])
def test_gradients_in_three_phases_equal_plain_autograd(changes: dict[str, object], length: int, chunk: int) -> None:
    torch.manual_seed(0)
    shape = FrameShape.small(**{**vars(TINY), **changes})
    model = FrameModel(shape).double()
    frames, targets = window(length, 3, shape)
    loss = backward_window(model, frames, targets, chunk=chunk)
    streamed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    plain = F.cross_entropy(model(frames)[0].flatten(0, 1), targets.flatten())
    torch.autograd.backward(plain)
    assert loss == pytest.approx(float(plain.detach()), abs=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - streamed[name]).abs().max() < 1e-9, name


def test_the_initial_state_is_learned() -> None:
    model = FrameModel(TINY)
    backward_window(model, *window(3, 2))
    assert model.integrator.first_hidden.grad is not None
    assert model.integrator.first_hidden.grad.abs().max() > 0


def test_a_split_window_with_passed_state_gives_the_logits_of_the_whole() -> None:
    model = FrameModel(TINY).double()
    frames, _ = window(21, 2)
    whole, last = model(frames)
    first, state = model(frames[:8])
    second, end = model(frames[8:], state)
    assert (torch.cat([first, second]) - whole).abs().max() < 1e-12
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(last, end, strict=True))


def test_a_later_frame_changes_no_earlier_logit() -> None:
    model = FrameModel(TINY).double()
    frames, _ = window(6, 1)
    other = frames.clone()
    other[4] = 7
    before, after = model(frames)[0], model(other)[0]
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


PEAK = """
import sys, torch
from shoal.frames import FrameModel, FrameShape, backward_window
torch.set_num_threads(1)
model = FrameModel(FrameShape.small())
def run(length):
    frames = torch.zeros(length, 8, 8, 24, dtype=torch.uint8)
    backward_window(model, frames, torch.zeros(length, 8, dtype=torch.long))
run(32)
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
before = peak()
run(int(sys.argv[1]))
print(peak() - before)
"""


def peak_growth_mb(length: int) -> float:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(length)], capture_output=True, text=True, env=environment, check=True
    )
    return float(done.stdout)


def test_peak_memory_does_not_grow_with_the_window() -> None:
    """1,024 frames with plain autograd take about 1,900 MB more than 128. Frames and embeddings, which may grow, are 7 MB."""
    assert peak_growth_mb(1024) - peak_growth_mb(128) < 40


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": 6}, "halved"),
        ({"heads": 3}, "heads"),
        ({"hidden": 0}, "below 1"),
        ({"columns": -4}, "below 1"),
        ({"rows": 8.0}, "whole numbers"),
        ({"columns": "24"}, "whole numbers"),
        ({"layers": True}, "whole numbers"),
        ({"stages": (32, None)}, "whole numbers"),
        ({"reduction": "first"}, "last or mean"),
    ],
)
def test_a_shape_that_no_model_can_have_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(FrameShapeError, match=named):
        FrameShape.small(**changes)


def test_frames_that_do_not_fit_are_refused() -> None:
    model = FrameModel(TINY)
    with pytest.raises(FrameShapeError, match="do not fit"):
        model(torch.zeros(2, 1, 4, 12, dtype=torch.uint8))
    with pytest.raises(FrameShapeError, match="do not fit"):
        model(torch.zeros(0, 1, 4, 8, dtype=torch.uint8))
    with pytest.raises(FrameShapeError, match="code point 200"):
        model(torch.full((2, 1, 4, 8), 200, dtype=torch.uint8))
    with pytest.raises(FrameShapeError, match="code point -1"):
        model(torch.full((2, 1, 4, 8), -1))
    with pytest.raises(FrameShapeError, match="whole numbers"):
        model(torch.full((2, 1, 4, 8), float("nan")))
    with pytest.raises(FrameShapeError, match="do not fit"):
        model(torch.zeros(2, dtype=torch.uint8))


def test_colours_beyond_a_byte_are_refused() -> None:
    shape = FrameShape.small(**{**vars(TINY), "colours": True, "code_points": 256})
    frames = torch.zeros(1, 1, *shape.frame, dtype=torch.int64)
    frames[..., 3] = 256
    with pytest.raises(FrameShapeError, match="colour 256"):
        FrameModel(shape)(frames)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (torch.zeros(4, 2, dtype=torch.long), "do not fit"),
        (torch.zeros(3, 1, dtype=torch.long), "do not fit"),
        (torch.full((3, 2), 12), "action 12"),
        (torch.full((3, 2), -100), "action -100"),
    ],
)
def test_actions_that_do_not_fit_their_frames_are_refused(targets: torch.Tensor, named: str) -> None:
    """A window with more actions than frames would be trained on the wrong mean."""
    with pytest.raises(FrameShapeError, match=named):
        backward_window(FrameModel(TINY), window(3, 2)[0], targets)
