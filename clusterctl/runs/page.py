"""A report as a document: verdict, charts and tables, rendered as one HTML file, as Markdown, or as JSON."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2

from clusterctl.errors import MachineError, UsageError, printable
from clusterctl.state.workspace import write_atomic
from clusterctl.transport.remote_open import open_file
from clusterctl.util.assets import asset

REPORT_FILE: Final = "report.html"
_OURS: Final = b'<meta name="generator" content="clusterctl">'
_HEAD: Final = 1000  # bytes in which it stands
_MODE: Final = 0o666  # less what the user's umask takes
_MAX_TEXT: Final = 1000  # characters of one text of a run
_POINTS: Final = 400  # of one line of a chart
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>|#~])")
_DIGITS: Final = 6


class Kind(StrEnum):
    """How a chart draws its series. ``AREAS`` are on top of each other."""

    LINES = "lines"
    AREAS = "areas"
    BARS = "bars"
    POINTS = "points"


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: points by their place on the x axis; None where a value is no finite number."""

    name: str
    points: Sequence[tuple[float | str, float | None]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; ``x`` and ``y`` title its axes, with the unit."""

    title: str
    series: Sequence[Series]
    x: str = "step"
    y: str = ""
    kind: Kind = Kind.LINES


@dataclass(frozen=True, slots=True)
class Table:
    """A table; a row has as many texts as the head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: lines of text, then charts, then tables."""

    title: str
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A report: the verdict in words, what is missing, and sections; ``ok`` colors the verdict."""

    title: str
    verdict: Sequence[str]
    ok: bool | None = None
    missing: Sequence[str] = ()
    sections: Sequence[Section] = ()

    def as_dict(self) -> dict[str, Any]:
        """As `-o json` shows it: with nothing but text that can be printed, and finite numbers."""
        clean: dict[str, Any] = _clean(asdict(self))
        return clean

    def as_markdown(self) -> str:
        """The same in Markdown: of a chart, where each series begins and ends, its lowest and its highest."""
        clean = self.as_dict()
        lines = [f"# {_escaped(clean['title'])}", "", *(f"- {_escaped(one)}" for one in clean["verdict"])]
        lines += ["", "Missing:", ""] if clean["missing"] else []
        lines += [f"- {_escaped(one)}" for one in clean["missing"]]
        for section in clean["sections"]:
            lines += ["", f"## {_escaped(section['title'])}"]
            lines += [part for one in section["lines"] for part in ("", _escaped(one))]
            tables = [table for chart in section["charts"] for table in [_as_table(chart)] if table]
            for table in (*tables, *section["tables"]):
                lines += ["", _row(table["head"]), _row(["---"] * len(table["head"]), plain=True)]
                lines += [_row(row) for row in table["rows"]]
        return "\n".join(lines) + "\n"

    def as_html(self) -> str:
        """The same as one HTML file that asks for nothing: scripts, style and data are in it.

        Only our two scripts can run: the page's Content-Security-Policy names them by their hashes.
        """
        report = self.as_dict()
        charts = [chart for section in report["sections"] for chart in section["charts"]]
        return _template().render(report=report, charts=charts)


@cache
def _template() -> jinja2.Template:
    """The page with our scripts, and their hashes as a Content-Security-Policy names them.

    https://www.w3.org/TR/CSP3/#match-element-to-source-list
    """
    folder = asset("templates") / "report"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [(folder / name).read_text() for name in ("chart.umd.min.js", "report.js")]
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    return environment.get_template("report.html.j2", globals={"scripts": scripts, "hashes": hashes})


def thinned(points: Iterable[tuple[float, float]], most: int = _POINTS) -> list[tuple[float, float | None]]:
    """Points for a chart: of many, the lowest and highest of each of ``most`` / 2 stretches."""
    found = [(x, y if math.isfinite(y) else None) for x, y in points]
    if len(found) <= most:
        return found
    size = math.ceil(len(found) / (most // 2))
    thin: list[tuple[float, float | None]] = []
    for at in range(0, len(found), size):
        part = found[at : at + size]
        known = [one for one in part if one[1] is not None]
        kept = {pick(known, key=lambda one: one[1] or 0.0) for pick in (min, max) if known}
        kept |= {one for one in part if one[1] is None and len(known) < len(part)}  # a gap stays one
        thin += [one for one in part if one in kept]
    return thin


def _clean(value: Any) -> Any:
    """Texts of a run as one printable line each, numbers finite and short."""
    if isinstance(value, str):
        text = printable(value)
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return None
        return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value]


def _as_table(chart: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of a chart as a table: of lines the first, last, lowest and highest."""
    if chart["kind"] == Kind.BARS:
        labels = list(dict.fromkeys(x for one in chart["series"] for x, _ in one["points"]))
        values = [dict(map(tuple, one["points"])) for one in chart["series"]]
        rows = [[str(label), *(_number(one.get(label)) for one in values)] for label in labels]
        return {"head": [chart["x"], *(one["name"] for one in chart["series"])], "rows": rows}
    rows = []
    for one in chart["series"]:
        ys = [y for _, y in one["points"] if y is not None]
        if ys:
            rows.append([one["name"], *map(_number, (ys[0], ys[-1], min(ys), max(ys)))])
    return {"head": [chart["title"], "first", "last", "lowest", "highest"], "rows": rows} if rows else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _row(cells: Iterable[str], *, plain: bool = False) -> str:
    return f"| {' | '.join(cells if plain else map(_escaped, cells))} |"


def write_report(report: Report, path: Path) -> None:
    """Write the HTML file, whole or not at all.

    Raises:
        UsageError: a file of this name is there that is no report of ours, or it can't be written.
    """
    if os.path.lexists(path) and not _is_ours(path):
        raise UsageError(
            f"{path} is there, and is no report of clusterctl",
            code="not-a-report",
            fix="name another file: --out FILE",
        )
    umask = os.umask(0o077)  # it can only be read by setting another
    os.umask(umask)
    try:
        write_atomic(path, report.as_html(), mode=_MODE & ~umask)
    except MachineError as exc:
        raise UsageError(
            "the report can't be written",
            code="file-unwritable",
            where=str(path),
            why=exc.why,
            fix="name a file in a folder that is there, and yours to write: --out FILE",
        ) from exc


def _is_ours(path: Path) -> bool:
    """Whether it is a regular file that begins as our reports do."""
    try:
        descriptor = open_file(os.fsencode(path.parent), os.fsencode(path.name), any_owner=True)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        return _OURS in file.read(_HEAD)
