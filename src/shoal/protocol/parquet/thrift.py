"""Reads Thrift's compact encoding, the language of parquet metadata, from untrusted bytes.

A struct becomes a dict from field number to value. Every length is checked against what is left, nesting is bounded, a field
given twice is refused: whatever the bytes say, the answer is a value no larger than they are or ThriftError.
"""

import struct
from typing import TypeAlias

from shoal.errors import IntegrityError

Value: TypeAlias = "bool | int | float | bytes | list[Value] | Struct"
Struct: TypeAlias = "dict[int, Value]"

MAX_DEPTH = 10
MAX_VARINT_BYTES = 10
STOP, TRUE, FALSE, BYTE, INT16, INT32, INT64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(13)
INT_BITS = {INT16: 16, INT32: 32, INT64: 64}


class ThriftError(IntegrityError):
    """A Parquet footer that cannot be read within its limits."""

    code = "thrift"


class ThriftReader:
    def __init__(self, data: memoryview, position: int = 0) -> None:
        self._data = bytes(data)
        self.position = position

    def starts_with(self, known: bytes) -> bool:
        return self._data.startswith(known)

    @property
    def behind(self) -> bytes:
        """What has been read."""
        return self._data[: self.position]

    def first_fields(self, count: int) -> Struct:
        """Fields 1 to `count` of a struct, each given in short form and in order; `struct` reads what follows them."""
        fields: Struct = {}
        for number in range(1, count + 1):
            lead = self._byte()
            if lead >> 4 != 1 or lead & 0x0F <= FALSE:
                raise ThriftError(f"Field {number} is missing.")
            fields[number] = self._value(lead & 0x0F, 0)
        return fields

    def struct(self, depth: int = 0, begun: "Struct | None" = None) -> Struct:
        """Metadata is mostly small numbers, short texts and lists of structs: those are read here, without a call for each.

        `begun` are fields 1 to n, if they were read before.
        """
        fields: Struct = dict(begun or {})
        data, at, number = self._data, self.position, len(fields)
        try:
            while kind := (lead := data[at]) & 0x0F:
                at += 1
                number += lead >> 4
                if lead < 0x10:
                    number, at = self._int_at(at, 16)
                if number in fields:
                    raise ThriftError(f"Field {number} is given twice.")
                size = data[at] if kind > FALSE else 0
                if kind in INT_BITS:
                    if size < 0x80:
                        fields[number], at = (size >> 1) ^ -(size & 1), at + 1
                    else:
                        fields[number], at = self._int_at(at, INT_BITS[kind])
                elif kind == BINARY and size < 0x80 and at + size < len(data):
                    fields[number], at = data[at + 1 : at + 1 + size], at + 1 + size
                elif kind <= FALSE:
                    fields[number] = kind == TRUE
                else:
                    self.position = at
                    fields[number] = self._value(kind, depth)
                    at = self.position
        except IndexError:
            raise ThriftError("The metadata ends too early.") from None
        self.position = at + 1
        return fields

    def _int_at(self, position: int, bits: int) -> tuple[int, int]:
        self.position = position
        return self._int(bits), self.position

    def _value(self, kind: int, depth: int) -> Value:
        if kind in INT_BITS:
            return self._int(INT_BITS[kind])
        if kind == BINARY:
            return self._take(self._varint(32))
        if depth >= MAX_DEPTH:
            raise ThriftError(f"Values are nested deeper than {MAX_DEPTH}.")
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, SET):
            return self._list(depth + 1)
        if kind in (TRUE, FALSE, BYTE):  # inside lists a flag is a byte
            return self._byte()
        if kind == DOUBLE:
            return float(struct.unpack("<d", self._take(8))[0])
        raise ThriftError(f"A value is of the unknown type {kind}.")

    def _list(self, depth: int) -> list[Value]:
        lead = self._byte()
        count = lead >> 4 if lead >> 4 < 15 else self._varint(32)
        if count > len(self._data) - self.position:
            raise ThriftError("A list is longer than the bytes that hold it.")
        kind = lead & 0x0F
        if kind == STRUCT and depth < MAX_DEPTH:
            return [self.struct(depth + 1) for _ in range(count)]
        return [self._value(kind, depth) for _ in range(count)]

    def _int(self, bits: int) -> int:
        value = self._byte()
        if value >= 0x80:  # most numbers take one byte
            self.position -= 1
            value = self._varint(bits)
        return (value >> 1) ^ -(value & 1)

    def _varint(self, bits: int) -> int:
        value = shift = 0
        for part in self._data[self.position : self.position + MAX_VARINT_BYTES]:
            self.position += 1
            value |= (part & 0x7F) << shift
            if value >= 1 << bits:
                break
            if part < 0x80:
                return value
            shift += 7
        else:
            if shift < 7 * MAX_VARINT_BYTES:
                raise ThriftError("The metadata ends too early.")
        raise ThriftError(f"A number has more than {bits} bits.")

    def _byte(self) -> int:
        try:
            byte = self._data[self.position]
        except IndexError:
            raise ThriftError("The metadata ends too early.") from None
        self.position += 1
        return byte

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self.position:
            raise ThriftError("The metadata ends too early.")
        self.position += count
        return self._data[self.position - count : self.position]
