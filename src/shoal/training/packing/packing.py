"""Which completions share a forward pass: prompt_groups of one prompt, first-fit-decreasing bins, ranks of equal load.

A group stores its prompt once, however many completions follow it, and what completions share at their beginning once, too. A bin
holds whole prompt_groups up to a token budget; a completion is never cut, so one that exceeds the budget has a bin of its own.
Pure integers: no torch, no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.policy.batching import length_batches
from shoal.policy.prefixes import alphabetical, common_length

REPEATED_PER_POSITION = 6
"""Rows that share positions gather them again for attention, which keeps a sixth of what all layers keep of a position."""


@dataclass(frozen=True)
class PromptGroup:
    """Completions of one prompt, by their index in the batch."""

    prompt_length: int
    members: tuple[int, ...]
    tokens: int
    """Positions the model computes: the prompt once, and the completions without their last tokens, which predict nothing, each
    shared prefix once."""
    pairs: int = 0
    """Query and key positions that attend to each other, over all rows; a row attends from its beginning again, one that adds no
    position is left out."""
    repeated: int = 0
    """Places of rows beyond the positions."""

    @property
    def size(self) -> int:
        """What it takes of a bin's budget, which bounds memory."""
        return self.tokens + self.repeated // REPEATED_PER_POSITION

    def cost(self, attention: float) -> float:
        """In tokens through the layers without attention; a pair of positions costs `attention`."""
        return self.tokens + attention * self.pairs


def group_by_prompt(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], capacity: int, *, share: bool = True
) -> list[PromptGroup]:
    """Completions with equal prompts together, split where they would exceed the capacity of a bin."""
    by_prompt: dict[tuple[object, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_prompt.setdefault(tuple(prompt) if share else (index,), []).append(index)
    prompt_groups: list[PromptGroup] = []
    for members in by_prompt.values():
        prompt_groups += _split_group(len(prompts[members[0]]), members, outputs, capacity)
    return prompt_groups


def _split_group(
    prompt_length: int, members: Sequence[int], outputs: Sequence[Sequence[int]], capacity: int
) -> list[PromptGroup]:
    """Completions that begin alike stay together."""
    prompt_groups: list[PromptGroup] = []
    group = PromptGroup(prompt_length, (), prompt_length)
    before: Sequence[int] = ()
    for member in (members[place] for place in alphabetical([outputs[member] for member in members])):
        body = outputs[member][:-1]
        larger = _with_member(group, member, len(body), common_length(before, body))
        if group.members and larger.size > capacity:
            prompt_groups.append(group)
            larger = _with_member(PromptGroup(prompt_length, (), prompt_length), member, len(body), 0)
        group, before = larger, body
    return [*prompt_groups, group]


def _with_member(group: PromptGroup, member: int, length: int, shared: int) -> PromptGroup:
    """`shared` of its positions are there already; if all are, it needs no row."""
    first, added = not group.members, length - shared
    row = group.prompt_length + length if first or added else 0
    return replace(
        group,
        members=(*group.members, member),
        tokens=group.tokens + added,
        pairs=group.pairs + row * (row + 1) // 2,
        repeated=group.repeated + max(0, row - added - (group.prompt_length if first else 0)),
    )


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item indices; never more than 11/9 of the optimum + 1 bins (Johnson 1973). Equal sizes keep their order."""
    bins: list[list[int]] = []
    free: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        number = next((number for number, left in enumerate(free) if sizes[item] <= left), len(bins))
        if number == len(bins):
            bins.append([])
            free.append(max(capacity, sizes[item]))
        bins[number].append(item)
        free[number] -= sizes[item]
    return bins


def balance(sizes: Sequence[float], parts: int) -> list[list[int]]:
    """Items dealt to parts, largest first to the lightest part: loads differ by at most the largest item."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        lightest = loads.index(min(loads))
        shares[lightest].append(item)
        loads[lightest] += sizes[item]
    return shares


def pack(
    prompt_groups: Sequence[PromptGroup], capacity: int, *, parts: int = 1, attention: float = 0.0
) -> list[list[list[PromptGroup]]]:
    """For each part (rank) its bins of prompt_groups. All parts have equally many bins; a missing one is empty, never a repeat.

    Parts get equal costs, bins equal sizes, which is what fills memory."""
    sizes = [group.size for group in prompt_groups]
    packed = []
    for share in balance([group.cost(attention) for group in prompt_groups], parts):
        bins = first_fit_decreasing([sizes[item] for item in share], capacity)
        packed.append([[prompt_groups[share[item]] for item in chosen] for chosen in bins])
    return _equal_counts(packed)


def pack_padded(
    prompt_groups: Sequence[PromptGroup], capacity: int, *, parts: int = 1, attention: float = 0.0
) -> list[list[list[PromptGroup]]]:
    """As `pack`, for models that need plain rows: a bin holds rows of similar length, and padding counts against its budget."""
    sizes = [group.tokens for group in prompt_groups]
    packed = []
    for share in balance([group.cost(attention) for group in prompt_groups], parts):
        bins = length_batches({item: sizes[item] for item in share}, token_limit=capacity)
        packed.append([[prompt_groups[item] for item in chosen] for chosen in bins])
    return _equal_counts(packed)


def _equal_counts(packed: Sequence[list[list[PromptGroup]]]) -> list[list[list[PromptGroup]]]:
    most = max(len(bins) for bins in packed)
    return [bins + [[] for _ in range(most - len(bins))] for bins in packed]
