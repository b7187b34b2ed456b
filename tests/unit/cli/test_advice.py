"""Commands in messages name the cluster that the user has chosen with -f or --cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.cli.advice import cluster_option, first_job, with_cluster
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, Quoted
from clusterctl.state.workspace import Workspace


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a cluster that is up."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    workspace = Workspace.of("second")
    workspace.root.mkdir(parents=True)
    workspace.inventory.write_text("{}")
    return "second"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run `clusterctl logs 7 -f`", "run `clusterctl logs b/7 -f`"),
        ("`clusterctl wait 7 m8_1 9_[1-3]`", "`clusterctl wait b/7 b/m8_1 b/9_[1-3]`"),
        ("`clusterctl runs show 7`", "`clusterctl runs show b/7`"),
        ("`clusterctl cancel ID`", "`clusterctl cancel b/ID`"),
        ("`clusterctl jobs --all`", "`clusterctl jobs --cluster b --all`"),
        ("`clusterctl logs demo-7-train`", "`clusterctl logs --cluster b demo-7-train`"),
        ("`clusterctl runs`", None),
        ("`clusterctl runs show demo-7-train`", None),
        ("`clusterctl up`, then `clusterctl list`", "`clusterctl up --cluster b`, then `clusterctl list`"),
        ("`clusterctl node drain n1`", "`clusterctl node drain --cluster b n1`"),
        ("`clusterctl ssh n1 -- ls -f x`", "`clusterctl ssh --cluster b n1 -- ls -f x`"),
        ("`clusterctl attach`", "`clusterctl attach --cluster b`"),
        ("`clusterctl attach LOGIN`", None),
        ("'clusterctl down' of ada", None),
        ("`clusterctl down --cluster a`", None),
        ("`clusterctl replay a/7 --failed`", None),
        ("`clusterctl up -f FILE`", None),
        ("`clusterctl storage remove b`", None),
        ("`clusterctl upgrade`", None),
        ("clusterctl up has ended", None),
    ],
)  # fmt: skip
def test_with_cluster_adds_the_option_to_commands_about_a_cluster(
    text: str, expected: str | None
) -> None:
    assert with_cluster(text, "--cluster b", "b") == (expected or text)


def test_with_cluster_without_a_choice_changes_nothing() -> None:
    assert with_cluster("`clusterctl up`", "", "") == "`clusterctl up`"


def test_cluster_option_is_the_users_choice(cluster: str) -> None:
    assert cluster_option(None, cluster) == "--cluster second"
    assert cluster_option(Path("my spec.yaml"), None) == "--file 'my spec.yaml'"
    assert cluster_option(None, "unknown") == ""
    assert cluster_option(None, None) == ""


def test_screen_completes_commands_in_results_notes_and_errors(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ClusterctlError("it failed", code="failed", fix="run `clusterctl up`")
    screen = Screen(json=False, color=False, cluster=cluster)
    screen.result({}, "`clusterctl logs 7`")
    screen.note("`clusterctl jobs`")
    screen.error(error)
    out, err = capsys.readouterr()
    assert out == "`clusterctl logs second/7`\n"
    assert "`clusterctl jobs --cluster second`" in err
    assert "`clusterctl up --cluster second`" in err
    Screen(json=True, color=False, cluster=cluster).error(error)
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert failure["fix"] == "run `clusterctl up --cluster second`"


def test_screen_shows_what_others_wrote_unchanged(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells of tables, causes of errors, and quoted texts."""
    theirs = "`clusterctl down`"
    screen = Screen(json=False, color=False, cluster=cluster)
    screen.result({}, *screen.table(["NAME"], [[theirs]]), Quoted(theirs))
    screen.error(ClusterctlError("it failed", code="failed", why=theirs))
    out, err = capsys.readouterr()
    assert out.count(theirs) == 2
    assert theirs in err
    assert cluster not in out + err


@pytest.mark.parametrize(("nodes", "count"), [(0, 1), (1, 1), (2, 2), (16, 2)])
def test_first_job_fits_the_default_partition(nodes: int, count: int) -> None:
    assert f" --nodes {count} --follow" in first_job(nodes)
    assert f" --nodes {count} --time 5m " in first_job(nodes, minutes="5")
