"""Loops that numpy cannot express, compiled once and run without the interpreter lock.

Every kernel checks its cursors, because compiled code does not: a payload that lies about its lengths ends in a negative return
value, never outside an array. Compilation is cached beside this file.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from shoal.broadcast.codec.pieces import Bits

Kernel = TypeVar("Kernel", bound=Callable[..., object])
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]
Integer = int | np.int64
Word = np.uint16 | np.uint32

CORRUPT = -1
GROUP = 16
SAMPLED = 64
CHUNK = 4096
CONTEXTS = 16

ONE = np.uint64(1)
EVERY_MARK = np.uint64(0x0101010101010101)

DIRECT = 16
MANTISSA_BITS = 3
DIRECT_BITS = 4


class Numbers(NamedTuple):
    """How the numbers lie in their bits, and below which magnitude (`cut`) they change often."""

    width: int
    exponent_shift: int
    magnitude: Word
    cut: Word


class Collected(NamedTuple):
    """What `collect` found. `cursors` (dense items, sparse items, numbers since the last change) run on between pieces."""

    dense: U32
    contexts: U8
    gaps: U32
    steps: U32
    cursors: I64


def kernel(function: Kernel) -> Kernel:
    return cast(Kernel, numba.njit(nogil=True, cache=True)(function))


@kernel
def tokenise(values: U32, tokens: U8, bits: U8) -> int:
    """Small values are their own token; larger ones are octave and three leading bits, the rest goes into `bits`.

    Returns how many bits were written; `bits` must hold four bytes per value and eight more.
    """
    buffer = np.uint64(0)
    pending = 0
    at = 0
    for index in range(len(values)):
        value = np.uint64(values[index])
        if value < DIRECT:
            tokens[index] = value
            continue
        octave = DIRECT_BITS
        while value >> np.uint64(octave + 1):
            octave += 1
        extra = octave - MANTISSA_BITS
        leading = (value >> np.uint64(extra)) & np.uint64((1 << MANTISSA_BITS) - 1)
        tokens[index] = DIRECT + ((octave - DIRECT_BITS) << MANTISSA_BITS) + leading
        buffer |= (value & ((np.uint64(1) << np.uint64(extra)) - np.uint64(1))) << np.uint64(pending)
        pending += extra
        while pending >= 8:
            bits[at] = buffer & np.uint64(0xFF)
            buffer >>= np.uint64(8)
            pending -= 8
            at += 1
    if pending:
        bits[at] = buffer & np.uint64(0xFF)
    return at * 8 + pending


@kernel
def untokenise(tokens: U8, bits: U8, values: U32) -> int:
    """The values again; CORRUPT unless exactly the given bytes were used."""
    buffer = np.uint64(0)
    pending: Integer = 0
    at = 0
    for index in range(len(tokens)):
        token = np.int64(tokens[index])
        if token < DIRECT:
            values[index] = token
            continue
        octave = ((token - DIRECT) >> MANTISSA_BITS) + DIRECT_BITS
        if octave > 31:
            return CORRUPT
        extra = octave - MANTISSA_BITS
        while pending < extra:
            if at >= len(bits):
                return CORRUPT
            buffer |= np.uint64(bits[at]) << np.uint64(pending)
            pending += 8
            at += 1
        leading = np.uint64((1 << MANTISSA_BITS) | ((token - DIRECT) & ((1 << MANTISSA_BITS) - 1)))
        low = buffer & ((np.uint64(1) << np.uint64(extra)) - np.uint64(1))
        values[index] = (leading << np.uint64(extra)) | low
        buffer >>= np.uint64(extra)
        pending -= extra
    return 0 if at == len(bits) and buffer == 0 else CORRUPT


@kernel
def survey(base: Bits, new: Bits, shift: int, magnitude: int, members: I64, changes: I64) -> None:
    """Count members and changes per exponent of the base, on a sample of groups."""
    for start in range(0, len(base), SAMPLED * GROUP):
        for index in range(start, min(start + GROUP, len(base))):
            exponent = (base[index] & magnitude) >> shift
            members[exponent] += SAMPLED
            changes[exponent] += SAMPLED * (base[index] != new[index])


@kernel
def differ(base: Bits, new: Bits) -> bool:
    for start in range(0, len(base), CHUNK):
        changed = 0
        for index in range(start, min(start + CHUNK, len(base))):
            changed += base[index] != new[index]
        if changed:
            return True
    return False


@kernel
def sampled_changes(base: Bits, new: Bits) -> float:
    """About which share of the numbers changed."""
    seen, changed = 0, 0
    for start in range(0, len(base), SAMPLED * GROUP):
        for index in range(start, min(start + GROUP, len(base))):
            seen += 1
            changed += base[index] != new[index]
    return changed / max(seen, 1)


@kernel
def fold_step(old: Integer, new: Integer, width: int) -> Integer:
    """Signed distance between two bit patterns, in the order of the numbers that they stand for, folded to 0, 1, 2 …"""
    sign = 1 << (width - 1)
    mask = (1 << width) - 1
    old_key = old ^ mask if old & sign else old | sign
    new_key = new ^ mask if new & sign else new | sign
    step = (new_key - old_key) & mask
    if step & sign:
        return (((mask ^ step) << 1) | 1) & mask
    return step << 1


@kernel
def unfold_step(old: Integer, folded: Integer, width: int) -> Integer:
    """The bit pattern that lies the folded distance away from `old`."""
    sign = 1 << (width - 1)
    mask = (1 << width) - 1
    step = mask ^ (folded >> 1) if folded & 1 else folded >> 1
    old_key = old ^ mask if old & sign else old | sign
    key = (old_key + step) & mask
    return key ^ sign if key & sign else key ^ mask


@kernel
def mark(base: Bits, new: Bits, magnitude: Word, cut: Word, marks: U8) -> None:
    """Which numbers changed or are below `cut`. Vectorises only if the limits have the type of the numbers."""
    for index in range(len(base)):
        marks[index] = (base[index] != new[index]) | ((base[index] & magnitude) < cut)


@kernel
def lowest_mark(word: np.uint64) -> int:
    """Which of the eight marks of a word is the first, without a branch: one bit below it for each byte before it."""
    return int((((word - ONE) & EVERY_MARK & ~word) * EVERY_MARK) >> np.uint64(56))


@kernel
def collect(base: Bits, new: Bits, numbers: Numbers, out: Collected) -> None:
    """Describe one piece of a block.

    Most numbers of magnitude below the cut change, so each of them gets a folded step, with its exponent as context; of the
    others only changes are noted, each with how many numbers were passed since the last one. Eight marks are looked at in
    one go, because nearly all are zero.
    """
    shift, magnitude, cut = numbers.exponent_shift, numbers.magnitude, numbers.cut
    top = (np.int64(cut) - 1) >> shift
    words = np.zeros(CHUNK // 8, np.uint64)
    marks = words.view(np.uint8)
    dense_at, sparse_at, last = out.cursors[0], out.cursors[1], -1 - out.cursors[2]
    for start in range(0, len(base), CHUNK):
        end = min(start + CHUNK, len(base))
        marks[end - start :] = 0
        mark(base[start:end], new[start:end], magnitude, cut, marks)
        for word in range(len(words)):
            left = words[word]
            while left:
                index = start + 8 * word + lowest_mark(left)
                left &= left - ONE
                size = base[index] & magnitude
                step = fold_step(np.int64(base[index]), np.int64(new[index]), numbers.width)
                if size < cut:
                    out.dense[dense_at] = step
                    out.contexts[dense_at] = min(int(top - (np.int64(size) >> shift)), CONTEXTS - 1)
                    dense_at += 1
                else:
                    out.gaps[sparse_at] = index - last - 1
                    out.steps[sparse_at] = step
                    sparse_at += 1
                    last = index
    out.cursors[0], out.cursors[1], out.cursors[2] = dense_at, sparse_at, len(base) - 1 - last


@kernel
def patch_dense(values: Bits, numbers: Numbers, dense: U32, cursors: I64, ends: I64) -> int:
    """Move every number below the cut by its step; `cursors`, one per context, run on between pieces."""
    shift, magnitude, cut = numbers.exponent_shift, numbers.magnitude, numbers.cut
    top = (np.int64(cut) - 1) >> shift
    words = np.zeros(CHUNK // 8, np.uint64)
    marks = words.view(np.uint8)
    for start in range(0, len(values), CHUNK):
        end = min(start + CHUNK, len(values))
        marks[end - start :] = 0
        mark(values[start:end], values[start:end], magnitude, cut, marks)
        for word in range(len(words)):
            left = words[word]
            while left:
                index = start + 8 * word + lowest_mark(left)
                left &= left - ONE
                value = values[index]
                context = min(int(top - (np.int64(value & magnitude) >> shift)), CONTEXTS - 1)
                at = cursors[context]
                if at >= ends[context]:
                    return CORRUPT
                values[index] = unfold_step(np.int64(value), np.int64(dense[at]), numbers.width)
                cursors[context] = at + 1
    return 0


@kernel
def patch_sparse(values: Bits, width: int, gaps: U32, steps: U32, cursors: I64) -> None:
    """Move the changed numbers; `cursors` (next change, numbers already passed of its gap) run on between pieces."""
    at, passed = cursors[0], cursors[1]
    index = -passed
    while at < len(gaps):
        index += np.int64(gaps[at])
        if index >= len(values):
            index -= np.int64(gaps[at])
            break
        values[index] = unfold_step(np.int64(values[index]), np.int64(steps[at]), width)
        index += 1
        at += 1
    cursors[0], cursors[1] = at, len(values) - index
