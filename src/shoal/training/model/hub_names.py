"""Weights under the names of the hub, read tensor by tensor: which stored tensors make each tensor of the module.

Transformers says how stored names become those of the module and which of them are stacked, joined or cut. A rank that owns some
rows of a tensor reads no more than these where rows are experts that are stored one by one, and never more than one whole tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shoal.policy.directory import weight_files


@dataclass(frozen=True)
class Source:
    """Stored tensors of one tensor of the module: one, or several by the pattern that they match, and what joins them."""

    stored: dict[str, list[str]]
    converter: Any = None

    @property
    def is_list_of_rows(self) -> bool:
        """Whether stored tensor number i alone makes row i."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        if self.converter is None:
            return False
        first, *others = self.converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        inside = all(isinstance(one, Transpose) or (isinstance(one, Concatenate) and one.dim > 0) for one in others)
        return stacks and inside


def stored_names(directory: Path) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as reader:
            names |= dict.fromkeys(reader.keys(), file)
    return names


def find_sources(model: nn.Module, names: Sequence[str]) -> dict[str, Source]:
    """By the names of `model`, which needs no memory; what is stored and belongs nowhere is left out."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    wanted: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, Source] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = (name, None)
        if name not in wanted:
            target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target in wanted:
            source = found.setdefault(target, Source({}, by_pattern[pattern] if pattern else None))
            source.stored.setdefault(pattern or name, []).append(name)
    return found


def makes_whole(model: nn.Module, sources: Mapping[str, Source], wanted: set[str]) -> bool:
    """Whether the sources fill all wanted tensors; one that is cut makes several."""
    made = {name for target, source in sources.items() for name in (target, *_cut_from(target, source))}
    return wanted <= made


def _cut_from(target: str, source: Source) -> Iterator[str]:
    if source.converter is None or len(source.converter.target_patterns) == 1:
        return
    first = next((pattern for pattern in source.converter.target_patterns if pattern in target), None)
    if first is not None:
        yield from (target.replace(first, pattern) for pattern in source.converter.target_patterns)


def convert(target: str, source: Source, model: Any, read: Callable[[str], Tensor], rows: slice) -> dict[str, Tensor]:
    """The tensors of the module that the source makes, by name; of stacked rows those of `rows` only."""
    assert source.converter is not None
    converter = deepcopy(source.converter)
    for pattern, names in source.stored.items():
        for name in names[rows] if source.is_list_of_rows else names:
            converter.add_tensor(target, name, pattern, _reading(read, name))
    with torch.no_grad():
        made = converter.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _reading(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)
