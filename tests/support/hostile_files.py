"""Hostile rollout files by number: the same number always gives the same bytes.

A good file is taken apart into its metadata (typed Thrift trees) and its pages, something in it is made to lie, and it is put
together again, so that most cases get past the first checks: counts, sizes, offsets, types, levels, compressed bodies. The rest are
cuts, flips, splices and noise. `python -m protocol.hostile FIRST STOP STRIDE` reads them with bounded memory and says how it went.
"""

import dataclasses
import json
import os
import random
import resource
import signal
import struct
import sys
import tracemalloc
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from shoal.protocol.rollouts import Rollout, RolloutFileError, RolloutLimits, read_rollouts, write_rollouts
from support.samples import descriptor, header, rollout

TRUE, FALSE, BYTE, INT16, INT32, INT64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
INTS = (INT16, INT32, INT64)
MAGIC = b"PAR1"
LIMITS = RolloutLimits.of(descriptor())
GOOD = write_rollouts(header(), [rollout(group, sample) for group in range(2) for sample in range(2)])
NUMBERS = (0, 1, -1, 2, 3, 7, 40, 255, 4096, 2**15, 5_000_000, 2**31 - 1, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63))
BOMB_BYTES = (1 << 14, 1 << 20, 1 << 24, 1 << 26)
BOMB_WAYS = 5
ROWS = 5_000_000
BYTES_OF_STRUCTURE = 128
"""What one byte of metadata may become in memory: an empty struct is a dictionary."""
SPARE_ADDRESS_SPACE = 192 << 20
HANGS_AFTER_S = 30
CALLS_PER_BYTE = 40
WORK_COUNTED_EVERY = 7


class Node(NamedTuple):
    """A Thrift value with its type: structs are {number: node}, lists (type of elements, nodes)."""

    kind: int
    value: Any


def load(data: bytes, position: int, kind: int = STRUCT) -> tuple[Node, int]:
    if kind in INTS:
        number, position = _varint(data, position)
        return Node(kind, (number >> 1) ^ -(number & 1)), position
    if kind == BINARY:
        size, position = _varint(data, position)
        return Node(kind, data[position : position + size]), position + size
    if kind in (TRUE, FALSE):
        return Node(kind, None), position
    if kind == LIST:
        lead, position = data[position], position + 1
        count, position = (lead >> 4, position) if lead >> 4 < 15 else _varint(data, position)
        nodes = []
        for _ in range(count):
            node, position = load(data, position, lead & 15)
            nodes.append(node)
        return Node(LIST, (lead & 15, nodes)), position
    assert kind == STRUCT, kind
    fields, number = {}, 0
    while (lead := data[position]) & 15:
        number, position = number + (lead >> 4), position + 1
        fields[number], position = load(data, position, lead & 15)
    return Node(STRUCT, fields), position + 1


def emit(node: Node) -> bytes:
    if node.kind in INTS:
        return _spelled((node.value << 1) ^ (node.value >> 63))
    if node.kind == BINARY:
        return _spelled(len(node.value)) + bytes(node.value)
    if node.kind == LIST:
        kind, nodes = node.value
        lead = bytes([len(nodes) << 4 | kind]) if len(nodes) < 15 else bytes([0xF0 | kind]) + _spelled(len(nodes))
        return lead + _emit_all(nodes)
    if node.kind != STRUCT:
        return b""
    parts, before = [], 0
    for number, child in node.value.items():
        gap, before = number - before, number
        lead = bytes([gap << 4 | child.kind]) if 0 < gap < 16 else bytes([child.kind]) + _spelled(number << 1)
        parts.append(lead + emit(child))
    return b"".join(parts) + b"\0"


def _emit_all(nodes: list[Node]) -> bytes:
    if len(nodes) > 1 and nodes[0] is nodes[-1]:
        return emit(nodes[0]) * len(nodes)
    return b"".join(map(emit, nodes))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if data[position - 1] < 0x80:
            return value, position


def _spelled(value: int) -> bytes:
    parts, left = [], value & (1 << 64) - 1
    while left >= 0x80:
        parts.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*parts, left])


class Page(NamedTuple):
    header: Node
    body: bytes


class Pieces:
    """A file taken apart; `file()` puts it together again, with right offsets and sizes unless others are given."""

    def __init__(self) -> None:
        start = len(GOOD) - 8 - int.from_bytes(GOOD[-8:-4], "little")
        self.footer, _ = load(GOOD, start)
        (group,) = self.footer.value[4].value[1]
        self.metas: list[dict[int, Node]] = [column.value[3].value for column in group.value[1].value[1]]
        self.columns = [[self._page(meta)] for meta in self.metas]
        self.keeps_offsets = False

    def _page(self, meta: dict[int, Node]) -> Page:
        start = meta[9].value
        head, body_start = load(GOOD, start)
        return Page(head, GOOD[body_start : start + meta[7].value])

    def file(self) -> bytes:
        data = bytearray(MAGIC)
        for meta, pages in zip(self.metas, self.columns, strict=True):
            start = len(data)
            spelled = {id(page): emit(page.header) + page.body for page in pages}
            data += b"".join(spelled[id(page)] for page in pages)
            if not self.keeps_offsets:
                meta[9], meta[7] = Node(INT64, start), Node(INT64, len(data) - start)
        footer = emit(self.footer)
        return bytes(data) + footer + struct.pack("<I", len(footer)) + MAGIC


def nodes_of(node: Node, *kinds: int) -> list[tuple[Any, Any]]:
    """Where nodes of these kinds hang: container and place in it."""
    children: list[tuple[Any, Any, Node]] = []
    if node.kind == STRUCT:
        children = [(node.value, number, child) for number, child in node.value.items()]
    elif node.kind == LIST:
        children = [(node.value[1], index, child) for index, child in enumerate(node.value[1])]
    found = [(holder, place) for holder, place, child in children if not kinds or child.kind in kinds]
    return found + [one for _, _, child in children for one in nodes_of(child, *kinds)]


def some_tree(pieces: Pieces, chance: random.Random) -> Node:
    return pieces.footer if chance.random() < 0.5 else chance.choice(pieces.columns)[0].header


# One function per way of lying


def truncated(chance: random.Random) -> bytes:
    return GOOD[: chance.randrange(len(GOOD))]


def flipped(chance: random.Random) -> bytes:
    data = bytearray(GOOD)
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def spliced(chance: random.Random) -> bytes:
    first, second = chance.randrange(len(GOOD)), chance.randrange(len(GOOD))
    filling = chance.choice(
        (b"", chance.randbytes(chance.randrange(64)), GOOD[:: chance.choice((1, 2, -1))], bytes(1 << 16))
    )
    return GOOD[:first] + filling + GOOD[second:]


def noise(chance: random.Random) -> bytes:
    body = chance.randbytes(chance.randrange(2000))
    return chance.choice((body, MAGIC + body + struct.pack("<I", chance.randrange(len(body) + 9)) + MAGIC))


def wrong_number(chance: random.Random) -> bytes:
    pieces = Pieces()
    pieces.keeps_offsets = chance.random() < 0.5
    for _ in range(chance.choice((1, 1, 2, 3))):
        holder, place = chance.choice(nodes_of(some_tree(pieces, chance), *INTS))
        change = chance.choice((chance.choice(NUMBERS), holder[place].value + chance.choice((-1, 1, 8))))
        holder[place] = Node(INT64 if abs(change) > 2**31 else holder[place].kind, change)
    return pieces.file()


def wrong_text(chance: random.Random) -> bytes:
    pieces = Pieces()
    holder, place = chance.choice(nodes_of(pieces.footer, BINARY))
    texts = (b"", b"\xff\xfe", b"x" * 50_000, b"x" * 70_000, b'{"format": 1}', b"task_id", chance.randbytes(40))
    holder[place] = Node(BINARY, chance.choice(texts))
    return pieces.file()


def wrong_type(chance: random.Random) -> bytes:
    pieces = Pieces()
    holder, place = chance.choice(nodes_of(some_tree(pieces, chance)))
    deep = Node(INT32, 1)
    for _ in range(chance.choice((3, 60))):
        deep = Node(STRUCT, {1: deep})
    others = (Node(INT32, 6), Node(BINARY, b"text"), Node(TRUE, None), Node(LIST, (INT32, [])), Node(STRUCT, {}), deep)
    holder[place] = chance.choice(others)
    return pieces.file()


def wrong_structure(chance: random.Random) -> bytes:
    """Fields dropped, lists repeated: more columns, row groups, schema elements or none."""
    pieces = Pieces()
    pieces.keeps_offsets = True
    if chance.random() < 0.5:
        holder, place = chance.choice(nodes_of(some_tree(pieces, chance)))
        del holder[place]
    else:
        holder, place = chance.choice(nodes_of(pieces.footer, LIST))
        kind, nodes = holder[place].value
        count = chance.choice((0, 2, 50, 2000))
        holder[place] = Node(LIST, (kind, (nodes * count)[:20_000]))
    return pieces.file()


def swollen_metadata(chance: random.Random) -> bytes:
    """A footer or a page header full of what nobody asked for."""
    pieces = Pieces()
    count = chance.choice((1000, 20_000, 60_000))
    filling = chance.choice((Node(STRUCT, {}), Node(INT32, 1), Node(BINARY, b""), Node(LIST, (STRUCT, []))))
    some_tree(pieces, chance).value[90] = Node(LIST, (filling.kind, [filling] * count))
    return pieces.file()


@lru_cache(maxsize=64)
def bomb(size_bytes: int, way: int) -> bytes:
    """N zeros, compressed: plainly, without their size, in two frames, in a large window, behind a frame to be skipped."""
    zeros = bytes(size_bytes)
    if way == 1:
        return zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    if way == 2:
        return zstandard.ZstdCompressor().compress(zeros[: size_bytes // 2]) * 2
    if way == 3:
        parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=False)
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return stream.compress(zeros) + stream.flush()
    if way == 4:
        return struct.pack("<II", 0x184D2A50, 8) + bytes(8) + zstandard.ZstdCompressor().compress(zeros)
    return zstandard.ZstdCompressor().compress(zeros)


def compression_bomb(chance: random.Random) -> bytes:
    pieces = Pieces()
    size_bytes, column = chance.choice(BOMB_BYTES), chance.randrange(len(pieces.columns))
    body = bomb(size_bytes, chance.randrange(BOMB_WAYS))
    claimed = chance.choice((size_bytes, size_bytes, 16, 4096, 2**31 - 1))
    return _with_page(pieces, column, body, uncompressed=claimed, values=chance.choice((0, 4, 160, size_bytes // 4)))


def level_bomb(chance: random.Random) -> bytes:
    """Run-length levels that promise more than there is, in a list column."""
    pieces = Pieces()
    values = chance.choice((4, 160, 161, ROWS, 2**31 - 1))
    runs = (_spelled(values << 1) + b"\1", _spelled(values << 1) + b"\0", b"\3\xff" * 50, b"\0\1" * 100, b"\2\1" * 160)
    levels = chance.choice((*runs, b"\xff" * 6, b"\xfe\xff\xff\xff\x0f\1", b"\2\2", b"", chance.randbytes(20)))
    sizes = (len(levels), len(levels), 0, 2**31, 2**32 - 1)
    part = struct.pack("<I", chance.choice(sizes)) + levels
    body = part + chance.choice((part, b"\2\0\0\0\x08\1", b"")) + bytes(chance.choice((0, 16, 640)))
    return _with_page(pieces, chance.choice((3, 4, 5, 11)), _packed(body), uncompressed=len(body), values=values)


def string_bomb(chance: random.Random) -> bytes:
    """Byte strings whose lengths lie."""
    pieces = Pieces()
    lengths = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 100_000, 1 << 20)
    body = b"".join(struct.pack("<I", chance.choice(lengths)) + b"x" * chance.randrange(4) for _ in range(4))
    body += b"y" * chance.choice((0, 1 << 12, 1 << 20))
    return _with_page(pieces, chance.choice((0, 10)), _packed(body), uncompressed=len(body), values=4)


def millions_of_rows(chance: random.Random) -> bytes:
    pieces = Pieces()
    pieces.footer.value[3] = Node(INT64, chance.choice((ROWS, 4, LIMITS.rows + 1)))
    pieces.footer.value[4].value[1][0].value[3] = Node(INT64, pieces.footer.value[3].value)
    column, size_bytes = chance.randrange(len(pieces.columns)), 4 * ROWS
    return _with_page(pieces, column, bomb(size_bytes, 0), uncompressed=size_bytes, values=ROWS)


def dictionary_bomb(chance: random.Random) -> bytes:
    """A small dictionary that is referred to a million times."""
    pieces = Pieces()
    column = chance.randrange(len(pieces.columns))
    text = struct.pack("<I", 1 << 16) + bytes(1 << 16)
    numbers = {1: Node(INT32, 2), 2: Node(INT32, len(text)), 3: Node(INT32, len(_packed(text)))}
    head = Node(STRUCT, numbers | {7: Node(STRUCT, {1: Node(INT32, 1), 2: Node(INT32, 0)})})
    references = _packed(b"\1" + _spelled(1_000_000 << 1) + b"\0")
    _set_page(pieces, column, references, uncompressed=7, values=1_000_000)
    pieces.columns[column][0].header.value[5].value[2] = Node(INT32, chance.choice((0, 2, 8)))
    pieces.columns[column].insert(0, Page(head, _packed(text)))
    if chance.random() < 0.5:
        pieces.metas[column][11] = Node(INT64, 4)
    return pieces.file()


def overlapping(chance: random.Random) -> bytes:
    """Many columns that lie on the same bytes, or inside one another."""
    data = Pieces()
    data.file()
    data.keeps_offsets = True
    metas = data.metas
    source = chance.choice(metas)
    for meta in chance.sample(metas, chance.randrange(1, len(metas))):
        meta[9] = Node(INT64, source[9].value + chance.choice((0, 0, 1)))
        meta[7] = Node(INT64, source[7].value * chance.choice((1, 1, 2)))
    return data.file()


def many_pages(chance: random.Random) -> bytes:
    pieces = Pieces()
    column = chance.randrange(len(pieces.columns))
    _set_page(pieces, column, b"", uncompressed=0, values=0)
    if chance.random() < 0.3:
        pieces.columns[column][0].header.value[90] = Node(BINARY, bytes(2000))
    pieces.columns[column] *= chance.choice((10, 5000))
    return pieces.file()


def _packed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def _with_page(pieces: Pieces, column: int, body: bytes, *, uncompressed: int, values: int) -> bytes:
    _set_page(pieces, column, body, uncompressed=uncompressed, values=values)
    return pieces.file()


def _set_page(pieces: Pieces, column: int, body: bytes, *, uncompressed: int, values: int) -> None:
    head = pieces.columns[column][0].header
    head.value[2], head.value[3] = Node(INT32, uncompressed), Node(INT32, len(body))
    head.value[5].value[1] = Node(INT32, values)
    pieces.metas[column][5] = Node(INT64, values)
    pieces.columns[column] = [Page(head, body)]


LIGHT: tuple[Callable[[random.Random], bytes], ...] = (
    *(truncated, flipped, spliced, noise, wrong_number, wrong_number, wrong_text, wrong_type, wrong_structure),
    *(compression_bomb, level_bomb, string_bomb, millions_of_rows, dictionary_bomb, overlapping),
)
WAYS = (*LIGHT, swollen_metadata, *LIGHT, many_pages, *LIGHT)


def hostile_file(number: int) -> tuple[str, bytes]:
    """The first ones are the good file cut at each offset; then each way of lying in turn."""
    if number < len(GOOD):
        return "truncated", GOOD[:number]
    way = WAYS[number % len(WAYS)]
    return way.__name__, way(random.Random(number))


# Reading them with bounded means


def largest_honest_peak() -> int:
    """What the largest file that the limits allow takes in memory."""
    row = dataclasses.replace(
        rollout(),
        task_id="t" * 200,
        input_tokens=[2**31 - 1] * LIMITS.prompt_tokens,
        output_tokens=list(range(10**6, 10**6 + LIMITS.output_tokens)),
        segment_lengths=[LIMITS.output_tokens],
        output_logprobs=[-1.5] * LIMITS.output_tokens,
        proofs=[bytes(258)] * (LIMITS.proof_bytes // 258),
    )
    data = write_rollouts(header(), [row] * LIMITS.rows)
    return peak_of(data)[1]


def peak_of(data: bytes) -> tuple[list[Rollout] | None, int]:
    """The rows, none if the file is refused, and the most memory that was taken meanwhile."""
    tracemalloc.start()
    try:
        rows: list[Rollout] | None = read_rollouts(data, LIMITS)[1]
    except RolloutFileError:
        rows = None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return rows, peak


def calls_of(data: bytes) -> int:
    """Function calls of a reading: work, counted so that a slow machine changes nothing."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        read_rollouts(data, LIMITS)
    except RolloutFileError:
        pass
    finally:
        sys.setprofile(None)
    return calls


def main(first: int, stop: int, stride: int) -> None:
    honest = largest_honest_peak()
    # What the files are made of is made before memory is bounded.
    bombs = [bomb(size_bytes, way) for size_bytes in (*BOMB_BYTES, 4 * ROWS) for way in range(BOMB_WAYS)]
    assert sum(map(len, bombs)) < 1 << 20
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_ADDRESS_SPACE, used + SPARE_ADDRESS_SPACE))
    outcome: dict[str, Any] = {"refused": 0, "read": [], "too_large": [], "too_much_work": [], "ways": {}}
    for number in range(first, stop, stride):
        signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER_S)  # of this process's own time, however busy the machine
        way, data = hostile_file(number)
        rows, peak = peak_of(data)
        outcome["ways"][way] = outcome["ways"].get(way, 0) + 1
        if rows is None:
            outcome["refused"] += 1
        else:
            outcome["read"].append(number)
        if peak > 2 * honest + BYTES_OF_STRUCTURE * len(data):
            outcome["too_large"].append((number, way, peak))
        if number % WORK_COUNTED_EVERY == 0 and (calls := calls_of(data)) > 20_000 + CALLS_PER_BYTE * len(data):
            outcome["too_much_work"].append((number, way, calls))
    print(json.dumps(outcome | {"honest_peak_bytes": honest}), flush=True)
    os._exit(0)  # no library needs to tidy up, and some cannot without memory


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
