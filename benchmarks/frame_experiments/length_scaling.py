"""Loss against trained length: one run per length with the same first weights, batch and data, measured on the same held-out
sessions.

Every loss is that of the same held-out actions. `own`: windows of the trained length from the first state, the paper's
quantity; early positions have little history. `recent`: the same, but every action has at least half of that length before it,
where its session has. `carried`: the state is carried on over the whole stream, also beyond the trained length. All are taken
over CPU seconds of one thread, off the clock while they are measured. A run is one piece that is stored when it ends.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.frames import (
    Dataset,
    FrameModel,
    FrameShape,
    backward_window,
    build_dataset,
    build_table,
    committed,
    damaged,
    library_files,
    parameter_count,
    standard_library,
)
from shoal.frames.corpus import Change, Split
from shoal.frames.model import State

LEARNING_RATE, CLIP = 2e-3, 1.0
LOSSES = ("own", "recent", "carried")
SHAPE = FrameShape.small(rows=4, columns=16)
"""Of 8 × 24 cells nothing is learnt in the few minutes that a run has."""
LONG = 32
KEPT = 8
"""Own frames that remain when the history before them is another session's."""


@dataclass(frozen=True)
class Plan:
    batch: int = 8
    steps: int = 800
    least_s: float = 60.0
    """CPU seconds: a run goes on until it has both, so that runs of different lengths can be compared over time."""
    first_s: float = 3.0
    growth: float = 1.4
    """First held-out evaluation, and the ratio of the times of two: short runs cross early, long ones late."""
    streams: int = 32
    stream_length: int = 384
    train_actions: int = 600_000
    seed: int = 0

    def seconds(self, length: int) -> float:
        """Twice as long from `LONG` on: those runs are slower per step, and cross later."""
        return self.least_s * (2 if length >= LONG else 1)


def halfway(steps: int) -> int:
    return max(1, steps // 2)


@dataclass(frozen=True)
class Data:
    train: Dataset
    frames_LB: Tensor
    targets_LB: Tensor
    """Held-out streams."""
    skipped: dict[str, int]

    def save(self, path: Path) -> None:
        train = self.train
        whole = (train.frames_NRC, train.actions_N, train.starts_S, self.frames_LB.numpy(), self.targets_LB.numpy())
        temporary = path.with_suffix(".part.npz")
        np.savez(temporary, *whole, skipped=json.dumps(self.skipped))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Data":
        with np.load(path) as file:
            frames, actions, starts, heldout, targets = (file[f"arr_{number}"] for number in range(5))
            skipped = json.loads(str(file["skipped"]))
        return cls(Dataset(frames, actions, starts), torch.from_numpy(heldout), torch.from_numpy(targets), skipped)


def make_data(plan: Plan, shape: FrameShape, repository: Path | None = None) -> Data:
    """Sessions that repair damaged files of the standard library, or the commits of a repository."""
    skipped: Counter[str] = Counter()

    def sessions(split: Split, seed: int, actions: int, least: int) -> Dataset:
        changes = _changes(split, seed, repository, skipped)
        most = plan.stream_length if split == "heldout" else 768
        return build_dataset(
            changes,
            table,
            shape.rows,
            shape.columns,
            actions=actions,
            least=least,
            most=most,
            seed=seed,
            skipped=skipped,
        )

    texts = (
        ("\n".join(lines) for _, lines in library_files(standard_library(), "train", Counter())[::4])
        if repository is None
        else ("\n".join(change.after) for change in itertools.islice(_changes("train", 0, repository, Counter()), 400))
    )
    table = build_table(texts, shape.actions)
    train = sessions("train", plan.seed, plan.train_actions, 128)
    heldout = sessions("heldout", 10**6 + plan.seed, plan.streams * plan.stream_length, plan.stream_length)
    frames, targets = heldout.streams(plan.stream_length, plan.streams)
    return Data(train, frames, targets, dict(skipped))


def _changes(split: Split, seed: int, repository: Path | None, skipped: Counter[str]) -> Iterator[Change]:
    if repository is not None:
        return committed(repository, split, skipped)
    return damaged(library_files(standard_library(), split, skipped), seed)


def first_model(shape: FrameShape, train: Dataset) -> FrameModel:
    """The action head has a bias, which starts at the logarithm of how often each action occurs.

    Without it the LSTM has to supply these frequencies: its outputs saturate within 100 steps, no gradient comes through, and the
    loss stays at that of the frequencies alone.
    """
    model = FrameModel(shape)
    head = nn.Linear(shape.hidden, shape.actions)
    counts = np.bincount(train.actions_N, minlength=shape.actions) + 1.0
    with torch.no_grad():
        head.weight.copy_(model.action_head.weight)
        head.bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
    model.action_head = head
    return model


def run(
    length: int, batch: int, data: Data, shape: FrameShape, plan: Plan, *, is_control: bool = False
) -> dict[str, object]:
    """Trains one model and measures it on the way; a control stops after half of the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    model = first_model(shape, data.train)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    windows = data.train.windows(length, batch, plan.seed)
    curve: list[dict[str, float]] = []
    milestones: dict[str, object] = {}
    wanted = {max(1, plan.steps // 4), halfway(plan.steps), plan.steps}
    spent, next_at = 0.0, plan.first_s
    for step in itertools.count(1):
        started = time.process_time()
        optimiser.zero_grad()
        backward_window(model, *next(windows))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        spent += time.process_time() - started
        is_over = step == halfway(plan.steps) if is_control else step >= plan.steps and spent >= plan.seconds(length)
        if step in wanted or spent >= next_at or is_over:
            found = evaluate(model, data, length)
            curve.append({"cpu_s": round(spent, 3), "step": step, **{name: _mean(found[name]) for name in LOSSES}})
            if step in wanted:
                milestones[str(step)] = found
        if spent >= next_at:
            next_at = spent * plan.growth
        if is_over:
            break
    result: dict[str, object] = {
        "length": length, "batch": batch, "steps": step, "cpu_s": round(spent, 1), "milestones": milestones,
        "curve": curve, "final": found, "plan": asdict(plan), "parameters": parameter_count(model),
        "frames_per_s": round(step * length * batch / spent, 1),
    }  # fmt: skip
    if length > KEPT:
        result["history"] = history_control(model, data, length)
    return result


def _mean(values: object) -> float:
    assert isinstance(values, list)
    return float(sum(values) / len(values))


@torch.no_grad()
def evaluate(model: FrameModel, data: Data, length: int) -> dict[str, list[float]]:
    """Losses per session, and by position of a window."""
    x_LBC = embed(model, data.frames_LB)
    windows = token_losses(model, *(_cut(part, length) for part in (x_LBC, data.targets_LB)))
    own = _joined(windows, data.targets_LB.shape[1])
    carried = token_losses(model, x_LBC, data.targets_LB)[: len(own)]
    found = {"own": own, "recent": _recent(model, x_LBC, data.targets_LB, own, length), "carried": carried}
    return {
        **{name: [round(value, 5) for value in losses.mean(dim=0).tolist()] for name, losses in found.items()},
        "by_position": [round(value, 5) for value in windows.mean(dim=1).tolist()],
    }


def _recent(model: FrameModel, x_LBC: Tensor, targets_LB: Tensor, own_LB: Tensor, length: int) -> Tensor:
    """Windows shifted by half a length give their second halves for the first halves of the others, but the first."""
    half = length // 2
    if not half or len(x_LBC) < length + half:
        return own_LB
    shifted = token_losses(model, *(_cut(part[half:], length) for part in (x_LBC, targets_LB)))
    losses_LB = own_LB.clone()
    for number, window in enumerate(shifted.reshape(length, -1, targets_LB.shape[1]).unbind(dim=1), 1):
        place = number * length
        losses_LB[place : place + half] = window[length - half :][: len(losses_LB) - place]
    return losses_LB


def _cut(stream: Tensor, length: int) -> Tensor:
    """[K·L + rest, B, …] as [L, K·B, …]: every window by itself; the rest is left out."""
    whole = stream[: len(stream) // length * length]
    return whole.reshape(-1, length, *stream.shape[1:]).transpose(0, 1).flatten(1, 2)


def _joined(windows: Tensor, streams: int) -> Tensor:
    """[L, K·B] as [K·L, B]."""
    return windows.reshape(len(windows), -1, streams).transpose(0, 1).flatten(0, 1)


@torch.no_grad()
def embed(model: FrameModel, frames_LB: Tensor) -> Tensor:
    parts = [model.frame_head(part.flatten(0, 1)).unflatten(0, part.shape[:2]) for part in torch.split(frames_LB, 32)]
    return torch.cat(parts)


def token_losses(model: FrameModel, x_LBC: Tensor, targets_LB: Tensor) -> Tensor:
    """Cross-entropy of every target, [L, B], from the first state on."""
    states, _ = model.integrator(x_LBC, model.integrator.first_state(x_LBC.shape[1]))
    logits = model.action_head(states).flatten(0, 1)
    return F.cross_entropy(logits, targets_LB.flatten(), reduction="none").reshape(targets_LB.shape)


@torch.no_grad()
def history_control(model: FrameModel, data: Data, length: int) -> dict[str, float]:
    """Loss in the second half of windows: with their own history, with another session's before the last frames, with those
    frames alone."""
    frames, targets = (_cut(part, length) for part in (data.frames_LB, data.targets_LB))
    x_LBC = embed(model, frames)
    first = max(length // 2, KEPT)
    places = range(first, length)
    recent = torch.cat([x_LBC[at + 1 - KEPT : at + 1] for at in places], dim=1)
    target = targets[first:].flatten()
    borders = [at + 1 - KEPT for at in places]
    before = states_before(model, x_LBC, borders)
    swapped = states_before(model, x_LBC.roll(1, dims=1), borders)
    fresh = model.integrator.first_state(recent.shape[1])
    return {
        name: round(float(_last_loss(model, recent, state, target)), 4)
        for name, state in (("own", before), ("swapped", swapped), ("last_frames", fresh))
    }


def states_before(model: FrameModel, x_LBC: Tensor, places: list[int]) -> State:
    """The state of every stream before each of these places, in growing order, side by side."""
    state = model.integrator.first_state(x_LBC.shape[1])
    found, at = [], 0
    for place in places:
        if place > at:
            _, state = model.integrator(x_LBC[at:place], state)
            at = place
        found.append(state)
    hidden, cell = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return hidden, cell


def _last_loss(model: FrameModel, x_LBC: Tensor, state: State, target_B: Tensor) -> Tensor:
    states, _ = model.integrator(x_LBC, state)
    return F.cross_entropy(model.action_head(states[-1]), target_B)
