"""Sequences of small integers as bytes: log-spaced tokens under zstd, their low bits verbatim.

`write_stream` and `read_stream` are exact inverses. Reading checks every length against what is left and against a limit of the
caller before it allocates, and refuses bytes that a writer would not have made. A coder of our own (interleaved rANS) saved 4 to
9 % of these bytes on updates of SmolLM2-135M, which was not worth its code.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

from shoal.broadcast.codec import kernels
from shoal.errors import IntegrityError

LEVEL = 3


class Reader:
    """A cursor over received bytes that never passes their end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise corrupt("it ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, limit: int) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > limit:
                    raise corrupt(f"a count of {value} passes its limit {limit}")
                return value
        raise corrupt("a number has no end")

    def array(self, count: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.take(count), np.uint8)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_stream(values: NDArray[np.uint32]) -> bytes:
    tokens = np.empty(len(values), np.uint8)
    bits = np.empty(4 * len(values) + 8, np.uint8)
    bit_count = kernels.tokenise(values, tokens, bits)
    low = bits[: (bit_count + 7) // 8].tobytes()
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(tokens.tobytes()) if len(tokens) else b""
    return varint(len(values)) + varint(len(packed)) + packed + varint(len(low)) + low


def read_stream(reader: Reader, max_count: int) -> NDArray[np.uint32]:
    count = reader.varint(max_count)
    packed = reader.take(reader.varint(reader.left))
    tokens = np.frombuffer(decompress(packed, count), np.uint8)
    bits = reader.array(reader.varint(4 * count + 8))
    values = np.empty(count, np.uint32)
    if kernels.untokenise(tokens, bits, values) == kernels.CORRUPT:
        raise corrupt("tokens and low bits do not fit together")
    return values


def decompress(packed: memoryview, size_bytes: int) -> bytes:
    """Exactly this many bytes; no more are ever allocated."""
    if not size_bytes and not packed:
        return b""
    try:
        if zstandard.get_frame_parameters(packed).content_size != size_bytes:
            raise corrupt("a compressed part has another size than it should")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise corrupt(f"a compressed part cannot be read ({error})") from None


def corrupt(why: str) -> IntegrityError:
    return IntegrityError(f"The delta is damaged: {why}.")
