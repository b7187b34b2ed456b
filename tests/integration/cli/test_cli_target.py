"""Verbs that need only a cluster's name: a wrong or missing spec file does not stand in their
way.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.load import read_name
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.run_names import find_run
from tests.support.messages import codes, condition, shows
from tests.support.processes import holding_lock
from tests.support.verbs import Clusterctl

SPEC = "version: 1\nname: demo\nprovider: {type: local}\npartitions: [{name: train, nodes: 2}]\n"
WRONG = {
    "an unknown key": SPEC.replace("nodes", "noodles"),
    "no YAML": SPEC.replace("[", ""),
    "a quoted name, and a comment": SPEC.replace("demo", "'demo' # ours") + "what: ever\n",
    "a value that can't be": SPEC.replace("2", "-2"),
    "conflicting lines of a merge": "<<<<<<< ours\n" + SPEC,
}
UNREADABLE = {
    "no name": SPEC.replace("name: demo\n", ""),
    "no name of a cluster": SPEC.replace("demo", "../demo"),
    "two names": SPEC + "name: other\n\t",
    "nothing": "",
    "no text": "\x00",
}


VERBS = [
    ["status"],
    ["jobs"],
    ["cancel", "1"],
    ["collect"],
    ["logs", "1"],
    ["ssh"],
    ["submit", "probe"],
]
# Each of them finds its cluster in the same way; one that reads and one that writes.
FEW_VERBS = [["status"], ["submit", "probe"]]


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_wrong_spec_file_has_a_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    name, wrong = read_name(tmp_path / "cluster.yaml")
    assert name == "demo"
    assert isinstance(wrong, SpecError)


def test_name_alone_is_read_of_a_cluster_that_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "demo").mkdir(parents=True)
    file = tmp_path / "cluster.yaml"
    read: list[Path] = []
    monkeypatch.setattr(
        "clusterctl.spec.load.read_name", lambda path: read.append(path) or read_name(path)
    )

    def name_of(text: str) -> str:
        file.write_text(text)
        read.clear()
        return ChosenCluster(file).workspace().root.name

    wrong = WRONG["an unknown key"]
    quoted = WRONG["a quoted name, and a comment"]
    assert (name_of(wrong), name_of(quoted), read) == ("demo", "demo", [])
    assert (name_of(SPEC.replace("demo", "other")), read) == ("other", [file])
    for text in (SPEC.replace("demo", "demo_x"), wrong + "name: other\n"):
        with pytest.raises(UsageError):
            name_of(text)


def test_wrong_file_option_is_refused_without_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for wrong in (
        ChosenCluster(name="No"),
        ChosenCluster(Path("none.yaml")),
        ChosenCluster(Path("x"), "y"),
    ):
        with pytest.raises(UsageError):
            find_run("12", wrong)
    Path("cluster.yaml").write_text("nonsense")
    with pytest.raises(UsageError):
        find_run("12")
    # Such a name needs no cluster.
    assert find_run("demo/12").full_name == "demo/12"


def not_up(cli: Clusterctl, name: str, *argv: str, code: str = "not-up") -> bool:
    """Return whether the one failure of a verb is that this cluster is not up."""
    result = cli("-o", "json", *argv, rc=2)
    return codes(result) == [code] and repr(name) in result.json["failures"][0]["cause"]


def unknown(cli: Clusterctl, name: str, *argv: str) -> bool:
    """Return whether the one failure of a verb is that no cluster has this name."""
    return not_up(cli, name, "--cluster", name, *argv, code="not-found/cluster")


def test_wrong_spec_still_names_its_cluster(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(WRONG["an unknown key"])
    (cli.home / "demo").mkdir(parents=True)
    assert not_up(cli, "demo", "status")
    # A verb that needs the spec still refuses it.
    assert "cluster.yaml:" in cli("up", rc=2).stderr


@pytest.mark.parametrize("verb", ["status", "collect", "down"])
def test_cluster_never_up_reports_wrong_spec_file(cli: Clusterctl, verb: str) -> None:
    (cli.cwd / "cluster.yaml").write_text(WRONG["an unknown key"])
    result = cli(verb, "-f", "cluster.yaml", rc=2)
    first, why = result.stderr.splitlines()[:2]
    assert shows(first, "not-up")
    assert first.endswith("(cluster.yaml)")
    assert why.startswith("  why: cluster.yaml:4:28: partitions[0].noodles: ")
    assert why.endswith("mean nodes?)")
    assert "note:" not in result.stderr
    assert not cli.home.exists()


@pytest.mark.parametrize("argv", VERBS, ids=lambda argv: str(argv[0]))
def test_verb_about_a_cluster_that_is_up_works_with_a_wrong_spec(
    cli: Clusterctl, argv: list[str]
) -> None:
    (cli.cwd / "cluster.yaml").write_text(WRONG["an unknown key"])
    assert not_up(cli, "demo", *argv)


# Each has its word in docs/restarts.md.
NEED_A_SPEC = [
    ["plan"],
    ["validate"],
    ["doctor"],
    ["bundle"],
    ["image", "bake"],
    ["storage", "list"],
    ["orphans", "list"],
    ["submit", "probe", "--dry-run"],
]


@pytest.mark.parametrize("argv", NEED_A_SPEC, ids=" ".join)
def test_verb_that_compares_the_spec_names_its_fault(cli: Clusterctl, argv: list[str]) -> None:
    (cli.cwd / "cluster.yaml").write_text(WRONG["an unknown key"])
    (cli.home / "demo").mkdir(parents=True)
    assert "partitions[0].noodles" in cli(*argv, rc=2).stderr


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_spec_with_no_name_or_two_names_has_no_cluster(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(UsageError):
        read_name(tmp_path / "cluster.yaml")


def test_spec_missing_or_without_name_is_error_with_fix(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(UNREADABLE["no name"])
    assert "--cluster NAME" in cli("status", rc=2).stderr
    assert "--cluster NAME" in cli("-f", "gone.yaml", "down", "--yes", rc=2).stderr


@pytest.mark.parametrize("name", ["../demo", "", "Demo", "a" * 21])
def test_cluster_option_that_is_not_a_name_is_refused(cli: Clusterctl, name: str) -> None:
    assert unknown(cli, name, "status")
    assert not_up(cli, name, "status", "--cluster", name, code="not-found/cluster")


def test_empty_name_does_not_mean_the_cluster_here(cli: Clusterctl) -> None:
    """A variable of a script may be empty."""
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    (cli.home / "demo").mkdir(parents=True)
    for argv in (
        ["down", "--yes", "--cluster", ""],
        ["detach", "--cluster", ""],
        ["orphans", "remove", "", "--yes"],
    ):
        assert not_up(cli, "", *argv, code="not-found/cluster"), argv
    assert (cli.home / "demo").is_dir()


@pytest.mark.parametrize(
    "argv",
    [["down"], ["down", "--yes"], ["detach"], ["up"], ["plan"], ["doctor"]],
    ids=" ".join,
)
def test_cluster_that_does_not_exist_leaves_no_file(cli: Clusterctl, argv: list[str]) -> None:
    assert unknown(cli, "nope", *argv)
    assert not cli.home.exists()


def test_file_option_with_cluster_option_is_refused(cli: Clusterctl) -> None:
    assert "--cluster" in cli("-f", "demo.yaml", "--cluster", "demo", "status", rc=2).stderr


def test_up_by_name_spec_breaks_newer_rule_repairs_cluster(
    cli: Clusterctl,
) -> None:
    gcp = SPEC.replace("local", "gcp, project: my-project, zone: us-central1-a")
    gcp += "users: [{name: ada, uid: 1000}]\n"
    (cli.home / "demo").mkdir(parents=True)
    (cli.home / "demo" / "spec.yaml").write_text(gcp)
    result = cli("--cluster", "demo", "-o", "json", "validate")
    assert result.json["nodes"] == 2
    assert shows(result.stderr, "uid-maybe-taken")
    assert "note: users[0].uid: " in result.stderr
    (cli.cwd / "cluster.yaml").write_text(gcp)
    assert unknown(cli, "other", "up")
    # A file is corrected.
    assert codes(cli("-o", "json", "validate", rc=2)) == ["uid-maybe-taken"]


def test_name_is_enough_to_look_for_a_lost_local_cluster(cli: Clusterctl) -> None:
    found = cli("-o", "json", "orphans", "list", "other").json
    assert (found["cluster"], found["provider"], found["orphans"]) == ("other", "local", [])
    assert codes(cli("-o", "json", "orphans", "list", "../x", rc=2)) == ["not-found/cluster"]


def up(cli: Clusterctl, *names: str) -> None:
    for name in names:
        (cli.home / name).mkdir(parents=True)
        # No cluster, which is said only where it is asked.
        (cli.home / name / "hosts.json").write_text("{}")


def test_target_without_a_spec_is_the_only_cluster_that_is_up(cli: Clusterctl) -> None:
    up(cli, "demo")
    for argv in [*VERBS, ["doctor"]]:
        result = cli(*argv, rc=None)
        assert shows(result.stderr.splitlines()[0], "only-cluster-up"), result
        assert "'demo'" in result.stderr.splitlines()[0]
        assert result.rc == 2
    assert "cluster 'local'" in cli("validate").stdout
    assert "built-in" in cli("plan").stderr
    (cli.cwd / "cluster.yaml").write_text(SPEC.replace("demo", "mine"))
    assert not_up(cli, "mine", "status")


def test_target_among_several_clusters_needs_a_name_unless_built_in(cli: Clusterctl) -> None:
    up(cli, "demo", "other")
    result = cli("-o", "json", "status", rc=2)
    assert codes(result) == ["not-found/cluster-name"]
    assert "up: demo, other\n" in result.stderr
    assert "`--cluster demo`" in result.stderr
    up(cli, "local")
    assert shows(cli("status", rc=2).stderr, "built-in-spec")


def test_down_without_spec_names_cluster_and_yes_needs_name(cli: Clusterctl) -> None:
    up(cli, "demo")
    stderr = cli("down", rc=2).stderr
    assert shows(stderr, "needs-confirmation")
    assert all(value in stderr for value in ("cluster 'demo'", "--yes"))
    for argv in (["down", "--yes"], ["down", "--yes", "--discard"]):
        assert codes(cli("-o", "json", *argv, rc=2)) == ["not-found/cluster-name"]
    assert (cli.home / "demo" / "hosts.json").exists()


@pytest.mark.parametrize("argv", FEW_VERBS)
def test_error_of_an_unreachable_cluster_names_the_running_command(
    cli: Clusterctl, argv: list[str]
) -> None:
    with holding_lock(cli.home / "local") as raising:
        (failure,) = cli("-o", "json", *argv, rc=1).json["failures"]
    assert condition(failure) == "in-use/cluster"
    assert f" (pid {raising.pid}) " in failure["cause"]
    assert shows(failure["cause"], "not-up")
    assert shows(cli(*argv, rc=2).stderr, "not-up")


@pytest.mark.parametrize("argv", [["up"], ["down", "--yes"]], ids=lambda argv: str(argv[0]))
def test_second_command_fails_at_once_or_waits_with_wait(cli: Clusterctl, argv: list[str]) -> None:
    with holding_lock(cli.home / "local") as raising:
        result = cli("-o", "json", *argv, "--no-wait", rc=1)
        assert codes(result) == ["in-use/cluster"]
        assert f" (pid {raising.pid}) " in result.stderr
        process = cli.start(*argv)
        assert process.stderr is not None
        stderr = next(line for line in process.stderr if f" (pid {raising.pid}) " in line)
        assert " 10 minutes\n" in stderr
        process.send_signal(2)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    # Nothing was begun, so nothing is half done.
    assert rest == "interrupted\n"
