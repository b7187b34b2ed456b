"""Tables of values in CSV files, for sweeps."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from clusterctl.errors import BadValueError
from clusterctl.spec.units import shown
from clusterctl.util.confine import reject_read
from clusterctl.util.numbers import counted

_MAX_BYTES: Final = 4 << 20


def read_table(path: Path) -> list[dict[str, str]]:
    """Return name -> value for each row of a table. Its first line has the names.

    Values are separated by commas, by tabs, or by semicolons, as spreadsheets write them in some
    languages. An empty value is left out.

    Raises:
        BadValueError: the file can't be read, or a line is wrong; the message names the line.
    """
    rows = [(number, cells) for number, cells in _lines(path) if any(cells)]
    if not rows:
        raise _wrong(path, 1, "there are no values")
    names = _names_of(path, *rows[0])
    found: dict[tuple[tuple[str, str], ...], int] = {}
    for number, cells in rows[1:]:
        if len(cells) != len(names):
            raise _wrong(
                path,
                number,
                f"there are {counted(len(cells), 'value')} for {counted(len(names), 'name')}",
            )
        values = tuple((name, cell) for name, cell in zip(names, cells, strict=True) if cell)
        if values in found:
            problem = (
                f"the values are those of line {found[values]}, and a sweep runs equal tasks once"
            )
            raise _wrong(path, number, f"{problem}: remove the line, or add a column such as seed")
        found[values] = number
    if not found:
        raise _wrong(path, rows[0][0], "no line with values follows the names")
    return [dict(values) for values in found]


def _text_of(path: Path) -> str:
    reject_read(path)
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise BadValueError("table-unreadable", f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        # Spreadsheets write a byte order mark.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise BadValueError("table-unreadable", f"{path} is not UTF-8 text") from exc
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise BadValueError("table-unreadable", f"{path} can't be read: {reason}") from exc


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the row's last line, values) for each row."""
    text = _text_of(path)
    names_line = text.partition("\n")[0]
    separators = [each for each in "\t;" if each in names_line and "," not in names_line]
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separators[0] if separators else ",",
        skipinitialspace=True,
        strict=True,
    )
    while True:
        try:
            cells = next(lines, None)
        except csv.Error as exc:
            raise _wrong(path, lines.line_num, str(exc)) from exc
        if cells is None:
            return
        yield lines.line_num, cells


def _names_of(path: Path, number: int, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names:
        column = names.index("") + 1
        problem = f"column {column} has no name (pandas writes such a column without `index=False`)"
        raise _wrong(path, number, problem)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _wrong(path, number, f"two columns are called {shown(twice)}")
    return names


def _wrong(path: Path, line: int, problem: str) -> BadValueError:
    return BadValueError("table-line", f"{path}, line {line}: {problem}")
