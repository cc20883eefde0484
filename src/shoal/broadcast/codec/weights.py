"""The numbers of a model where they lie: views of its tensors as bit patterns, piece by piece, without a copy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.codec.pieces import LAYOUTS, Piece, offsets
from shoal.broadcast.manifest import TensorEntry

Bits = NDArray[np.uint16] | NDArray[np.uint32]


class Weights:
    """Tensors one after the other in memory (usually a mapped file), as bit patterns."""

    def __init__(self, tensors: Sequence[TensorEntry], data: memoryview) -> None:
        self.tensors = tensors
        self._data = data
        self._offsets = offsets(tensors)
        self._by_name = {tensor.name: number for number, tensor in enumerate(tensors)}

    def bits(self, piece: Piece) -> Bits:
        tensor = self.tensors[piece.tensor]
        start = self._offsets[piece.tensor] + piece.start * piece.item_bytes
        window = self._data[start : start + piece.size_bytes]
        return np.frombuffer(window, LAYOUTS[tensor.dtype].storage)

    def same_piece(self, tensor: TensorEntry, piece: Piece) -> Bits | None:
        """The numbers at the same place of the tensor with the same name, if it has the same type and shape."""
        number = self._by_name.get(tensor.name)
        if number is None:
            return None
        mine = self.tensors[number]
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            return None
        return self.bits(Piece(number, piece.start, piece.count, piece.item_bytes))
