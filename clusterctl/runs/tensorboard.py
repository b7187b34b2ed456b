"""The scalars in TensorBoard's event files, as PyTorch, TensorFlow and Lightning write them.

A file is a sequence of records: the length (uint64), its checksum, that many bytes, their checksum
(tensorflow/core/lib/io/record_writer.h). Each record is a protocol buffer ``Event``
(tensorflow/core/util/event.proto, framework/summary.proto, framework/tensor.proto), of which only the fields
named below are read. A job can write anything there: a file is read up to the first record that is no Event.
Checksums are not compared: it would take minutes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

_MAX_BYTES: Final = 128 << 20  # of all files together, with what follows
# In bytes, of a record and a field besides: there may be millions of empty ones.
_COST, _COST_OF_FIELD = 64, 8
_MAX_RECORD: Final = 1 << 18  # larger ones hold images, sounds or graphs
_HEAD, _TAIL = 12, 4  # bytes before and after what is in a record
_MAX_VARINT: Final = 10  # bytes
_VARINT, _BITS64, _BYTES, _BITS32 = 0, 1, 2, 5  # how a field is written
_LONGEST: Final = 8  # bytes of a number
_FORMATS: Final = {1: "<f", 2: "<d"}  # TensorProto.dtype: DT_FLOAT, DT_DOUBLE

_Field = tuple[int, int, int | bytes]
"""The field's number, how it is written, its value."""


@dataclass(frozen=True, slots=True)
class Event:
    """What was written at once: ``scalars`` by their tags."""

    scalars: dict[str, float]
    step: int
    time: float  # in Unix seconds


class EventFiles:
    """Reads event files; of all together no more than takes some seconds."""

    def __init__(self) -> None:
        self._left = _MAX_BYTES

    def events(self, file: BinaryIO) -> Iterator[Event]:
        """The events of a file that have scalars, in their order."""
        rest = os.fstat(file.fileno()).st_size
        while self._left > 0 and len(head := file.read(_HEAD)) == _HEAD:
            (length,) = struct.unpack_from("<Q", head)
            rest -= _HEAD + length + _TAIL
            if rest < 0 or not length:
                return
            self._left -= _COST
            if length > _MAX_RECORD:
                file.seek(length + _TAIL, os.SEEK_CUR)
                continue
            self._left -= length
            try:
                event = self._event(file.read(length + _TAIL)[:length])
            except (ValueError, IndexError, struct.error):
                return
            if event.scalars:
                yield event

    def _event(self, message: bytes) -> Event:
        step, time = 0, 0.0
        scalars: dict[str, float] = {}
        for field in self._fields(message):
            match field:
                case 1, 1, bytes(value):
                    (time,) = struct.unpack("<d", value)
                case 2, 0, int(value):
                    step = value - (1 << 64 if value >> 63 else 0)
                case 5, 2, bytes(value):  # Summary, of which field 1 is a Value
                    for number, _, one in self._fields(value):
                        if number == 1 and isinstance(one, bytes):
                            scalars.update(self._scalar(one))
        return Event(scalars, step, time)

    def _scalar(self, message: bytes) -> Iterator[tuple[str, float]]:
        """The tag and the number of a Value; nothing of an image, a histogram or a text."""
        tag, number = "", None
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
        """The number in a TensorProto that has a single one, as TensorFlow 2 writes scalars."""
        kind, content = 0, b""
        for field in self._fields(message):
            match field:
                case 1, 0, int(value):
                    kind = value
                case (4, 2, bytes(value)) | (5, 2 | 5, bytes(value)) | (6, 1 | 2, bytes(value)):
                    content += value  # tensor_content, float_val and double_val
                    if len(content) > _LONGEST:
                        return None
        form = _FORMATS.get(kind)
        if form is None or len(content) != struct.calcsize(form):
            return None
        (number,) = struct.unpack(form, content)
        return float(number)

    def _fields(self, message: bytes) -> Iterator[_Field]:
        """The fields of a protocol buffer.

        Raises:
            ValueError, IndexError: it is none.
        """
        at = 0
        while at < len(message):
            self._left -= _COST_OF_FIELD
            key, at = _varint(message, at)
            if (wire := key & 7) == _VARINT:
                number, at = _varint(message, at)
                yield key >> 3, wire, number
                continue
            if wire == _BYTES:
                size, at = _varint(message, at)
            elif wire in {_BITS64, _BITS32}:
                size = 8 if wire == _BITS64 else 4
            else:
                raise ValueError(f"fields of kind {wire} are not known")
            if size > len(message) - at:
                raise ValueError("a field is cut short")
            yield key >> 3, wire, message[at : at + size]
            at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, the lowest first; and where the next field begins."""
    number = message[at]
    if number < 0x80:  # noqa: PLR2004 - nearly all are
        return number, at + 1
    number = 0
    for place in range(_MAX_VARINT):
        byte = message[at + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:  # noqa: PLR2004
            return number & ((1 << 64) - 1), at + place + 1
    raise ValueError("a number is too long")
