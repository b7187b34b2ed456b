"""A figure of a metric for a paper: the mean of each group of runs as a line, with a band.

It is drawn by Matplotlib, whose PDF files contain their fonts as TrueType and whose SVG files
contain letters as paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import MachineError, Notice, UsageError, printable
from clusterctl.runs.find import Row, reject_unknown_keys
from clusterctl.runs.groups import Groups, MeanLines, at_most_named, grouped
from clusterctl.runs.tabular import as_csv
from clusterctl.state.workspace import write_atomic
from clusterctl.util import formatting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.figure import Figure

FORMS: Final = (".pdf", ".svg", ".csv")
COLUMN_IN: Final = 3.3
"""The width of a column of a paper with two, in inches."""
_MOST_LINES: Final = 14
# The colors of Okabe and Ito, which readers who can't see red or green tell apart, and dashes for
# readers of a print without colors.
_COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: Final = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (7, 3)))
_STYLE: Final = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.2,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "clusterctl",
    "text.usetex": False,
}


@dataclass(frozen=True, slots=True)
class MetricFigure:
    """A metric over its steps. means: of the groups that are drawn."""

    metric: str
    groups: Groups
    means: MeanLines

    @classmethod
    def of(cls, rows: Sequence[Row], metric: str, over: Sequence[str] = ()) -> MetricFigure:
        """Return the figure of some runs.

        over: the options whose values are averaged. Default: the seeds.
        Raises UsageError: no run has the metric, or nothing can be drawn.
        """
        reject_unknown_keys(rows, [metric], as_metrics=True)
        reject_unknown_keys(rows, over)
        groups = grouped(rows, over, [metric])
        (key,) = groups.metrics
        metric = key.removeprefix("metric.")
        figure = cls(metric, groups, MeanLines.of(groups.groups, metric))
        if not any(metric in row.metrics for row in rows):
            why = f"{metric} is a single value of each run, without steps"
            fix = "`clusterctl runs list --over KEY --columns METRIC` shows means of such values"
        elif not figure.means.lines:
            why = "; ".join(at_most_named(figure.left_out))
            fix = "name runs that completed and have the metric at common steps"
        elif (count := len(figure.means.lines)) > _MOST_LINES:
            why = f"{count} groups of runs have values of it, and {_MOST_LINES} can be told apart"
            fix = "name fewer runs, or average over more options with --over"
        else:
            return figure
        what = f"a figure of {metric} can't be drawn"
        raise UsageError(what, code="not-found", about="figure-lines", why=why, fix=fix)

    def notes(self) -> list[Notice]:
        """Return what the lines mean, which runs are in none, and what was not read."""
        # A run's record tells what the reader of its files tells again.
        return [*dict.fromkeys((*self.groups.notes(), *self.means.notes()))]

    @property
    def left_out(self) -> list[str]:
        """Why each other run is in no line."""
        return [*self.groups.left_out, *self.means.left_out]

    def write(self, path: Path, *, width_in: float = COLUMN_IN, log: bool = False) -> None:
        """Write the figure. The suffix of ``path`` is one of ``FORMS``; .csv has its points.

        width_in: in inches. log: whether the metric's axis is logarithmic.
        """
        is_table = path.suffix == ".csv"
        if not is_table:
            _need_matplotlib()
        try:
            if is_table:
                write_atomic(path, self.points(), mode=0o644)
            else:
                self._draw(path, width_in=width_in, log=log)
        except (OSError, MachineError) as exc:
            raise UsageError(
                "the figure can't be written",
                code="file-unwritable",
                where=str(path),
                why=exc.why if isinstance(exc, MachineError) else exc.strerror or str(exc),
                fix="use --out FILE with a file in a folder that exists and that you may write to",
            ) from exc

    def points(self) -> str:
        """Return all points as CSV: the group's options, the step, mean, deviation and n."""
        rows: list[list[Any]] = [
            [*line.group.options.values(), step, *one.as_dict().values()]
            for line in self.means.lines
            for step, one in line.points
        ]
        (metric,) = self.groups.metrics
        return as_csv([*self.groups.labels, self.means.axis, metric, f"{metric}_sd", "n"], rows)

    def _draw(self, path: Path, *, width_in: float, log: bool) -> None:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
            figure = Figure(figsize=(width_in, _height_in(width_in)), layout="constrained")
            self._plot(figure.subplots(), log=log)
            if len(self.means.lines) > 1 or self.means.lines[0].group.diverged:
                # Only a canvas of pixels measures texts.
                _add_legend(figure, FigureCanvasAgg(figure).get_renderer())
            # A file of the same data is the same, whenever it is written.
            stamp = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None}
            figure.savefig(path, metadata=stamp)

    def _plot(self, axes: Axes, *, log: bool) -> None:
        unit = formatting.unit_of(self.metric)
        means = (one.mean for line in self.means.lines for _, one in line.points)
        unit, size = formatting.fitting_unit(unit, means)
        for number, line in enumerate(self.means.lines):
            steps = [step for step, _ in line.points]
            color = _COLORS[number % len(_COLORS)]
            means_of = [one.mean / size for _, one in line.points]
            marker = "o" if len(steps) == 1 else None
            axes.plot(
                steps,
                means_of,
                color=color,
                linestyle=_DASHES[number % len(_DASHES)],
                label=_plain(line.legend),
                marker=marker,
                markersize=3,
            )
            if line.count > 1:
                low, high = zip(*(one.ends for _, one in line.points), strict=True)
                axes.fill_between(
                    steps,
                    [y / size for y in low],
                    [y / size for y in high],
                    color=color,
                    alpha=0.2,
                    linewidth=0,
                )
        axes.set_xlabel(self.means.axis)
        axes.set_ylabel(_plain(self.metric) + (f" ({unit})" if unit else ""))
        axes.margins(x=0.02)
        if log:
            axes.set_yscale("log")


def _need_matplotlib() -> None:
    try:
        import_module("matplotlib")
    except ImportError as exc:
        raise MachineError(
            "figures need Matplotlib, which is not installed here",
            code="tool-missing",
            about="matplotlib",
            why=str(exc),
            fix="pip install 'clusterctl[figure]'; a figure's points need no package: "
            "--out FILE.csv",
        ) from exc


def _height_in(width_in: float) -> float:
    """Return the height of a figure, whose legend and axis take the same room at any width."""
    return 1.25 + 0.3 * width_in


def _plain(text: str) -> str:
    """Return a text in which Matplotlib finds no formula."""
    return printable(text).replace("$", r"\$")


def _add_legend(figure: Figure, renderer: RendererBase) -> None:
    """Add a legend above the axes, in as many columns as fit."""
    (axes,) = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    for columns in range(min(len(labels), 4), 0, -1):
        legend = figure.legend(handles, labels, loc="outside upper center", ncols=columns)
        width = legend.get_window_extent(renderer).width / figure.dpi
        if width <= figure.get_figwidth() or columns == 1:
            return
        legend.remove()
