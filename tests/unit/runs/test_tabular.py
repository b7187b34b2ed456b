"""Tables for LaTeX and for programs."""

from __future__ import annotations

import csv
import io

import pytest

from clusterctl.runs.tabular import as_csv, latex

HEAD = ["lr", "val_acc%", "n"]
ROWS = [["0.000123456", "0.150 ± 0.068", "5"], ["1e-05", "-", "0"], ["7", "1,234 ± 12 (n=4)", "5"]]


def test_latex_table_has_rules_aligned_numbers_and_comments() -> None:
    lines = latex(HEAD, ROWS, [False, True, True], ["not in a mean: a\nb"]).splitlines()
    assert lines[0].startswith("% ")
    assert lines[1:] == [
        r"% not in a mean: a\nb",
        r"\begin{tabular}{rrr}",
        r"\toprule",
        r"lr & val\_acc\% & n \\",
        r"\midrule",
        r"0.000123456 & $0.150 \pm 0.068$ & $5$ \\",
        r"1e-05 & -- & $0$ \\",
        r"7 & $1{,}234 \pm 12$ (n=4) & $5$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a_b & 5% of #1 {x}", r"a\_b \& 5\% of \#1 \{x\}"),
        ("$HOME\\~^", r"\$HOME\textbackslash{}\textasciitilde{}\textasciicircum{}"),
        ("a<b>c|d", r"a\textless{}b\textgreater{}c\textbar{}d"),
        ("-0.5", "$-0.5$"),
        ("1.5e+300", r"$1.5 \times 10^{300}$"),
        ("2026-01-31", "2026-01-31"),
        ("12 ms", "12 ms"),
        ("nan", "nan"),
        ("[0.9, 0.95]", "{}[0.9, 0.95]"),
        ("*.csv", "{}*.csv"),
    ],
)
def test_latex_cell_is_what_was_given(text: str, written: str) -> None:
    table = latex(["x"], [[text]], [True])
    assert f"\n{written} \\\\\n\\bottomrule" in table


@pytest.mark.parametrize("text", ["12e34567", "1e5", "1,234", "-0.5"])
def test_latex_option_that_looks_like_a_number_stays_as_it_was_given(text: str) -> None:
    table = latex(["x"], [[text]], [False])
    assert f"\n{text} \\\\\n\\bottomrule" in table


def test_csv_has_all_digits_and_empty_cells() -> None:
    rows = [[0.1 + 0.2, None, True, 'a,"b']]
    assert [*csv.reader(io.StringIO(as_csv(["a", "b", "c", "d"], rows)))] == [
        ["a", "b", "c", "d"],
        ["0.30000000000000004", "", "true", 'a,"b'],
    ]
