"""Finds the function that a program without Python executes. Uses only the standard library of
Python 3.8.

A thread's stack holds the address to which each unfinished call returns. The first such address
within the program's own file, not a library's, is in the function that waits. Some other words on a
stack look like such addresses, so an address counts only if the instruction before it is a call to
a library.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from payload.node import task

# How much of the stack is read, from its innermost end on.
STACK_BYTES = 1 << 18
_HIGHEST = 1 << 64
# Words of the ELF format.
_KIND = 16
_SHARED = 3
_LOADED = 1
_EXECUTABLE = 1
_FUNCTION = 2
_TABLES = (2, 11)
# Instructions of x86-64: calls and jumps relative to the next instruction or through a pointer;
# their sizes.
_CALL = b"\xe8"
_JUMP = b"\xe9"
_INDIRECT_JUMP = b"\xff\x25"
_INDIRECT = 0xFF
_NEAR = 5
_LONGEST = 7
_INDIRECT_BYTES = (2, 3, 6, 7)


class Function(NamedTuple):
    """A function of a program: the addresses of its code in the program's file."""

    start: int
    end: int
    name: str


def innermost_function(pid: int, stack_pointer: int = 0) -> str:
    """Return the name of the innermost function of a process's own program on the stack, or "".

    stack_pointer: of the main thread, if it is running. The kernel tells the pointer of other
        threads.
    """
    with suppress(OSError, ValueError, IndexError, OverflowError, struct.error):
        fields = task.text_of(f"/proc/{pid}/syscall").split()
        pointer = int(fields[-2], 16) if fields[1:] else stack_pointer
        with open(f"/proc/{pid}/exe", "rb") as file:
            program = Program(file.read())
        begin = _load_address(pid) if program.is_relocatable else 0
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(pointer)
            stack = memory.read(STACK_BYTES)
        words = struct.iter_unpack("=Q", stack[: len(stack) // 8 * 8])
        return next(
            filter(None, (program.caller_of_library(word - begin) for (word,) in words)), ""
        )
    return ""


def _load_address(pid: int) -> int:
    """Return the address at which the program of a process begins in memory."""
    program = os.readlink(f"/proc/{pid}/exe")
    for line in task.text_of(f"/proc/{pid}/maps").splitlines():
        fields = line.split(maxsplit=5)
        if fields[5:] == [program]:
            return int(fields[0].partition("-")[0], 16)
    raise ValueError(program)


class Program:
    """A 64-bit ELF program: its functions, by address, and its code."""

    def __init__(self, file: bytes) -> None:
        self._file = file
        self.is_relocatable = file[_KIND] == _SHARED
        self._functions = sorted(self._symbols())
        self._code = list(self._segments())

    def caller_of_library(self, address: int) -> str:
        """Return the name of the function that has called a library, and to which ``address``
        returns, or "".

        Only x86-64's instructions are known. On other machines, each address within a function
        counts.
        """
        function = self._function_at(address - 1)
        if not function or os.uname().machine != "x86_64":
            return function.name if function else ""
        before = self._bytes(address - _LONGEST, address)
        if before[-_NEAR:-4] == _CALL:
            target = address + int.from_bytes(before[-4:], "little", signed=True)
            called = self._function_at(target)
            # A function can leave by a jump into a library, which then uses its frame. Otherwise,
            # this address is of a call that has ended.
            if called:
                function = called if self._jumps_to_library(called) else None
        elif _INDIRECT not in (before[-count] for count in _INDIRECT_BYTES):
            function = None
        return function.name if function else ""

    def _jumps_to_library(self, function: Function) -> bool:
        code = self._bytes(function.start, function.end)
        for end in range(_NEAR, len(code) + 1):
            instruction = code[end - _NEAR : end]
            target = function.start + end + int.from_bytes(instruction[1:], "little", signed=True)
            is_jump = instruction.startswith(_JUMP) and self._bytes(target, target + 1)
            if instruction.startswith(_INDIRECT_JUMP) or (
                is_jump and not self._function_at(target)
            ):
                return True
        return False

    def _function_at(self, address: int) -> Function | None:
        index = bisect_right(self._functions, (address, _HIGHEST)) - 1
        function = self._functions[index] if index >= 0 else None
        return function if function and address < function.end else None

    def _bytes(self, start: int, end: int) -> bytes:
        """Return code by its address."""
        for address, code in self._code:
            if address <= start and end <= address + len(code):
                return code[start - address : end - address]
        return b""

    def _segments(self) -> Iterator[tuple[int, bytes]]:
        """Yield each part of the file that is loaded as code, with its address."""
        (start,) = struct.unpack_from("=Q", self._file, 32)
        size, count = struct.unpack_from("=HH", self._file, 54)
        for at in range(start, start + size * count, size):
            kind, flags, offset, address, _, length = struct.unpack_from("=IIQQQQ", self._file, at)
            if kind == _LOADED and flags & _EXECUTABLE:
                yield address, self._file[offset : offset + length]

    def _symbols(self) -> Iterator[Function]:
        (start,) = struct.unpack_from("=Q", self._file, 40)
        size, count = struct.unpack_from("=HH", self._file, 58)
        sections = [
            struct.unpack_from("=IIQQQQII", self._file, start + size * each)
            for each in range(count)
        ]
        for _, kind, _, _, offset, length, link, _ in sections:
            table = self._file[offset : offset + length] if kind in _TABLES else b""
            for name, info, _, _, address, extent in struct.iter_unpack("=IBBHQQ", table):
                if info & 15 == _FUNCTION and address and extent:
                    begin = sections[link][4] + name
                    text = self._file[begin : self._file.index(b"\0", begin)]
                    yield Function(address, address + extent, text.decode(errors="replace"))
