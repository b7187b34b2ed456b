"""Tables of a report: values as text, configuration, differences of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from clusterctl.errors import CollectError
from clusterctl.runs.charts import ProgramMetrics
from clusterctl.runs.compare import compare
from clusterctl.runs.find import Row
from clusterctl.runs.page import Section, Table
from clusterctl.runs.series import config_of
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_HEAD: Final = ("option", "value")


def table_of(head: str, rows: Mapping[str, Row], keys: Sequence[str]) -> Table:
    """Return a table with these values of some runs. head: the title of the column with the runs'
    titles.
    """
    cells = [[title, *(row.text(key) for key in keys)] for title, row in rows.items()]
    return Table((head, *keys), cells)


def configuration_section(row: Row, metrics: ProgramMetrics | None = None) -> Section:
    """Return tables of the options that the user gave and, folded, of those with their defaults."""
    run = row.run
    parsed, words = config_of(run.args)
    # The table has the options, except those of a sweep.
    arguments = run.args if words or not parsed.keys() <= row.config.keys() else ()
    extra_rows = (
        ("arguments", " ".join(arguments)),
        ("tags", ", ".join(run.tags)),
        ("note", run.note or ""),
    )
    options = {
        key: formatting.given(value) for key, value in row.config.items() if value is not None
    }
    own = given_options(row, metrics)
    rows = [
        *((key, text) for key, text in options.items() if key in own),
        *((key, text) for key, text in extra_rows if text),
    ]
    defaults = [(key, text) for key, text in options.items() if key not in own]
    tables = [Table(_HEAD, rows), Table(_HEAD, defaults, _defaults(len(defaults)), folded=True)]
    return Section("Configuration", tables=[table for table in tables if table.rows])


def _defaults(count: int) -> str:
    return f"{counted(count, 'option')} with the default value"


def given_options(row: Row, metrics: ProgramMetrics | None) -> set[str]:
    """Return the names of the options that the user gave: all, unless the program tells which these
    are.
    """
    if metrics is None or metrics.given is None:
        return set(row.config)
    return {*metrics.given, *config_of(row.run.args)[0]}


def difference_sections(
    rows: Mapping[str, Row], runs: Mapping[str, ProgramMetrics], missing: list[str]
) -> Iterator[Section]:
    """Yield a section for each kind of differences between the first run and the rest.

    rows: title of a run -> run. runs: title -> its metrics. missing: gets messages about unreadable
        runs.
    """
    first, *others = rows
    cells: dict[tuple[str, str], dict[str, str]] = {}
    titles = [first]
    for title in others:
        try:
            differences = compare(rows[first], rows[title])
        except CollectError as exc:
            missing.append(f"the differences between {first} and {title}: {exc.cause}")
            continue
        titles.append(title)
        # The results have a table of their own.
        for difference in (each for each in differences if each.section != "result"):
            values = cells.setdefault(
                (difference.section, difference.key), {first: formatting.given(difference.a)}
            )
            values[title] = formatting.given(difference.b)
    own = {key for title, row in rows.items() for key in given_options(row, runs.get(title))}
    for section in dict.fromkeys(section for section, _ in cells):
        lines = {
            key: (key, *(values.get(title, values[first]) for title in titles))
            for (row_section, key), values in cells.items()
            if row_section == section
        }
        # Fold options that have their default and that a program lacks.
        folded = [
            line
            for key, line in lines.items()
            if section == "configuration" and key not in own and "-" in line
        ]
        head = ("", *titles)
        tables = [
            Table(head, [line for line in lines.values() if line not in folded]),
            Table(head, folded, _defaults(len(folded)), folded=True),
        ]
        yield Section(f"Differs: {section}", tables=[table for table in tables if table.rows])
