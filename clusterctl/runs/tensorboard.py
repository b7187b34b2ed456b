"""Reader of the scalars in TensorBoard's event files, as PyTorch, TensorFlow and Lightning write
them.

A file is a sequence of records: a length (uint64), the length's checksum, as many bytes, and their
checksum (tensorflow/core/lib/io/record_writer.h). Each record is a protocol buffer ``Event``
(tensorflow/core/util/event.proto, framework/summary.proto, framework/tensor.proto), of which only
some fields are read. A job may write anything to the file, so reading ends at the first record that
is not an Event. Checksums are not compared because that would take minutes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

# Bytes that each record and field count in addition, as millions of records may be empty.
_COST = 64
_COST_OF_FIELD = 8
# Larger records hold images, audio or graphs.
_MAX_RECORD: Final = 1 << 18  # bytes
# Bytes before and after the content of a record.
_HEAD = 12
_TAIL = 4
_MAX_VARINT: Final = 10  # bytes
# Wire types of protocol buffers.
_VARINT = 0
_BITS64 = 1
_BYTES = 2
_BITS32 = 5
_LONGEST: Final = 8  # bytes
# Formats by TensorProto.dtype: DT_FLOAT, DT_DOUBLE.
_FORMATS: Final = {1: "<f", 2: "<d"}

# A field's number, its wire type, and its value.
_Field = tuple[int, int, int | bytes]


@dataclass(frozen=True, slots=True)
class Event:
    """Scalars (tag -> number) that a program wrote at the same time."""

    scalars: dict[str, float]
    step: int
    time: float  # Unix seconds


@dataclass(slots=True)
class ReadBudget:
    """How much more is read of what a job wrote. left: bytes. What takes more memory or time than
    its bytes costs more of them. is_exceeded: whether something was not read for want of it.
    """

    left: int = 1 << 30
    is_exceeded: bool = False

    def allows_more(self) -> bool:
        """Return whether something is left, when there is more to read."""
        self.is_exceeded |= self.left <= 0
        return self.left > 0

    def take(self, cost: int) -> bool:
        """Take a cost. Return whether that much was left."""
        self.left -= cost
        return self.left >= 0


class EventFiles:
    """A reader of event files."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget

    def events(self, file: BinaryIO) -> Iterator[Event]:
        """Yield in order those events in a file that contain scalars."""
        rest = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD)) == _HEAD and self._budget.allows_more():
            (length,) = struct.unpack_from("<Q", head)
            rest -= _HEAD + length + _TAIL
            if rest < 0 or not length:
                return
            self._budget.take(_COST)
            if length > _MAX_RECORD:
                file.seek(length + _TAIL, os.SEEK_CUR)
                continue
            self._budget.take(length)
            try:
                event = self._event(file.read(length + _TAIL)[:length])
            except (ValueError, IndexError, struct.error):
                return
            if event.scalars:
                yield event

    def _event(self, message: bytes) -> Event:
        step = 0
        time = 0.0
        scalars: dict[str, float] = {}
        for field in self._fields(message):
            match field:
                case 1, 1, bytes(value):
                    (time,) = struct.unpack("<d", value)
                case 2, 0, int(value):
                    step = value - (1 << 64 if value >> 63 else 0)
                # This field is a Summary, whose field 1 is a Value.
                case 5, 2, bytes(value):
                    for number, _, content in self._fields(value):
                        if number == 1 and isinstance(content, bytes):
                            scalars.update(self._scalar(content))
        return Event(scalars, step, time)

    def _scalar(self, message: bytes) -> Iterator[tuple[str, float]]:
        """Yield (tag, number) of a ``Value`` message; nothing for an image, a histogram or a
        text.
        """
        tag = ""
        number = None
        for field in self._fields(message):
            match field:
                case 1, 2, bytes(value):
                    tag = value.decode(errors="replace")
                case 2, 5, bytes(value):
                    (number,) = struct.unpack("<f", value)
                case 8, 2, bytes(value):
                    number = self._of_tensor(value)
        if number is not None:
            yield tag, number

    def _of_tensor(self, message: bytes) -> float | None:
        """Return the number in a TensorProto of a single number, as TensorFlow 2 writes scalars, or
        None.
        """
        kind = 0
        content = b""
        for field in self._fields(message):
            match field:
                case 1, 0, int(value):
                    kind = value
                # The number is in tensor_content, float_val or double_val.
                case (4, 2, bytes(value)) | (5, 2 | 5, bytes(value)) | (6, 1 | 2, bytes(value)):
                    content += value
                    if len(content) > _LONGEST:
                        return None
        form = _FORMATS.get(kind)
        if form is None or len(content) != struct.calcsize(form):
            return None
        (number,) = struct.unpack(form, content)
        return float(number)

    def _fields(self, message: bytes) -> Iterator[_Field]:
        """Yield the fields of a protocol buffer. Raises ValueError or IndexError if it is
        malformed.
        """
        position = 0
        while position < len(message):
            self._budget.take(_COST_OF_FIELD)
            key, position = _varint(message, position)
            if (wire := key & 7) == _VARINT:
                number, position = _varint(message, position)
                yield key >> 3, wire, number
                continue
            if wire == _BYTES:
                size, position = _varint(message, position)
            elif wire in {_BITS64, _BITS32}:
                size = 8 if wire == _BITS64 else 4
            else:
                raise ValueError(f"unknown wire type {wire}")
            if size > len(message) - position:
                raise ValueError("a field is truncated")
            yield key >> 3, wire, message[position : position + size]
            position += size


def _varint(message: bytes, start: int) -> tuple[int, int]:
    """Decode a varint, seven bits per byte, lowest first. Return the number and the next offset."""
    number = message[start]
    if number < 0x80:  # noqa: PLR2004 - the fast path for most numbers
        return number, start + 1
    number = 0
    for offset in range(_MAX_VARINT):
        byte = message[start + offset]
        number |= (byte & 0x7F) << 7 * offset
        if byte < 0x80:  # noqa: PLR2004
            return number & ((1 << 64) - 1), start + offset + 1
    raise ValueError("a number is too long")
