"""The page of a report in Chromium: all charts are drawn, and neither requests nor a run's scripts happen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from clusterctl.runs.find import Row
from clusterctl.runs.page import Report, write_report
from clusterctl.runs.report import report_of
from tests.support.sweeps import in_sweep
from tests.unit.runs.test_report import HOSTILE, charts, hostile, swept, trained

pytestmark = pytest.mark.platform("real", "browser")

CHROMIUM = "/usr/bin/chromium"
PHONE, SCREEN = (380, "light"), (1400, "dark")
# How many pixels of each canvas are not as empty ones are.
DRAWN = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.filter((value, at) => at % 4 === 3 && value > 0).length;
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as program:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        with program.chromium.launch(executable_path=CHROMIUM, args=sandbox) as browser:
            yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [trained(folder, number, slow=number) for number in (1, 2)]
    return {
        "one": report_of(runs[:1]),
        "two": report_of(runs),
        "sweep": report_of([swept(folder, 30)]),
        "hostile": report_of([Row(hostile(tmp_path_factory.mktemp("hostile")))]),
        "empty": Report(HOSTILE, [HOSTILE]),
    }


@pytest.mark.parametrize(
    ("which", "view"),
    [
        *(("one", view) for view in (PHONE, SCREEN)),
        *(("two", SCREEN), ("sweep", PHONE), ("hostile", PHONE), ("empty", SCREEN)),
        *in_sweep(("two", PHONE), ("sweep", SCREEN), ("hostile", SCREEN), ("empty", PHONE)),
        *in_sweep(("one", (380, "dark")), ("one", (1400, "light"))),
    ],
)
def test_all_is_drawn_and_nothing_is_asked_for(
    browser: Browser, reports: dict[str, Report], tmp_path: Path, which: str, view: tuple[int, Any]
) -> None:
    (width, scheme), path = view, tmp_path / "report.html"
    write_report(reports[which], path)
    said: list[str] = []
    asked: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    drawn = page.evaluate(DRAWN)
    assert len(drawn) == sum(len(one.charts) for one in reports[which].sections)
    assert all(pixels > 500 for pixels in drawn), drawn
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing is cut off
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    assert is_dark is (scheme == "dark")
    assert page.title() == reports[which].as_dict()["title"]
    assert said == []
    assert asked == [path.as_uri()]
    page.close()


def test_a_change_of_the_scheme_draws_anew_and_paper_has_all(
    browser: Browser, reports: dict[str, Report], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(reports["one"], path)
    page = browser.new_page(color_scheme="light")
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    before = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("(old) => document.querySelector('canvas').toDataURL() !== old", arg=before)
    page.emulate_media(media="print", color_scheme="light")
    assert len(page.pdf(format="A4")) > 20_000
    assert page.locator("figcaption").all_inner_texts() == list(charts(reports["one"]))
    page.close()
