"""What `put` copies to the cluster of a folder that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterctl.errors import TransferError, UsageError
from clusterctl.jobs import files
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.workspace import Workspace
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused


@pytest.fixture(autouse=True)
def _cluster_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the cluster."""

    @contextmanager
    def session(chosen: ChosenCluster) -> Iterator[SimpleNamespace]:
        ledger = SimpleNamespace(workspace=Workspace(tmp_path / "workspace"))
        yield SimpleNamespace(
            transport=LocalTransport(),
            site=SimpleNamespace(upload_folder="."),
            ledger=ledger,
        )

    monkeypatch.setattr(files, "open_session", session)


def test_put_leaves_out_the_keys_of_clusterctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    home = tmp_path / "home"
    state = project / "state"
    for file in (project / "data.csv", state / "demo" / "id_ed25519", project / "state.csv"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    home.mkdir()
    monkeypatch.setenv("CLUSTERCTL_HOME", str(state))
    done = files.put(ChosenCluster(), [str(project), str(home)])
    assert {path.name for path in (home / "project").iterdir()} == {"data.csv", "state.csv"}
    assert done.own == (state,)
    assert done.sent.files == 2


def test_put_prints_the_path_on_the_cluster(tmp_path: Path) -> None:
    """A folder has a place of its own below the target, also if the target is new."""
    project = tmp_path / "a3"
    target = tmp_path / "home" / "het"
    project.mkdir()
    for name in ("x", "y"):
        (project / name).touch()
    assert files.put(ChosenCluster(), [str(project), str(target)]).place == f"{target}/a3"
    assert (target / "a3" / "x").exists()
    for paths in ([project / "x"], [project, project / "x"]):
        assert files.put(ChosenCluster(), [*map(str, paths), str(target)]).place == str(target)


@pytest.mark.parametrize(
    "case",
    [
        ("new/in.txt", None, "new/in.txt"),
        ("new/july.csv", None, "new/july.csv"),
        ("new/Makefile", "", "new/Makefile"),
        ("new", None, "new/in.txt"),
        ("new.d/", None, "new.d/in.txt"),
        ("new.d", "new.d/other", "new.d/in.txt"),
        ("new", "new/other", "new/in.txt"),
        ("other", "", "other"),
        (".", None, "in.txt"),
    ],
)
@pytest.mark.parametrize("way", ["put", "get"])
def test_single_file_gets_the_name_that_is_given_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    case: tuple[str, str | None, str],
) -> None:
    """case: the target; a file that its folder has, "": the target is a file, None: nothing exists;
    and the file that is written.
    """
    target, there, written = case
    home, here = tmp_path / "home", tmp_path / "here"
    source, other = (here, home) if way == "put" else (home, here)
    for folder in (home, here, source / "data"):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (source / "data" / "in.txt").write_text("1")
    if there is not None:
        old = other / (there or target)
        old.parent.mkdir(exist_ok=True)
        old.write_text("old")
    if way == "put":
        place = files.put(ChosenCluster(), ["data/in.txt", target]).place
        is_renamed = not written.endswith("/in.txt") and written != "in.txt"
        assert Path(place) == home / (written if is_renamed else Path(written).parent)
    else:
        assert files.get(ChosenCluster(), ["data/in.txt", target]).folder == Path(written).parent
    assert (other / written).read_text() == "1"
    # The same again, with another content.
    (source / "data" / "in.txt").write_text("22")
    getattr(files, way)(ChosenCluster(), ["data/in.txt", target])
    assert (other / written).read_text() == "22"


@pytest.mark.parametrize("way", ["put", "get"])
def test_variable_at_the_beginning_of_a_remote_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("1")
    for path in ("$HOME/pg", "${DATA}"):
        with refused("option-invalid/path-variable", UsageError):
            getattr(files, way)(ChosenCluster(), ["in.txt", path] if way == "put" else [path])
    files.put(ChosenCluster(), ["in.txt", "./$HOME/"])
    assert files.get(ChosenCluster(), ["./$HOME/in.txt", "here/"]).files == 1


def test_wildcards_that_match_nothing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with refused("file-unreadable/here", UsageError, "wildcards"):
        files.put(ChosenCluster(), ["one/*", "pg/"])
    with refused("not-found/file", UsageError, "wildcards"):
        files.get(ChosenCluster(), ["pg/*.txt", "."])


def test_file_with_a_bracket_in_its_name_is_not_blamed_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1].csv").touch()
    with refused("file-unreadable/here", UsageError) as sending:
        files.put(ChosenCluster(), ["a[1].csv", "gone", "pg/"])
    with refused("not-found/file", UsageError) as fetching:
        files.get(ChosenCluster(), ["a[1].csv", "gone", "."])
    for caught in (sending, fetching):
        assert "wildcards" not in (caught.value.fix or "")


def test_home_of_this_machine_in_a_remote_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell replaces `~` by it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.txt").write_text("1")
    with refused("file-unwritable/remote", TransferError, "'~/in.txt/pg/'"):
        files.put(ChosenCluster(), [str(tmp_path / "in.txt"), f"{tmp_path}/in.txt/pg/"])


def test_several_files_and_folders_have_a_folder_as_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "data/b.txt"):
        (tmp_path / name).write_text("1")
    files.put(ChosenCluster(), ["a.txt", "data/b.txt", "to.d"])
    files.put(ChosenCluster(), ["data", "copy.d"])
    files.get(ChosenCluster(), ["a.txt", "data/b.txt", "back.d"])
    files.get(ChosenCluster(), ["data", "back.e"])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*.[de]/**/*.txt")}
    assert found == {
        *("to.d/a.txt", "to.d/b.txt", "copy.d/data/b.txt"),
        *("back.d/a.txt", "back.d/b.txt", "back.e/data/b.txt"),
    }
