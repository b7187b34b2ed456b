"""The numbers and lists on pages are those of the code, whose tests show what happens at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.jobs import source, where
from clusterctl.packages.package_files import LOOKED_FOR
from clusterctl.runs import fetch, figure, find, remote_files
from clusterctl.spec.alarms import ALARMS
from clusterctl.spec.names import PROJECT_FILES
from clusterctl.spec.sweep import MAX_TASKS
from clusterctl.transport import remote_receive
from clusterctl.util import receivers
from payload.node import alarms, build, hang, images, job, ports, rank, restarts

DOCS = Path(__file__).parents[3] / "docs"
DAY_S = 86400


def listed(names: tuple[str, ...], last: str) -> str:
    *others, end = (f"`{name}`" for name in names)
    return f"{', '.join(others)} {last} {end}"


def minutes(kind: str) -> str:
    return f"| {ALARMS[kind] // 60} min |"


FIGURES = {
    "jobs.md": (
        listed(PROJECT_FILES, "or"),
        f"Above {source.LARGE_BYTES >> 20} MiB or {source.LARGE_FILES:,} files",
        f"above {source.MAX_BYTES >> 30} GiB or {source.MAX_FILES:,} files",
        f"for {remote_receive.UNUSED_S // DAY_S} days after their last use",
        f"from {ports.FIRST_PORT} to {ports.FIRST_PORT + ports.PORTS - 1}",
    ),
    "runs.md": (
        f"more than {fetch.MAX_FILE >> 30} GiB (`--max-file SIZE`)",
        f"up to {fetch.MAX_CHECKPOINT >> 30} GiB (`--max-checkpoint SIZE`)",
        f"not text, or over {remote_files.MOST_CODE >> 20} MiB",
        f"at most {remote_files.MOST_ENTRIES:,} files",
        f"{figure.COLUMN_IN} inches wide",
        f"({listed(tuple(find.FIELDS), '').replace('  ', ', ')})",
    ),
    "restarts.md": (
        "exit code {}, {} or {};".format(*restarts.USAGE),
        {3: "three failures"}[restarts.MOST_FAILURES],
        {600: "ten minutes after the start"}[round(restarts.LATE_S)],
        {3: "killed three seconds later"}[round(job.ABORTED_S)],
        {5: "five times its longest pause"}[hang.FACTOR],
        f"{ {10: 'ten'}[hang.PATIENT] } times that, at most {hang.START_S / 60:.0f} minutes",
        {3: "Until its third sign of progress"}[hang.SETTLED],
    ),
    "failures.md": (
        f"within {rank.GRACE_S} seconds",
        f"uses {alarms.NEAR:.0%} of its memory".replace("%", " %"),
        f"less than {alarms.MUCH_BYTES >> 40} TiB or a million files",
        *(minutes(kind) for kind in ALARMS),
    ),
    "environments.md": (
        listed(LOOKED_FOR, "and"),
        f"until no job has used it for {build.UNUSED_S / DAY_S:.0f} days",
        f"no job has used for {images.UNUSED_S / DAY_S:.0f} days",
    ),
    "howto/be-told.md": (f"A receiver has {receivers.LIMIT_S:.0f} seconds",),
    "howto/many-jobs.md": (f"at most {MAX_TASKS:,} tasks",),
    "howto/where.md": (f"at most {where.MOST_ASKED} places",),
}


@pytest.mark.parametrize(
    ("page", "figure"), [(page, figure) for page, figures in FIGURES.items() for figure in figures]
)
def test_figure_of_a_page_is_that_of_the_code(page: str, figure: str) -> None:
    assert figure in " ".join((DOCS / page).read_text().split())
