"""Options are shown as the user gave them, in each view of a run; measurements are rounded."""

from __future__ import annotations

from pathlib import Path

from clusterctl.runs.find import Row
from clusterctl.runs.report import report_of
from tests.unit.runs.made import made_run

RATE = "0.000123456789"


def test_options_are_shown_to_the_last_digit(tmp_path: Path) -> None:
    metrics = [{"step": 1, "loss": 0.123456789}]
    rows = [
        Row(made_run(tmp_path, number, args=["--lr", rate], metrics=metrics))
        for number, rate in enumerate((RATE, "0.000123456788"), 1)
    ]
    assert rows[0].text("lr") == rows[0].text("config.lr") == RATE
    assert rows[0].text("loss") == "0.123457"
    for shown in (report_of(rows[:1]), report_of(rows)):
        cells = [
            cell
            for section in shown.sections
            for table in section.tables
            for row in table.rows
            if "lr" in row
            for cell in row
        ]
        assert RATE in cells
