"""Parse and write Thrift structs in the compact protocol, as Parquet's footer and headers are.

A struct keeps the types of its fields, so that what was parsed is written as it was.
"""

from __future__ import annotations

from typing import Any, Final

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _, STRUCT = range(1, 13)

Struct = dict[int, tuple[int, Any]]
"""Type and value of each field by its number. A list's value is the type of its elements, and they;
a double's its 8 bytes."""

_INTEGERS: Final = (I16, I32, I64)
_MOST_VARINT_BITS: Final = 63
_LONG_LIST: Final = 15  # and more elements have their number behind the type
_LONG_STEP: Final = 15  # of field numbers, and more


def read_struct(data: bytes, place: int = 0) -> tuple[Struct, int]:
    """Parse a struct.

    Args:
        data: bytes that hold it.
        place: where it begins.

    Returns:
        The struct, and where it ends.

    Raises:
        IndexError: the bytes end before it does.
        KeyError: a number that does not end.
        ValueError: a type that Parquet does not use.
    """
    fields: Struct = {}
    number = 0
    while (byte := data[place]) != 0:
        place += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, place = read_integer(data, place)
        kind = byte & 0x0F
        if kind in (TRUE, FALSE):
            fields[number] = kind, kind == TRUE
        else:
            value, place = _read_value(data, place, kind)
            fields[number] = kind, value
    return fields, place + 1


def write_struct(fields: Struct) -> bytes:
    """Write a struct.

    Args:
        fields: by number.
    """
    out = bytearray()
    last = 0
    for number in sorted(fields):
        kind, value = fields[number]
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        step = number - last
        out += bytes([step << 4 | kind]) if step <= _LONG_STEP else bytes([kind]) + _zigzag(number)
        last = number
        if kind not in (TRUE, FALSE):
            out += _write_value(kind, value)
    return bytes(out) + b"\0"


def varint(value: int) -> bytes:
    """Write a number that is not negative, seven bits a byte."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_integer(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """Parse a signed number; arguments and errors as `read_varint` has them."""
    value, place = read_varint(data, place)
    return (value >> 1) ^ -(value & 1), place


def read_varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """Parse a number of seven bits a byte.

    Args:
        data: bytes that hold it.
        place: where it begins.

    Returns:
        The number, and where it ends.

    Raises:
        IndexError: the bytes end before it does.
        KeyError: it has more bits than any number of the protocol.
    """
    value = shift = 0
    while shift <= _MOST_VARINT_BITS:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise KeyError("a number that does not end")


def _read_value(data: bytes, place: int, kind: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return read_integer(data, place)
    if kind == BYTE:
        return data[place], place + 1
    if kind == DOUBLE:
        return data[place : place + 8], place + 8
    if kind == BINARY:
        size, place = read_varint(data, place)
        return data[place : place + size], place + size
    if kind == STRUCT:
        return read_struct(data, place)
    if kind != LIST:
        raise ValueError(f"type {kind} at byte {place}")
    element, count = data[place] & 0x0F, data[place] >> 4
    place += 1
    if count == _LONG_LIST:
        count, place = read_varint(data, place)
    values = []
    for _ in range(count):
        # a bool among elements takes a byte
        value, place = _read_value(data, place, BYTE if element in (TRUE, FALSE) else element)
        values.append(value)
    return (element, values), place


def _write_value(kind: int, value: Any) -> bytes:
    if kind in _INTEGERS:
        return _zigzag(value)
    if kind == BYTE:
        return bytes([value])
    if kind == DOUBLE:
        return bytes(value)
    if kind == BINARY:
        return varint(len(value)) + bytes(value)
    if kind == STRUCT:
        return write_struct(value)
    if kind != LIST:
        raise ValueError(f"type {kind}")
    element, values = value
    count = len(values)
    head = bytes([min(count, _LONG_LIST) << 4 | element])
    head += varint(count) if count >= _LONG_LIST else b""
    of = BYTE if element in (TRUE, FALSE) else element
    return head + b"".join(_write_value(of, item) for item in values)


def _zigzag(value: int) -> bytes:
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)
