"""Adapters that an engine holds beside each other on one base: changing between them moves a pointer per layer.

A version is known by the identity of its file, so a directory that was rewritten is read again. Together the adapters take a
fraction of what the base takes; beyond it the one that was used longest ago is dropped, never the one in use.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.config import LoraConfig
from shoal.policy.directory import Identity, weights_identity
from shoal.policy.lora.files import as_factors, factor_shapes, read_factors
from shoal.policy.lora.layers import Factors, adapt, adapted_layers
from shoal.policy.lora.targets import target_names

MEMORY_SHARE = 0.25
"""Of the base, for all resident adapters together; two may always stay."""


class ResidentAdapters:
    def __init__(self, model: Any, lora: LoraConfig, dtype: torch.dtype) -> None:
        """Makes every linear layer of the model one that can be adapted; factors are kept in `dtype`."""
        self._lora, self._names = lora, target_names(model, lora)
        self._shapes = factor_shapes(model, self._names, lora.rank)
        self._dtype, self._device = dtype, model.device
        self._most_bytes = MEMORY_SHARE * sum(parameter.nbytes for parameter in model.parameters())
        adapt(model, self._names, lora, trained=False)
        layers = adapted_layers(model)
        self._layers = {name: layers[name] for name in self._names}
        self._resident: OrderedDict[Identity, dict[str, Factors]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resident)

    def use(self, directory: Path, before_reading: Callable[[], None] = lambda: None) -> None:
        """Compute with the adapter of that directory; on refusal the one in use stays."""
        identity = weights_identity(directory)
        if identity not in self._resident:
            before_reading()
            self._resident[identity] = self._read(directory)
        self._resident.move_to_end(identity)
        for name, factors in self._resident[identity].items():
            self._layers[name].loaded = factors
        self._drop_oldest()

    def _read(self, directory: Path) -> dict[str, Factors]:
        tensors = read_factors(directory, self._shapes)
        here = {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}
        return as_factors(here, self._names, self._lora.scale)

    def _drop_oldest(self) -> None:
        while len(self._resident) > 2 and sum(map(_size_bytes, self._resident.values())) > self._most_bytes:
            self._resident.popitem(last=False)


def _size_bytes(adapter: dict[str, Factors]) -> int:
    return sum(factors.down_RI.nbytes + factors.up_OR.nbytes for factors in adapter.values())
