"""The table of a run: what its programs and nodes wrote over time, parsed once, by `collect`.

It is a zip archive with a member for the metrics of each job or array task, and one for the telemetry
of each of its nodes. A member is a sequence of blocks: a line of JSON that describes the block, then
its columns as little-endian doubles; places that are whole numbers are 64-bit integers. The files
themselves stay beside it, unchanged, and are parsed again if the table lacks them or is damaged.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # until Python 3.12

from clusterctl.runs.curve import Column
from clusterctl.runs.metric_files import Block, MetricFiles
from clusterctl.runs.telemetry_files import NodeFile, is_of_node
from clusterctl.state.ledger import TABLE_FILE, TASK
from clusterctl.util.numbers import finite

# The kinds of lines of which readers need more than the columns.
_KEPT: Final = frozenset({"run", "result", "checkpoint", "evaluation"})
_LEFT_OUT: Final = "left_out"
# Losses are hardly compressible, and steps and times very well.
_LEVEL: Final = 1
_WORD: Final = 8  # bytes
_BOUND: Final = 1 << 63
# Whoever sends a run to somebody may have written anything into its table.
_LONGEST: Final = 64 << 20  # bytes of a block's head
_Count: TypeAlias = Annotated[int, Field(ge=1, le=1 << 24)]
_DAMAGES: Final = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


Files: TypeAlias = MetricFiles | NodeFile


class _Head(TypedDict):
    """What a block begins with. rows: the number of its places. columns: for each its name, the
    number of its values, whether these have the places of the rows, and whether they have times.
    """

    axis: str
    kind: str
    rows: _Count
    has_times: bool
    rises: bool
    places: Literal["q", "d"]
    columns: list[tuple[str, _Count, bool, bool]]
    lines: list[dict[str, Any]]


_HEAD: Final = TypeAdapter(_Head)


def stored(files: Files) -> Iterator[Block]:
    """Yield what the table has of files, or what they have themselves if the table lacks them or is
    damaged. ``left_out`` of the files is then complete in both cases.
    """
    path, folder = _place(files.folder)
    changed_at = path.stat().st_mtime_ns if path.is_file() else None
    member = f"{folder}{files.member}"
    is_node = isinstance(files, NodeFile)
    is_whole = None if changed_at is None else _is_whole(path, changed_at, member, is_node=is_node)
    if changed_at is not None and is_whole:
        with _opened(path, changed_at).open(member) as file:
            yield from _stored(file, files.left_out)
        return
    is_found = False
    for block in files.blocks():
        is_found = True
        yield block
    if is_whole is False and not is_found:
        files.left_out.append(f"{files.member}, as {TABLE_FILE} is damaged")


def _stored(file: IO[bytes], left_out: list[str]) -> Iterator[Block]:
    while line := file.readline(_LONGEST):
        head = json.loads(line)
        if _LEFT_OUT in head:
            left_out += map(str, head[_LEFT_OUT])
        else:
            yield _read(_HEAD.validate_python(head), file)


@lru_cache(maxsize=4096)
def _is_whole(path: Path, changed_at: int, member: str, *, is_node: bool) -> bool | None:
    """Return whether all blocks of a member can be read; None if the table has no such member.
    is_node: whether they must be of a node's telemetry.

    Its checksum is known only at its end, so readers of its blocks can't see damage in time.
    """
    try:
        table = _opened(path, changed_at)
        if member not in table.NameToInfo:
            return None
        with table.open(member) as file:
            return all(is_of_node(block) or not is_node for block in _stored(file, []))
    except _DAMAGES:
        return False


@lru_cache(maxsize=8)
def _opened(path: Path, _changed_at: int) -> zipfile.ZipFile:
    """Open a table. The tasks of an array are many, and the list of members is read once."""
    return zipfile.ZipFile(path)


def _place(folder: Path) -> tuple[Path, str]:
    """Return the table that may have what is in a folder, and what its members there begin with."""
    # In the folder of a task, a file of this name is the job's.
    if TASK.fullmatch(os.fsencode(folder.name)):
        return folder.parent / TABLE_FILE, f"{folder.name}/"
    return folder / TABLE_FILE, ""


class TableWriter:
    """Adds to the table of a run, and creates it with the first block. tree: the run's folder."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._opened = ExitStack()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @cached_property
    def _file(self) -> zipfile.ZipFile:
        path = self._tree / TABLE_FILE
        file = zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL)
        return self._opened.enter_context(file)

    def blocks(self, files: Files) -> Iterator[Block]:
        """Parse files of a run or an array task: yield their blocks, and write them into the table."""
        member = f"{_place(files.folder)[1]}{files.member}"
        blocks = enumerate(files.blocks())
        for _, first in islice(blocks, 1):
            with self._file.open(member, "w", force_zip64=True) as file:
                for number, block in chain([(0, first)], blocks):
                    _write(block, file, is_first=not number)
                    yield block
                file.write(_line({_LEFT_OUT: files.left_out}))


def _write(block: Block, file: IO[bytes], *, is_first: bool) -> None:
    """Write a block. is_first: whether it may have the line with the data of the run."""
    lines = block.lines if block.kind in _KEPT else block.lines[: int(is_first)]
    place = block.place
    code = _code(place.xs or ())
    columns = [*_placed(place, code)]
    named = []
    for name, column in block.columns.items():
        is_same = column.xs is place.xs
        named.append([name, len(column.ys), is_same, column.times is not None])
        columns += [*([] if is_same else _placed(column, code)), array("d", column.ys)]
    head = {
        "axis": block.axis,
        "kind": block.kind,
        "rows": len(place.xs or ()),
        "has_times": place.times is not None,
        "rises": place.rises,
        "places": code,
        "columns": named,
        "lines": lines,
    }
    file.write(_line(head))
    for values in columns:
        file.write(_bytes(values))


def _code(xs: Sequence[float]) -> str:
    """Return the code of the ``array`` that keeps places as they are. Whole numbers are shown as
    such, and a double has only those up to 2**53.
    """
    kinds = {*map(type, xs)}
    are_whole = int in kinds and (kinds == {int} or all(map(float.is_integer, map(float, xs))))
    return "q" if are_whole and -_BOUND <= min(xs) <= max(xs) < _BOUND else "d"


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode() + b"\n"


def _placed(column: Column, code: str) -> Iterator[array[Any]]:
    xs = column.xs or ()
    yield array("q", map(int, xs)) if code == "q" else array("d", xs)
    if column.times is not None:
        yield array("d", [math.nan if time is None else time for time in column.times])


def _bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _read(head: _Head, file: IO[bytes]) -> Block:
    """Read the columns of a block. Raises ValueError or EOFError: it is none that can be written."""
    lines = head["lines"]
    if head["kind"] in _KEPT and len(lines) != head["rows"]:
        raise ValueError
    place = _place_of(head, head["rows"], file, has_times=head["has_times"])
    columns = {}
    for name, count, is_same, has_times in head["columns"]:
        if is_same and count != head["rows"]:
            raise ValueError
        own = place if is_same else _place_of(head, count, file, has_times=has_times)
        columns[name] = own._replace(ys=_numbers(count, file))
    return Block(columns, head["axis"], place, head["kind"], lines)


def _place_of(head: _Head, count: int, file: IO[bytes], *, has_times: bool) -> Column:
    xs = _numbers(count, file, head["places"])
    if not all(map(math.isfinite, xs)):
        raise ValueError
    times: Sequence[float | None] | None = _numbers(count, file) if has_times else None
    if times is not None and not math.isfinite(sum(time or 0.0 for time in times)):
        times = [*map(finite, times)]
    return Column(xs, xs, times, head["rises"])


def _numbers(count: int, file: IO[bytes], code: str = "d") -> list[Any]:
    numbers: array[Any] = array(code)
    numbers.frombytes(file.read(count * _WORD))
    if len(numbers) != count:
        raise EOFError
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
