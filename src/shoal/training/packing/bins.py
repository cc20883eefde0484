"""Token tensors of one forward pass, built from packed prompt_groups.

Shapes: T positions of the bin, N trained tokens, U distinct predictions among them, R attention rows, S length of a row.
A packed bin is one line of T positions with restarting position ids; an `AttentionPlan` says which positions form a row. A
padded bin has its rows as lines and needs no plan: padding is on the right, where causal attention never looks.
`source_U` names the state of each prediction; it is an index into the flattened positions. Completions that share a prefix share
its predictions. Tokens that an environment gave have positions, which others attend to, and are no targets: they enter no loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from shoal.policy.architecture import causal_mask
from shoal.policy.batching import length_batches
from shoal.policy.prefixes import PrefixTree
from shoal.protocol.segments import sampled_places
from shoal.training.packing.packing import PromptGroup


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of similar length, padded to one length: `index_RS` points into the T positions of the bin."""

    index_RS: Tensor


@dataclass(frozen=True)
class AttentionRows:
    """The same rows one after the other without padding, as the variable-length kernel takes them."""

    index_L: Tensor
    """Of each place of each row, its position in the bin."""
    starts: Tensor
    """Where each row begins, and where the last one ends; 32 bits."""
    longest: int
    back_T: Tensor
    """For each position of the bin, where its attention output lies among the rows."""


@dataclass(frozen=True)
class AttentionPlan:
    """Rows that attend causally within themselves and to nothing else. Everything that attention needs of them is here, made once
    per bin and copied to the device with it: a layer asks the device for nothing."""

    blocks: tuple[AttentionBlock, ...]
    back_T: Tensor
    """For each position of the bin, where its attention output lies in the concatenated rows of all blocks."""
    rows: AttentionRows
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def mask(self, length: int, window: int) -> Tensor:
        """The band of a block's rows, made for the first layer and kept for the others."""
        if (length, window) not in self._masks:
            self._masks[length, window] = causal_mask(length, window, self.back_T.device)
        return self._masks[length, window]

    def to(self, device: torch.device) -> "AttentionPlan":
        blocks = tuple(AttentionBlock(block.index_RS.to(device)) for block in self.blocks)
        rows = self.rows
        moved = [tensor.to(device) for tensor in (rows.index_L, rows.starts, rows.back_T)]
        return AttentionPlan(blocks, self.back_T.to(device), AttentionRows(moved[0], moved[1], rows.longest, moved[2]))


@dataclass(frozen=True)
class Bin:
    """Everything one forward pass needs, and which batch member each trained token belongs to."""

    input_ids: Tensor
    position_ids: Tensor
    source_U: Tensor
    target_U: Tensor
    prediction_N: Tensor
    """Of each trained token, which prediction it is."""
    member_N: Tensor
    """Index of the completion in the batch."""
    row_N: Tensor
    """Index of the completion within the bin: 0 … R−1."""
    offset_N: Tensor
    """Index of the token among the trained ones of its completion."""
    plan: AttentionPlan | None

    rows: int
    """R: completions in the bin."""

    @property
    def source_N(self) -> Tensor:
        return self.source_U[self.prediction_N]

    @property
    def target_N(self) -> Tensor:
        return self.target_U[self.prediction_N]

    def to(self, device: torch.device) -> "Bin":
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Bin(**{name: value.to(device) if hasattr(value, "to") else value for name, value in values.items()})


Tokens = Sequence[int]
SHORTEST_SHARE = 0.75
"""Rows of one attention block are padded by at most a third."""


def build_packed(
    prompt_groups: Sequence[PromptGroup],
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    segment_lengths: Sequence[Sequence[int]] | None = None,
) -> Bin:
    """One line of positions: each prompt once, then its completions without their last tokens, each shared prefix once.

    Without lengths of segments every output token is trained.
    """
    ids: list[int] = []
    positions: list[int] = []
    rows: list[np.ndarray] = []
    members: list[int] = []
    for group in prompt_groups:
        prompt = prompts[group.members[0]]
        tree = PrefixTree.of([outputs[member][:-1] for member in group.members])
        prompt_span, first = np.arange(len(ids), len(ids) + len(prompt)), len(ids) + len(prompt)
        rows += [np.concatenate([prompt_span, first + np.array(path, dtype=np.int64)]) for path in tree.paths]
        members += group.members
        ids += [*prompt, *tree.tokens]
        positions += [*range(len(prompt)), *(len(prompt) + depth for depth in tree.depths)]
    if not ids:
        return _empty_bin()
    trained = _trained(members, outputs, segment_lengths)
    sources = [row[-len(outputs[member]) :][places] for row, member, places in zip(rows, members, trained, strict=True)]
    return Bin(
        input_ids=torch.tensor(ids)[None],
        position_ids=torch.tensor(positions)[None],
        **_predictions(np.concatenate(sources), members, outputs, trained),
        plan=_plan_attention(_needed(rows, len(ids)), len(ids)),
        rows=len(members),
        **_members(members, trained),
    )


def _needed(rows: Sequence[np.ndarray], positions: int) -> list[np.ndarray]:
    """Without rows that a longer one holds: equal completions attend once."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    seen_T, needed = np.zeros(positions, dtype=np.bool_), []
    for number in order:
        if not seen_T[rows[number][-1]]:
            seen_T[rows[number]] = True
            needed.append(number)
    return [rows[number] for number in sorted(needed)]


def build_padded(
    prompt_groups: Sequence[PromptGroup],
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    segment_lengths: Sequence[Sequence[int]] | None = None,
) -> Bin:
    """One line per completion, padded on the right."""
    members = [member for group in prompt_groups for member in group.members]
    if not members:
        return _empty_bin()
    lines = [[*prompts[member], *outputs[member][:-1]] for member in members]
    longest = max(map(len, lines))
    ids = np.zeros((len(lines), longest), dtype=np.int64)
    for number, line in enumerate(lines):
        ids[number, : len(line)] = line
    ends = [number * longest + len(line) for number, line in enumerate(lines)]
    trained = _trained(members, outputs, segment_lengths)
    sources = [end - len(outputs[member]) + places for end, member, places in zip(ends, members, trained, strict=True)]
    return Bin(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.arange(longest).expand(len(lines), longest),
        **_predictions(np.concatenate(sources), members, outputs, trained),
        plan=None,
        rows=len(members),
        **_members(members, trained),
    )


def _trained(
    members: Sequence[int], outputs: Sequence[Tokens], segment_lengths: Sequence[Sequence[int]] | None
) -> list[np.ndarray]:
    """Where in the output of each member its trained tokens are."""
    if segment_lengths is None:
        return [np.arange(len(outputs[member])) for member in members]
    return [np.array(sampled_places(segment_lengths[member])) for member in members]


def _predictions(
    source_N: np.ndarray, members: Sequence[int], outputs: Sequence[Tokens], trained: Sequence[np.ndarray]
) -> dict[str, Tensor]:
    """Equal targets of one state once."""
    targets = [outputs[member][place] for member, places in zip(members, trained, strict=True) for place in places]
    pairs_N2 = np.stack([source_N, np.array(targets, dtype=np.int64)], axis=1)
    pairs_U2, prediction_N = np.unique(pairs_N2, axis=0, return_inverse=True)
    if len(pairs_U2) == len(pairs_N2):
        pairs_U2, prediction_N = pairs_N2, np.arange(len(pairs_N2))
    return {
        "source_U": torch.from_numpy(pairs_U2[:, 0].copy()),
        "target_U": torch.from_numpy(pairs_U2[:, 1].copy()),
        "prediction_N": torch.from_numpy(prediction_N),
    }


def _members(members: Sequence[int], trained: Sequence[np.ndarray]) -> dict[str, Tensor]:
    lengths = [len(places) for places in trained]
    counts = torch.tensor(lengths)
    return {
        "member_N": torch.tensor(members).repeat_interleave(counts),
        "row_N": torch.arange(len(members)).repeat_interleave(counts),
        "offset_N": torch.cat([torch.arange(length) for length in lengths]),
    }


def _plan_attention(rows: Sequence[np.ndarray], positions: int) -> AttentionPlan:
    blocks: list[AttentionBlock] = []
    back = np.zeros(positions, dtype=np.int64)
    start = 0
    for chosen in length_batches({number: len(row) for number, row in enumerate(rows)}, shortest_share=SHORTEST_SHARE):
        longest = len(rows[chosen[0]])
        index = np.zeros((len(chosen), longest), dtype=np.int64)
        for line, number in enumerate(chosen):
            row = rows[number]
            index[line, : len(row)] = row
            back[row] = np.arange(start + line * longest, start + line * longest + len(row))
        start += index.size
        blocks.append(AttentionBlock(torch.from_numpy(index)))
    return AttentionPlan(tuple(blocks), torch.from_numpy(back), _rows_in_line(rows, positions))


def _rows_in_line(rows: Sequence[np.ndarray], positions: int) -> AttentionRows:
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    back = np.zeros(positions, dtype=np.int64)
    for start, row in zip(starts, rows, strict=False):
        back[row] = np.arange(start, start + len(row))
    return AttentionRows(
        index_L=torch.from_numpy(np.concatenate(rows)),
        starts=torch.from_numpy(starts.astype(np.int32)),
        longest=max(map(len, rows)),
        back_T=torch.from_numpy(back),
    )


def _empty_bin() -> Bin:
    """One position and nothing to train: keeps a rank in step with the others without training anything twice."""
    none = torch.zeros(0, dtype=torch.int64)
    position = torch.zeros(1, 1, dtype=torch.int64)
    plan = _plan_attention([np.zeros(1, dtype=np.int64)], 1)
    return Bin(
        input_ids=position,
        position_ids=position,
        source_U=none,
        target_U=none,
        prediction_N=none,
        member_N=none,
        row_N=none,
        offset_N=none,
        plan=plan,
        rows=0,
    )
