"""A table as text for a paper or a program: LaTeX with booktabs, CSV, or Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.util import formatting

_NUMBER: Final = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?")
_FIGURE: Final = re.compile(rf"{_NUMBER.pattern}(?: ± {_NUMBER.pattern})?")
_EXPONENT: Final = re.compile(r"e([+-]?)0*(\d+)")
_SPECIAL: Final = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def latex(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    measured: Sequence[bool],
    notes: Iterable[str] = (),
) -> str:
    r"""Return a ``tabular`` of LaTeX, for \input.

    measured: for each column, whether its cells are figures to set as formulas; other cells stay
        as they are given. notes: become comments above the table.
    """
    columns = [*zip(*rows, strict=True)] or [()] * len(head)
    right = [any(map(_is_figure, column)) and all(map(_fits, column)) for column in columns]
    lines = [
        r"% needs \usepackage{booktabs}",
        *(f"% {printable(note)}" for note in notes),
        f"\\begin{{tabular}}{{{''.join('r' if each else 'l' for each in right)}}}",
        r"\toprule",
        f"{' & '.join(map(_escaped, head))} \\\\",
        r"\midrule",
        *(f"{' & '.join(map(_cell, row, measured))} \\\\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _is_figure(cell: str) -> bool:
    return _FIGURE.fullmatch(cell) is not None


def _fits(cell: str) -> bool:
    """Return whether a cell may stand in a column of numbers."""
    return _is_figure(cell.partition(" (n=")[0]) or cell in {formatting.NONE, "nan", "inf", "-inf"}


def _cell(text: str, is_measured: bool) -> str:
    figure, of, rest = text.partition(" (n=")
    if not is_measured or not _is_figure(figure):
        return "--" if text == formatting.NONE else _escaped(text)
    shown = _EXPONENT.sub(_power, figure).replace(",", "{,}").replace("±", r"\pm")
    return f"${shown}${of}{rest}"


def _power(match: re.Match[str]) -> str:
    sign = match[1].replace("+", "")
    return rf" \times 10^{{{sign}{match[2]}}}"


def _escaped(text: str) -> str:
    # An argument of the rule or the row before, if it were the first letter.
    guard = "{}" if text.startswith(("[", "*")) else ""
    return guard + "".join(_SPECIAL.get(letter, letter) for letter in printable(text))


def as_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV with all digits of each number. An empty cell has no value."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(
        [str(cell).lower() if isinstance(cell, bool) else cell for cell in row] for row in rows
    )
    return file.getvalue()
