"""Parse page headers of Parquet that may be damaged: structs in Thrift's compact protocol.

No checksum covers a header. So, unlike `rollout.compact_thrift`, which parses what was just made,
this takes only what headers hold: no lists, numbers and structs of bounded size, nothing that a
flipped bit could make endless.
"""

from __future__ import annotations

from typing import Any, Final

from rollout.compact_thrift import read_integer, read_varint

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 8, 12
_MOST_NESTED: Final = 3


def read_struct(data: memoryview, place: int, nested: int = 0) -> tuple[dict[int, Any], int]:
    """Parse a struct.

    Args:
        data: bytes that hold it.
        place: where it begins.
        nested: how many structs it lies in.

    Returns:
        Its fields by number, and where it ends.

    Raises:
        IndexError: the bytes end before it does.
        KeyError: no header of a page looks like that.
    """
    fields: dict[int, Any] = {}
    number = 0
    while (byte := data[place]) != 0:
        place += 1
        kind = byte & 0x0F
        if byte >> 4:
            number += byte >> 4
        else:
            number, place = read_integer(data, place)
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        elif kind == _BYTE:
            fields[number], place = data[place], place + 1
        elif kind in (_I16, _I32, _I64):
            fields[number], place = read_integer(data, place)
        elif kind == _BINARY:
            size, place = read_varint(data, place)
            fields[number], place = bytes(data[place : place + size]), place + size
        elif kind == _STRUCT and nested < _MOST_NESTED:
            fields[number], place = read_struct(data, place, nested + 1)
        else:
            raise KeyError(kind)
    return fields, place + 1
