"""The page of a report in Chromium: all charts are drawn, and neither requests nor a run's scripts
happen.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from clusterctl.runs.find import Row
from clusterctl.runs.page import Chart, Report, Section, Series, Table, write_report
from clusterctl.runs.report import report_of
from clusterctl.util.assets import data_folder
from tests.unit.runs.made import made_run
from tests.unit.runs.test_charts import speeds, sums, sweep, used
from tests.unit.runs.test_report import HOSTILE, NODES, charts, hostile, swept, trained

pytestmark = pytest.mark.platform("real", "browser")

CHROMIUM = "/usr/bin/chromium"
PHONE = (380, "light")
SCREEN = (1400, "dark")
# How many pixels of each canvas are not as empty ones are.
DRAWN = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.filter((value, at) => at % 4 === 3 && value > 0).length;
})"""
# The labels of the ticks of each axis of each chart.
TICKS = """() => [...document.querySelectorAll("canvas")].flatMap((canvas) => {
    const axes = Object.values(Chart.getChart(canvas).scales);
    return axes.map(({ ticks }) => ticks.map((tick) => String(tick.label)));
})"""
# Tables that are wider than their place, and labels that are wider than their canvas.
CUT = """() => [...document.querySelectorAll(".table, .head, figcaption")]
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"""
# The data of the first chart's datasets, and the type of its value axis.
FIRST = """() => {
    const chart = Chart.getChart(document.querySelector("canvas"));
    const sets = chart.data.datasets.map((one) => [one.label, one.data.length, Boolean(one.isBehind)]);
    return [sets, chart.scales.y.type, chart.legend.legendItems.map((one) => one.text)];
}"""
# Of each chart, by its title: its axes, its legend, its share of the canvas, and the colors of its
# runs.
DRAWN_CHARTS = """() => Object.fromEntries([...document.querySelectorAll("figure")].map((figure) => {
    const chart = Chart.getChart(figure.querySelector("canvas"));
    const labels = (ticks) => ticks.map(({ label }) => label).filter(Boolean);
    const axis = ({ type, min, max, ticks }) => ({ type, min, max, ticks: labels(ticks) });
    const sets = chart.data.datasets;
    return [figure.querySelector("figcaption").innerText, {
        x: axis(chart.scales.x), y: axis(chart.scales.y),
        legend: chart.legend.legendItems.map((one) => one.text),
        share: chart.chartArea.height / chart.height,
        colors: sets.map((one) => [one.run, one.borderColor]),
        radius: sets.map((one) => one.pointRadius),
        pressed: [...figure.querySelectorAll("button[aria-pressed=true]")].map((one) => one.innerText),
        card: getComputedStyle(figure).backgroundColor,
    }];
}))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as program:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        with program.chromium.launch(executable_path=CHROMIUM, args=sandbox) as browser:
            yield browser


def small(out: Path) -> Row:
    """A run with values that have the same labels if they are rounded."""
    steps = range(1, 60)
    values = [
        {"step": n, "loss": 1e-4 + n * 1e-6, "norm": n * 1e-9, "big": 1e9 + n, "one": n % 2}
        for n in steps
    ]
    return Row(made_run(out, 9, metrics=values))


def paths(out: Path, number: int) -> Row:
    """A run with a long word without a place to break it."""
    return Row(made_run(out, number, args=["--model-folder", f"/shared/{'home/' * 12}{number}"]))


def open_page(browser: Browser, report: Report, path: Path, **view: Any) -> Page:
    write_report(report, path)
    page = browser.new_page(**view)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    return page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [trained(folder, number, slow=number) for number in (1, 2)]
    return {
        "one": report_of(runs[:1]),
        "two": report_of(runs),
        "sweep": report_of([swept(folder, 30)]),
        "small": report_of([small(folder)]),
        "nodes": report_of([used(folder / "nodes", {node: [(5, 50), (50, 60)] for node in NODES})]),
        "eight": report_of(
            [Row(made_run(folder / "eight", n, metrics=speeds(n))) for n in range(1, 9)]
        ),
        "far": report_of([sweep(folder / "far", [{"lr": lr} for lr in (0.1, 1)], [0.1, 1e6])]),
        "sums": report_of([sums(folder / "sums", n, {"mpi": [n, 0.1, 0.2, 0.3]}) for n in (1, 2)]),
        "paths": report_of([paths(folder / "paths", 1)]),
        "more paths": report_of([paths(folder / "paths", n) for n in (2, 3, 4)]),
        "hostile": report_of([Row(hostile(tmp_path_factory.mktemp("hostile")))]),
        "empty": Report(HOSTILE, [HOSTILE]),
    }


@pytest.mark.parametrize(
    ("which", "view"),
    [
        *(("one", PHONE), ("sweep", PHONE), ("hostile", PHONE), ("empty", SCREEN)),
        ("more paths", PHONE),
    ],
)
def test_report_draws_all_charts_without_requests(
    browser: Browser, reports: dict[str, Report], tmp_path: Path, which: str, view: tuple[int, Any]
) -> None:
    (width, scheme), path = view, tmp_path / "report.html"
    write_report(reports[which], path)
    messages: list[str] = []
    requests: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    drawn = page.evaluate(DRAWN)
    assert len(drawn) == sum(len(one.charts) for one in reports[which].sections)
    assert all(pixels > 500 for pixels in drawn), drawn
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing is cut off
    assert page.evaluate(CUT) == []
    for labels in page.evaluate(TICKS):
        shown_labels = [label for label in labels if label]
        assert len(shown_labels) == len({*shown_labels}), labels
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    assert is_dark is (scheme == "dark")
    assert page.title() == reports[which].as_dict()["title"]
    assert messages == []
    assert requests == [path.as_uri()]
    page.close()


def test_report_redraws_on_a_change_of_colors_and_prints_all(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    page = open_page(browser, reports["one"], tmp_path / "report.html", color_scheme="light")
    before = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "(old) => document.querySelector('canvas').toDataURL() !== old", arg=before
    )
    page.emulate_media(media="print", color_scheme="light")
    assert len(page.pdf(format="A4")) > 20_000
    assert page.locator("figcaption").all_inner_texts() == list(charts(reports["one"]))
    page.close()


# Of each canvas on paper: whether it stays in its card, however wide it was on the screen.
FITS = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
    canvas.style.width = "3000px";
    const card = canvas.closest("figure").getBoundingClientRect();
    return canvas.getBoundingClientRect().right <= card.right;
})"""


def test_report_printed_charts_stay_in_their_cards(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    page = open_page(browser, reports["one"], tmp_path / "report.html")
    page.emulate_media(media="print")
    fits = page.evaluate(FITS)
    page.close()
    assert len(fits) > 1
    assert all(fits)


def test_report_charts_have_values_without_a_mouse(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    """A keyboard opens the table of a chart's values, also without JavaScript."""
    path = tmp_path / "report.html"
    write_report(reports["one"], path)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    figure = page.locator("figure").first
    table = figure.locator("table")
    assert not table.is_visible()
    figure.locator("summary").press("Enter")
    assert table.is_visible()
    assert table.locator("thead").inner_text().split()[-4:] == [
        "first",
        "last",
        "lowest",
        "highest",
    ]
    assert table.locator("td").first.inner_text() == "loss"
    context.close()


# How a reader without red or green cones sees linear RGB: Machado, Oliveira and Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), severity 1.0.
PROTANOPE = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
DEUTERANOPE = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
ALL_CONES = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)


def lab(color: str, cones: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """Return the CIELAB coordinates of a color such as #2f7ed8, as a reader with these cones sees
    it.
    """
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in cones
    ]
    ratios = [sum(a * b for a, b in zip(row, seen, strict=True)) / sum(row) for row in TO_XYZ]
    x, y, z = (r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(
    "cones", [ALL_CONES, PROTANOPE, DEUTERANOPE], ids=["all", "no-red", "no-green"]
)
def test_report_colors_of_lines_differ_for_all_readers(
    cones: tuple[tuple[float, ...], ...],
) -> None:
    """A difference of 2.3 is just noticeable; lines on a page need more."""
    script = (data_folder("templates") / "report" / "report.js").read_text()
    colors = re.findall(r'"(#[0-9a-f]{6})"', script.split("const COLORS = ")[1].split(";")[0])
    assert len(colors) == 8
    pairs = combinations([lab(color, cones) for color in colors], 2)
    assert min(math.dist(*pair) for pair in pairs) > 15


# Words that must not be torn, and the number of lines that each is on. The names of cards, and
# their places.
WORDS = """() => [...document.querySelectorAll(".whole")]
    .map((one) => [one.innerText, one.getClientRects().length])"""
NAMES = """() => [...document.querySelectorAll(".wide td:first-child")].map((one) => {
    const card = one.parentElement.getBoundingClientRect(), place = one.getBoundingClientRect();
    return [one.innerText, place.left - card.left, place.top - card.top];
})"""


def test_report_cards_are_readable_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    words = " ".join(f"--an-option-{'x' * n} demo-train-{n}" for n in range(12))
    runs = [trained(tmp_path, number, lr=number / 10, note=words) for number in (1, 2, 3)]
    view = {"viewport": {"width": 380, "height": 900}}
    page = open_page(browser, report_of(runs[:1]), tmp_path / "report.html", **view)
    parts = page.evaluate(WORDS)
    assert {*words.split()} <= {word for word, _ in parts}
    assert {lines for _, lines in parts} == {1}
    page.close()
    page = open_page(browser, report_of(runs), tmp_path / "report.html", **view)
    names = page.evaluate(NAMES)
    assert {"lr", *(row.shown for row in runs)} <= {name for name, *_ in names}
    assert {(left, top) for _, left, top in names} == {(0, 0)}
    page.close()


def test_defaults_are_shown_after_a_click(browser: Browser, tmp_path: Path) -> None:
    """The page has headings in tables, and above the list of missing data."""
    rows = [["first", "", ""], ["x", "1", "2"]]
    tables = [
        Table(("", "a", "b"), rows),
        Table(("option", "value"), [("hidden", "1")], "Defaults", folded=True),
    ]
    report = Report("x", ["y"], missing=["z"], sections=[Section("Configuration", tables=tables)])
    page = open_page(browser, report, tmp_path / "report.html")
    assert page.locator("h3").all_inner_texts() == ["Missing"]
    assert page.locator("th[colspan]").all_inner_texts() == ["first"]
    cell = page.get_by_text("hidden")
    assert not cell.is_visible()
    page.get_by_text("Defaults").click()
    assert cell.is_visible()
    page.close()
    assert "| **first** |" in report.as_markdown()


def test_chart_is_smoothed_and_logarithmic_on_request(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    page = open_page(browser, reports["one"], tmp_path / "report.html")
    sets, scale, _ = page.evaluate(FIRST)
    assert (sets, scale) == ([["loss", 40, False], ["eval_loss", 1, False]], "linear")
    buttons = page.locator("figure").first.get_by_role("button")
    assert buttons.all_inner_texts() == ["smooth"]
    buttons.nth(0).click()
    sets, _, _ = page.evaluate(FIRST)
    assert sets == [["loss", 40, False], ["loss", 40, True], ["eval_loss", 1, False]]
    page.close()


def test_chart_with_a_hidden_line_begins_logarithmic(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    """The toggle shows that, and changes the axis. The loss of the task that diverged begins at
    1e7.
    """
    page = open_page(browser, reports["far"], tmp_path / "far.html")
    drawn = page.evaluate(DRAWN_CHARTS)
    both = {title: drawn[title] for title in ("loss by lr", "loss")}
    assert [(one["y"]["type"], one["pressed"]) for one in both.values()] == [
        ("logarithmic", ["log"])
    ] * 2
    assert both["loss"]["y"]["ticks"][-1] == "1e+7"
    page.get_by_role("button", name="log").first.click()
    one = page.evaluate(DRAWN_CHARTS)["loss by lr"]
    assert (one["y"]["type"], one["pressed"]) == ("linear", [])
    page.close()
    page = open_page(browser, reports["eight"], tmp_path / "eight.html")
    assert page.evaluate(FIRST)[1] == "linear"
    page.locator("figure").first.get_by_role("button", name="log").click()
    assert page.evaluate(FIRST)[1] == "logarithmic"
    ticks = [float(tick) for tick in next(iter(page.evaluate(DRAWN_CHARTS).values()))["y"]["ticks"]]
    assert ticks == [float(f"{tick:.1g}") for tick in ticks]
    page.close()


def test_charts_of_nodes_have_the_axis_of_the_job(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    """From 0 to the end after 60 s, like the loss. Amounts begin at 0: each sample has 512 MiB."""
    page = open_page(browser, reports["nodes"], tmp_path / "report.html")
    drawn = page.evaluate(DRAWN_CHARTS)
    titles = ("Loss over time", "CPU", "Memory")
    assert [(drawn[title]["x"]["min"], drawn[title]["x"]["max"]) for title in titles] == [
        (0, 60)
    ] * 3
    assert [drawn[title]["y"]["min"] for title in titles[1:]] == [0, 0]
    page.close()


def test_single_point_between_gaps_is_a_marker(browser: Browser, tmp_path: Path) -> None:
    line = Series("cpu", [(0, 5.0), (1, 6.0), (2, None), (3, 7.0)])
    report = Report("x", ["y"], sections=[Section("Nodes", charts=[Chart("CPU", [line])])])
    page = open_page(browser, report, tmp_path / "report.html")
    (radius,) = page.evaluate(DRAWN_CHARTS)["CPU"]["radius"]
    assert [size > 0 for size in radius] == [False, False, False, True]
    page.close()


@pytest.mark.parametrize(
    ("unit", "highest", "labels"),
    [
        ("%", 99.9, ["0", "20", "40", "60", "80", "100"]),
        ("", 2e12, ["0", "5e+11", "1e+12", "1.5e+12", "2e+12"]),
    ],
)
def test_report_axes_have_possible_values_and_short_labels(
    browser: Browser, tmp_path: Path, unit: str, highest: float, labels: list[str]
) -> None:
    chart = Chart("x", [Series("x", [(0, 0.0), (1, highest)])], y=unit, from_zero=bool(unit))
    report = Report("x", ["y"], sections=[Section("x", charts=[chart])])
    page = open_page(browser, report, tmp_path / "report.html")
    assert page.evaluate(DRAWN_CHARTS)["x"]["y"]["ticks"] == labels
    page.close()


def test_results_by_size_are_points_on_a_logarithmic_axis(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    page = open_page(browser, reports["sums"], tmp_path / "report.html")
    (one,) = page.evaluate(DRAWN_CHARTS).values()
    assert one["x"]["type"] == "logarithmic"
    assert one["x"]["ticks"] == ["4 KiB", "16 KiB", "64 KiB", "256 KiB"]
    assert (one["y"]["type"], one["y"]["min"]) == ("linear", 0)
    assert one["legend"] == ["demo-1-train", "demo-2-train"]
    assert min(one["radius"]) > 0
    page.close()


def luminance(color: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    channels = [int(color[at : at + 2], 16) for at in (1, 3, 5)] if color[0] == "#" else []
    channels = channels or [
        int(value) for value in color.removeprefix("rgb(").removesuffix(")").split(",")
    ]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (v / 255 for v in channels)
    ]
    return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("view", [PHONE, SCREEN])
def test_report_of_eight_runs_has_legible_colors(
    browser: Browser, reports: dict[str, Report], tmp_path: Path, view: tuple[int, Any]
) -> None:
    """Lines need a contrast of 3:1 (https://www.w3.org/TR/WCAG21/#non-text-contrast)."""
    viewport = {"width": view[0], "height": 900}
    page = open_page(
        browser, reports["eight"], tmp_path / "e.html", viewport=viewport, color_scheme=view[1]
    )
    drawn = page.evaluate(DRAWN_CHARTS)
    assert len(drawn) > 1
    colors = {tuple(pair) for chart in drawn.values() for pair in chart["colors"]}
    assert len(colors) == len(dict(colors)) == len({color for _, color in colors}) == 8
    lights = [
        luminance(next(iter(drawn.values()))["card"]),
        *(luminance(color) for _, color in colors),
    ]
    assert all(max(lights[0], one) + 0.05 >= 3 * (min(lights[0], one) + 0.05) for one in lights[1:])
    assert all(len(chart["legend"]) == 8 and chart["share"] > 0.5 for chart in drawn.values())
    page.close()


def test_report_draws_evaluations_last_with_one_legend_entry(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    page = open_page(browser, reports["two"], tmp_path / "report.html")
    runs = ["demo-1-train", "demo-2-train"]
    assert page.evaluate(FIRST)[2] == runs
    # Chart.js draws the first of these last.
    chart = "Chart.getChart(document.querySelector('canvas'))"
    order = page.evaluate(f"{chart}.getSortedVisibleDatasetMetas().map((one) => one.label)")
    assert order == [f"{run} {name}" for name in ("eval_loss", "loss") for run in reversed(runs)]
    page.close()
