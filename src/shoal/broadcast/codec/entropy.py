"""Sequences of small integers as bytes: log-spaced tokens under rANS, their low bits verbatim.

`write_stream` and `read_stream` are exact inverses. Reading checks every length against what is left and against a limit of the
caller before it allocates, and refuses bytes that a writer would not have made.
"""

import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.codec import kernels
from shoal.errors import IntegrityError

TOTAL = 1 << kernels.SCALE_BITS
PLAIN, CODED = 0, 1


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
    plain = bytes([PLAIN]) + tokens.tobytes()
    coded = bytes([CODED]) + _encode_tokens(tokens) if len(tokens) else plain
    return varint(len(values)) + min(plain, coded, key=len) + varint(len(low)) + low


def read_stream(reader: Reader, max_count: int) -> NDArray[np.uint32]:
    count = reader.varint(max_count)
    mode = reader.byte()
    if mode == PLAIN:
        tokens = reader.array(count)
    elif mode == CODED:
        tokens = _decode_tokens(reader, count)
    else:
        raise corrupt(f"there is no stream mode {mode}")
    bits = reader.array(reader.varint(4 * count + 8))
    values = np.empty(count, np.uint32)
    if kernels.untokenise(tokens, bits, values) == kernels.CORRUPT:
        raise corrupt("tokens and low bits do not fit together")
    return values


def normalise(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Frequencies that sum to the scale of the coder, none of a used symbol zero."""
    frequencies = np.where(counts > 0, np.maximum(1, counts * TOTAL // counts.sum()), 0)
    excess = int(frequencies.sum()) - TOTAL
    while excess > 0:
        largest = int(np.argmax(frequencies))
        taken = min(excess, int(frequencies[largest]) // 2)
        frequencies[largest] -= taken
        excess -= taken
    frequencies[int(np.argmax(frequencies))] -= excess
    return frequencies


def _encode_tokens(tokens: NDArray[np.uint8]) -> bytes:
    frequencies = normalise(np.bincount(tokens, minlength=256))
    words = np.empty(len(tokens) + 8, np.uint16)
    first = kernels.rans_encode(tokens, frequencies, _starts(frequencies), words)
    used = np.packbits(frequencies > 0).tobytes()
    table = b"".join(varint(int(frequency)) for frequency in frequencies[frequencies > 0])
    return used + table + varint(len(words) - first) + words[first:].astype("<u2").tobytes()


def _decode_tokens(reader: Reader, count: int) -> NDArray[np.uint8]:
    used = np.unpackbits(reader.array(32)).astype(bool)
    frequencies = np.zeros(256, np.int64)
    frequencies[used] = [reader.varint(TOTAL) for _ in range(int(used.sum()))]
    if frequencies.sum() != TOTAL or (frequencies[used] == 0).any():
        raise corrupt("the frequencies of a stream do not add up")
    words = np.frombuffer(reader.take(2 * reader.varint(count + 8)), "<u2").astype(np.uint16)
    slots = np.repeat(np.arange(256, dtype=np.uint8), frequencies)
    tokens = np.empty(count, np.uint8)
    if kernels.rans_decode(words, frequencies, _starts(frequencies), slots, tokens) == kernels.CORRUPT:
        raise corrupt("an entropy-coded stream does not end where it should")
    return tokens


def _starts(frequencies: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(frequencies)[:-1]])


def corrupt(why: str) -> IntegrityError:
    return IntegrityError(f"The delta is damaged: {why}.")
