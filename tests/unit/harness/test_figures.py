"""The figures of the source: what each counts, and that a higher one fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import figures
from scripts.figures import Figure, Source

LONG = "def long():\n" + "    pass\n" * 50
MODULE = '''\
"""What others do.  # none here"""
import clusterctl.b  # one who
class C:
    """Nothing."""
def f(report: Callable[[], None], say: Callable[[], None]) -> None:
    """Do it.

    Whose? Nobody knows, somebody asks one of the nodes, one node and the one.
    """
    def inner():
        import os
        "what is no docstring"
'''
UNITS = """\
# A comment of its own line has as many words as it needs.
SIZE = 3  # mebibytes per second
table = f(x)  # [batch, heads, positions, channels] of a layer
limit = 3  # because the server takes no more
"""


def count(**texts: str) -> dict[str, Figure]:
    """The figures of files; in their names `__` stands for a slash."""
    files = [Source(Path(f"{name.replace('__', '/')}.py"), text) for name, text in texts.items()]
    return figures.figures([Source(Path("payload/x.py"), ""), *files])


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("functions over 50 lines", {"clusterctl__a": LONG}, 1),
        ("functions over 50 lines", {"clusterctl__a": LONG.replace("    pass\n", "", 1)}, 0),
        ("length of the longest function", {"clusterctl__a": LONG, "clusterctl__b": MODULE}, 51),
        ("functions with a callback", {"clusterctl__a": MODULE}, 1),
        ("imports inside functions", {"clusterctl__a": MODULE}, 1),
        ("mutual imports", {"clusterctl__a": MODULE, "clusterctl__b": "from clusterctl import a\n"}, 1),
        ("mutual imports", {"clusterctl__a": MODULE, "clusterctl__b": "from clusterctl.c import a\n"}, 0),
        ("files over 500 lines", {"clusterctl__a": "\n" * 501, "clusterctl__b": "\n" * 500}, 1),
        (
            "files under 80 lines with one importer",
            {
                "clusterctl__a": MODULE,
                "clusterctl__b": "\n" * 79,
                "clusterctl__c": "import clusterctl.a\n" + "\n" * 80,
                "clusterctl__d": "import clusterctl.a\n" + "\n" * 80,
            },
            1,
        ),
        (
            "files that may ask for the provider",
            {"clusterctl__x__a": "if spec.provider == x: ...", "clusterctl__spec__a": "x = 'gcp'"},
            1,
        ),
        ("assertions on prose", {"tests__a": 'assert "it is not there" in x, "this is not counted"'}, 1),
        ("assertions on prose", {"tests__a": 'assert f"{x} is not\\n" in (\n    "at the place"\n)'}, 0),
        ("assertions on prose", {"tests__a": 'assert f"{x} is not {y}" in z\nraises(E, match="x")'}, 2),
        ("words of our own", {"clusterctl__a": "def boost(x):\n    return x  # it will Mend\n"}, 2),
        (
            "vague names in clusterctl/x",
            {"clusterctl__x__a": "found = [f(one=1) for one in x]\nother = 1"},
            2,
        ),
        ("vague names in payload", {"payload__a": "def f(why):\n    return said\n"}, 1),
        ("comments at a line's end in payload", {"payload__a": UNITS}, 1),
        ("names of tests over 60 characters", {"tests__a": f"def test_{'x' * 56}(): ..."}, 1),
        ("names of tests over 60 characters", {"tests__a": f"def test_{'x' * 55}(): ..."}, 0),
        ("lines of clusterctl", {"clusterctl__a": LONG, "tests__a": LONG}, 51),
        ("lines of tests", {"tests__unit__a": LONG, "tests__support__a": LONG}, 102),
        ("lines of tests/support", {"tests__unit__a": LONG, "tests__support__a": LONG}, 51),
    ],
)
def test_a_figure_counts(name: str, texts: dict[str, str], value: float) -> None:
    figure = count(**texts)[name]
    assert figure.value == value
    assert name.startswith("l") or len(figure.places) == value


def test_prose_of_pages_and_roles_is_counted_without_code() -> None:
    page = Source(Path("docs/a.md"), "Who?\n```\nwhose\n```\nNo `none`, and none.\n")
    tasks = Source(
        Path("ansible/roles/a/tasks/main.yml"), "- name: Ask somebody\n  file: what\n  x: 1  # none\n"
    )
    result = figures.figures([Source(Path("clusterctl/x.py"), ""), page, tasks])
    density = result["what, who, whose per 1,000 words of ansible"]
    names = ("what, who, whose in docs", "one, none, others in docs", "one, none, others in ansible")
    lines = [[place.split(": ")[0] for place in result[name].places] for name in names]
    assert lines == [["docs/a.md:1"], ["docs/a.md:5"], [f"{tasks.path}:1", f"{tasks.path}:3"]]
    assert density.value == 0


def test_prose_is_docstrings_and_comments() -> None:
    found = count(clusterctl__a=MODULE)
    who = found["what, who, whose per 1,000 words of clusterctl"]
    assert [place.split(": ")[0] for place in who.places] == [
        "clusterctl/a.py:1",
        "clusterctl/a.py:8",
        "clusterctl/a.py:2",
    ]
    one = found["one, none, others per 1,000 words of clusterctl"]
    assert len(one.places) == 6
    assert one.value == pytest.approx(1000 * 6 / 24)


def test_higher_figure_fails_and_shows_few_places() -> None:
    found = {"few": Figure(2, ["a.py:1: x", "b.py:2: y"]), "many": Figure(21, ["c.py:1: z"] * 21)}
    higher, lower = figures.compare(found, {"few": 1, "many": 20})
    assert [line.partition(",")[0] for line in higher] == [
        "few: 2",
        "    a.py:1: x",
        "    b.py:2: y",
        "many: 21",
    ]
    assert lower == []
    assert figures.compare(found, {"few": 2, "many": 21}) == ([], [])


def test_record_keeps_what_is_higher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "figures.json"
    found = count(clusterctl__a=MODULE)
    record.write_text(json.dumps(dict.fromkeys(found, 10**6) | {"imports inside functions": 0, "gone": 1}))
    monkeypatch.setattr(figures, "RECORD", record)
    monkeypatch.setattr(figures, "sources", lambda: [])
    monkeypatch.setattr(figures, "figures", lambda _: found)
    monkeypatch.setattr("sys.argv", ["figures.py", "--record"])
    assert figures.main() == 1
    assert json.loads(record.read_text()) == {name: figure.to_record for name, figure in found.items()} | {
        "imports inside functions": 0
    }


def test_the_project_s_figures_are_recorded() -> None:
    """A file that is read wrongly, or not at all, would let its figures rise."""
    found = figures.figures(figures.sources())
    assert found.keys() == json.loads(figures.RECORD.read_text()).keys()
    assert found["lines of clusterctl"].value > 20_000
    assert found["lines of ansible"].value > 5_000
    assert found["lines of tests/support"].value > 5_000
