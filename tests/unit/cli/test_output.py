"""The commands that notes and errors advise."""

import pytest

from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("see `clusterctl logs 3 -f`", "see `clusterctl --cluster b logs 3 -f`"),
        (
            "`clusterctl jobs`, `clusterctl ssh -- ls -l`",
            "`clusterctl --cluster b jobs`, `clusterctl --cluster b ssh -- ls -l`",
        ),
        ("`clusterctl down --cluster c`", "`clusterctl down --cluster c`"),
        ("| see `clusterctl jobs`", "| see `clusterctl jobs`"),
        ("clusterctl jobs", "clusterctl jobs"),
    ],
)
def test_advice_is_for_the_cluster_of_the_option(
    line: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen(json=False, color=False, cluster="b").note(line)
    assert capsys.readouterr().err == f"{shown}\n"
    Screen(json=False, color=False).note(line)
    assert capsys.readouterr().err == f"{line}\n"


def test_fix_of_an_error_is_for_the_cluster_of_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = UsageError("no", code="x", fix="run `clusterctl jobs`")
    Screen(json=False, color=False, cluster="b").error(error)
    assert "`clusterctl --cluster b jobs`" in capsys.readouterr().err
    # Names of several clusters are no advice for one.
    Screen(json=False, color=False, cluster="b,c").error(error)
    assert "`clusterctl jobs`" in capsys.readouterr().err
