"""Figures for papers, as Matplotlib draws them."""

from __future__ import annotations

import re

import pytest

from tests.support.messages import shows
from tests.support.verbs import Clusterctl


def test_figure_for_a_paper_has_fonts_width_and_the_axis_of_finite_runs(
    cli_with_seeds: Clusterctl,
) -> None:
    runs = [str(number) for number in range(1, 7)]
    result = cli_with_seeds("runs", "figure", "loss", *runs)
    assert shows(result.stdout, "run-not-averaged")
    pdf = (cli_with_seeds.cwd / "loss.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert b"/CIDFontType2" in pdf  # TrueType
    assert b"/Type3" not in pdf
    width = float(pdf.split(b"/MediaBox [ 0 0 ")[1].split()[0])
    assert width == pytest.approx(3.3 * 72)
    cli_with_seeds("runs", "figure", "loss", *runs, "--out", "loss.svg", "--width", "6")
    svg = (cli_with_seeds.cwd / "loss.svg").read_text()
    # Matplotlib names each text that it draws as a path.
    texts = re.findall("<!-- (.*) -->", svg)
    assert {"lr=0.0001", "lr=1e-05 (1 diverged)", "loss", "step"} <= {*texts}
    assert "<text" not in svg
    assert 'width="432pt"' in svg
    cli_with_seeds("runs", "figure", "loss", *runs, "--out", "loss.csv", "-o", "json")
    assert (cli_with_seeds.cwd / "loss.csv").read_text().splitlines() == [
        "lr,step,loss,loss_sd,n",
        "0.0001,1,2.0,0.0,3",
        "0.0001,2,0.25,0.125,3",
        "1e-05,1,2.0,0.0,2",
        "1e-05,2,0.5625,0.08838834764831845,2",
    ]
