"""A report with verdict, charts and tables, rendered as a single HTML file, as Markdown, or as
JSON.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from clusterctl.errors import MachineError, UsageError, printable
from clusterctl.state.ledger import is_own_report
from clusterctl.state.workspace import write_atomic
from clusterctl.util import formatting
from clusterctl.util.assets import data_folder
from clusterctl.util.formatting import Fact

if TYPE_CHECKING:
    from jinja2 import Template

REPORT_FILE: Final = "report.html"
_MODE: Final = 0o666
_MAX_TEXT: Final = 1000  # characters
_POINTS: Final = 400  # per line
# In the head of a table: the name of a column, not of a run.
_KEY: Final = re.compile(r"[a-z_ ]+")
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>|#~])")
# More digits than are shown, as rounding twice may change the last digit.
_DIGITS: Final = 9
# Browsers end lines after hyphens. Of a long word, only an option at its start is kept in a line.
_HYPHENATED: Final = re.compile(r"(?<!\S)(?:(?=\S{1,32}(?!\S))\S*-\S*|--?[A-Za-z][\w-]{0,30})")


class Kind(StrEnum):
    """How a chart draws its series. ``AREAS`` are stacked on each other."""

    LINES = "lines"
    AREAS = "areas"
    BARS = "bars"
    POINTS = "points"


FAINT: Final = -1


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart, as (x, y) points. y is None for NaN and infinity.

    color: number of the color, which a run or node has in all charts. A number for each point of
        ``POINTS``; ``FAINT`` for a point that is not in other charts. None: the line's position in the chart.
    marks: drawn as markers on top of all lines, as evaluations are.
    covers: the number of earlier lines that this line hides. It is dashed, so that these can be
        seen.
    smooth: means of equal intervals, drawn instead of the points on request.
    spread: the mean minus and plus the deviation at each point, drawn as a band.
    run: the name in the legend, which the lines of a run share. Default: the line's name.
    errors: the lower and the upper end of the error bar at each point.
    dash: the lengths of the dashes and gaps of a line to compare with, which nobody measured.
    """

    name: str
    points: Sequence[tuple[Any, float | None]]
    color: int | Sequence[int] | None = None
    marks: bool = False
    covers: int = 0
    smooth: Sequence[tuple[float, float]] = ()
    spread: Sequence[tuple[float, float]] = ()
    run: str = ""
    errors: Sequence[tuple[float, float]] = ()
    dash: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. ``x`` and ``y`` are the titles of its axes, with units. x_log: whether x is
    logarithmic.

    x_bytes: whether x is in bytes. has_points: whether lines have a marker at each point.
    x_end: the end of the axis x. None: the largest x. from_zero: whether y begins at 0.
    y_log: whether y is logarithmic until the reader chooses another axis.
    """

    title: str
    series: Sequence[Series]
    x: str = "step"
    y: str = ""
    kind: Kind = Kind.LINES
    x_log: bool = False
    x_bytes: bool = False
    has_points: bool = False
    x_end: float | None = None
    from_zero: bool = False
    y_log: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Each row has as many cells as the head. If only the first is not empty, it is a
    heading.

    title: text above the table. folded: whether the page hides the rows until a click on the title.
        Markdown has only the title of such a table.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    folded: bool = False

    def as_markdown(self) -> str:
        return "\n".join(_markdown_lines(_clean(asdict(self)))).lstrip("\n") + "\n"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of what is told of runs: lines of text, then lines of a log, charts, facts and
    tables.
    """

    title: str
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    log: Sequence[str] = ()
    facts: Sequence[Fact] = ()

    @property
    def has_content(self) -> bool:
        has_rows = any(table.rows for table in self.tables)
        return has_rows or any((self.lines, self.charts, self.log, self.facts))

    def as_dict(self) -> dict[str, Any]:
        """Return the section as `-o json` shows it, with printable texts and finite numbers
        only.
        """
        facts = [{**asdict(fact), "text": fact.text} for fact in self.facts]
        clean: dict[str, Any] = _clean(asdict(self) | {"facts": facts})
        return clean

    def as_text(
        self, table: Callable[[Sequence[str], Sequence[Sequence[str]]], list[str]]
    ) -> list[str]:
        """Return the lines that a terminal shows, without charts. table: returns the lines of a
        table.
        """
        width = max((len(fact.label) for fact in self.facts), default=0)
        lines = [f"{fact.label:<{width}}  {fact.text}" for fact in self.facts]
        for each in self.tables:
            head = [name.upper() if _KEY.fullmatch(name) else name for name in each.head]
            lines += [each.title] if each.title else []
            lines += [] if each.folded else table(head, each.rows)
        return [*lines, *self.lines, *(f"| {line}" for line in self.log)]


@dataclass(frozen=True, slots=True)
class Report:
    """A report. verdict: sentences on the result, good if ``ok``. missing: data that was not
    found.
    """

    title: str
    verdict: Sequence[str]
    ok: bool | None = None
    missing: Sequence[str] = ()
    sections: Sequence[Section] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `-o json` shows it, with printable texts and finite numbers only."""
        sections = [section.as_dict() for section in self.sections]
        clean: dict[str, Any] = _clean(asdict(replace(self, sections=())))
        return {**clean, "sections": sections}

    def as_markdown(self) -> str:
        """Return the report in Markdown, as ``markdown_of`` does."""
        return markdown_of(self.as_dict())

    def as_html(self) -> str:
        """Return the report as a single HTML file that contains its scripts, style and data.

        The page's Content-Security-Policy lists the hashes of the two scripts, so no other script
        can run.
        """
        report = self.as_dict()
        charts = [chart for section in report["sections"] for chart in section["charts"]]
        return _template().render(report=report, charts=charts)


def markdown_of(report: Mapping[str, Any]) -> str:
    """Return a report, given as ``Report.as_dict`` returns it, in Markdown. Charts become tables of
    first, last, lowest and highest values.
    """
    lines = [
        f"# {_escaped(report['title'])}",
        "",
        *(f"- {_escaped(line)}" for line in report["verdict"]),
    ]
    if report["missing"]:
        lines += ["", "Missing:", ""]
    lines += [f"- {_escaped(line)}" for line in report["missing"]]
    for section in report["sections"]:
        lines += ["", f"## {_escaped(section['title'])}"]
        lines += [part for line in section["lines"] for part in ("", _escaped(line))]
        # Indented lines are code in Markdown, so nothing in them is markup.
        if section["log"]:
            lines += ["", *(f"    {line}" for line in section["log"])]
        # The table of tasks has the values of a chart of points.
        charts = [
            table
            for chart in section["charts"]
            if chart["kind"] != Kind.POINTS and (table := _as_table(chart))
        ]
        facts = [[fact["label"], fact["text"]] for fact in section["facts"]]
        listed = [{"head": ("", ""), "rows": facts}] if facts else []
        for table in (*charts, *listed, *section["tables"]):
            lines += _markdown_lines(table)
    return "\n".join(lines) + "\n"


@cache
def _template() -> Template:
    """Return the page's template with its scripts and their hashes for the Content-Security-Policy.

    https://www.w3.org/TR/CSP3/#match-element-to-source-list
    """
    # This import is slow, and only reports need it.
    import jinja2

    folder = data_folder("templates") / "report"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["whole_words"] = _with_whole_words
    environment.filters["as_table"] = _as_table
    environment.tests["heading"] = _is_heading
    scripts = [(folder / name).read_text() for name in ("chart.umd.min.js", "report.js")]
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    return environment.get_template(
        "report.html.j2", globals={"scripts": scripts, "hashes": hashes}
    )


def thinned(
    points: Iterable[tuple[float, float]], most: int = _POINTS
) -> list[tuple[float, float | None]]:
    """Return about ``most`` points: the lowest and highest point of each of ``most`` / 2 equal
    intervals.

    The first and the last point are also kept: a table of the chart says what they are.
    """
    finite_points = [(x, y if math.isfinite(y) else None) for x, y in points]
    if len(finite_points) <= most:
        return finite_points
    size = math.ceil(len(finite_points) / (most // 2))
    thin: list[tuple[float, float | None]] = []
    for start in range(0, len(finite_points), size):
        stretch = finite_points[start : start + size]
        drawn = [point for point in stretch if point[1] is not None]
        kept = {pick(drawn, key=lambda point: point[1] or 0.0) for pick in (min, max) if drawn}
        # A gap in the line stays visible.
        kept |= {point for point in stretch if point[1] is None and len(drawn) < len(stretch)}
        kept |= {finite_points[0], finite_points[-1]}
        thin += [point for point in stretch if point in kept]
    return thin


def _clean(value: Any) -> Any:
    """Return a value with all texts printable and shortened, and all numbers finite and rounded."""
    if isinstance(value, str):
        text = printable(value)
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return None
        return value if isinstance(value, int) else formatting.shortened(value, _DIGITS)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value]


def _as_table(chart: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a chart as a table: bars in full, other series by first, last, lowest and highest
    value.
    """
    unit = f" ({chart['y']})" if chart["y"] not in {"", chart["series"][0]["name"]} else ""
    if chart["kind"] == Kind.BARS:
        labels = list(dict.fromkeys(x for series in chart["series"] for x, _ in series["points"]))
        values = [dict(map(tuple, series["points"])) for series in chart["series"]]
        rows = [
            [str(label), *(formatting.number(series.get(label)) for series in values)]
            for label in labels
        ]
        names = [f"{series['name']}{unit}" for series in chart["series"]]
        return {"head": [chart["x"], *names], "rows": rows}
    rows = []
    for series in chart["series"]:
        ys = [y for _, y in series["points"] if y is not None]
        if ys:
            _, first = series["points"][0]
            _, last = series["points"][-1]
            rows.append([series["name"], *map(formatting.number, (first, last, min(ys), max(ys)))])
    head = [f"{chart['title']}{unit}", "first", "last", "lowest", "highest"]
    return {"head": head, "rows": rows} if rows else None


def _markdown_lines(table: Mapping[str, Any]) -> list[str]:
    if table.get("folded"):
        return ["", f"Not shown: {_escaped(table['title'])}."]
    title = ["", f"**{_escaped(table['title'])}**"] if table.get("title") else []
    head = ["", _row(table["head"]), _row(["---"] * len(table["head"]), plain=True)]
    cells = (
        [f"**{_escaped(row[0])}**", *row[1:]] if _is_heading(row) else map(_escaped, row)
        for row in table["rows"]
    )
    return [*title, *head, *(_row(row, plain=True) for row in cells)]


def _is_heading(row: Sequence[str]) -> bool:
    """Return whether a row of a table is a heading for the rows below it."""
    return len(row) > 1 and bool(row[0]) and not any(row[1:])


def _with_whole_words(text: str) -> Markup:
    """Return a text as HTML in which no line ends within a word such as --save-interval or
    demo-train-1.
    """
    # The text is escaped, and a character reference has no hyphen.
    return Markup(_HYPHENATED.sub(r'<span class="whole">\g<0></span>', str(escape(text))))  # noqa: S704


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _row(cells: Iterable[str], *, plain: bool = False) -> str:
    return f"| {' | '.join(cells if plain else map(_escaped, cells))} |"


def write_report(report: Report, path: Path) -> None:
    """Write the report as an HTML file, atomically.

    Raises UsageError if ``path`` holds a file that is not a report of clusterctl, or can't be
    written.
    """
    if os.path.lexists(path) and not is_own_report(path):
        raise UsageError(
            f"{path} exists and is not a report of clusterctl",
            code="exists",
            about="report",
            fix="choose another file with --out FILE",
        )
    # The umask can only be read by setting it.
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        write_atomic(path, report.as_html(), mode=_MODE & ~umask)
    except MachineError as exc:
        raise UsageError(
            "the report can't be written",
            code="file-unwritable",
            where=str(path),
            why=exc.why,
            fix="use --out FILE with a file in a folder that exists and that you may write to",
        ) from exc
