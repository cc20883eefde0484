"""Weights of several versions that an engine holds beside each other: changing between them moves pointers, no bytes.

A version is known by the identity of its files. All versions have the same tensors, so one version is a list of storages, and the
live tensors are pointed at those of the version in use. As many versions stay as fit into a share of the free memory; beyond it
the one that was used longest ago is overwritten, never the one in use.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.policy.directory import Identity
from shoal.policy.memory import available_bytes

MEMORY_SHARE = 0.5
"""Of the memory that is free before a further version is kept."""

Storages = list[torch.UntypedStorage]


class ResidentWeights:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` are all that hold weights, views included: whatever is left out would keep the old ones."""
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        places: dict[int, int] = {}
        self._current: Storages = []
        self._views: list[tuple[int, int, torch.Size, tuple[int, ...]]] = []
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in places:
                places[storage.data_ptr()] = len(self._current)
                self._current.append(storage)
            place = places[storage.data_ptr()]
            self._views.append((place, int(tensor.storage_offset()), tensor.shape, tensor.stride()))
        self._versions: OrderedDict[Identity, Storages] = OrderedDict()
        self._in_use: Identity | None = None

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def version_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._current)

    def use(self, identity: Identity, read: Callable[[], None]) -> None:
        """Compute with that version; `read` copies it into live tensors if it is not here. On failure the one in use stays."""
        if identity not in self._versions:
            self._read(identity, read)
        self._versions.move_to_end(identity)
        self._point_at(self._versions[identity])
        self._in_use = identity

    def _read(self, identity: Identity, read: Callable[[], None]) -> None:
        before, target = self._current, self._memory_for_one()
        self._point_at(target)
        try:
            read()
        except BaseException:
            self._point_at(before)
            raise
        self._versions[identity] = target

    def _memory_for_one(self) -> Storages:
        """Memory for one more version: of its own, or that of the one that was used longest ago."""
        if self._in_use is None:
            return self._current  # the first version takes the memory that the model was built with
        if self.version_bytes <= MEMORY_SHARE * available_bytes(self._tensors[0].device):
            return [_like(storage) for storage in self._current]
        oldest = next((known for known in self._versions if known != self._in_use), self._in_use)
        return self._versions.pop(oldest, self._current)

    @torch.inference_mode()
    def _point_at(self, storages: Storages) -> None:
        self._current = storages
        for tensor, (place, offset, shape, stride) in zip(self._tensors, self._views, strict=True):
            tensor.set_(storages[place], offset, shape, stride)


def _like(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
