"""The folder on an attached cluster: chosen, marked, filled, listed and removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import (
    ClusterctlError,
    MachineError,
    TransferError,
    TransportError,
    UsageError,
)
from clusterctl.jobs.kept_files import kept_files
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.standalone_python import RELEASE
from clusterctl.packages.wheelhouse import new_wheelhouse
from clusterctl.providers.existing import detach as detach_module
from clusterctl.providers.existing import place as place_module
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.providers.existing.place import (
    PreparedFolder,
    choose_python,
    place,
    platform_of,
    with_standalone_python,
)
from clusterctl.providers.existing.site_description import SiteDescription
from clusterctl.util.assets import file_sha256, job_lock
from tests.integration.existing.conftest import SITE, VERSION, Build
from tests.support.disks import small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.standalone import small_python, standalone_list
from tests.support.wheels import a_wheel

Place = Callable[..., PreparedFolder]


@pytest.fixture
def call(wheel: None) -> Place:
    """Call ``place`` with a wheel of a package `first` in place of the packages of all jobs."""

    def place_here(
        folder: str = "~/ours", cluster_id: str = "a1b2c3", **more: object
    ) -> PreparedFolder:
        transport = more.pop("transport", LocalTransport())
        return place(transport, more.pop("site", SITE), folder, cluster_id, **more)  # type: ignore[arg-type]

    return place_here


def test_place_builds_once_and_keeps_the_mark(call: Place, home: Path) -> None:
    placed = call(modules=("openmpi/4.1.4",))
    assert (placed.folder, placed.cluster_id, placed.built) == (str(home / "ours"), "a1b2c3", True)
    assert (placed.python, placed.version) == (sys.executable, VERSION)
    python = home / "ours/env/bin/python"
    script = "import first, pip, sys; print(first.version, sys.prefix)"
    shown = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert shown.split() == ["1.0", str(home / "ours/env")]
    again = call(cluster_id="c3d4")
    assert (again.cluster_id, again.built) == ("a1b2c3", False)
    assert sorted(path.name for path in home.iterdir()) == ["ours"]


def test_place_ignores_the_sites_settings_of_python(
    call: Place, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone would fail the build, or put the package elsewhere."""
    settings = {
        "PIP_USER": "1",
        "PIP_TARGET": str(home.parent / "elsewhere"),
        "PYTHONHOME": "/nowhere",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    call()
    assert list((home / "ours/env/lib").glob("python3*/site-packages/first*"))


CLAIM = (place_module._CLAIM, "~/a/ours", "a1b2c3", "campus")


def run_program(program: str, *words: str) -> int:
    """Run a program of the login node. Return its exit status."""
    return LocalTransport().run(["sh", "-c", program, "program", *words], check=False).rc


def kill_after(command: str, program: str, *words: str) -> None:
    """Run a program of the login node that is killed after its first call of this command."""
    assert (
        run_program(f'{command}() {{ command {command} "$@"; kill -9 $$; }}\n{program}', *words)
        == -1
    )


@pytest.mark.parametrize("there", ["", "a", "a/ours"])
@pytest.mark.parametrize("command", ["printf", "mkdir", "mv", "sed"])
@pytest.mark.parametrize("again", [True, False])
def test_killed_place_continues_or_is_removed(
    home: Path, there: str, command: str, again: bool
) -> None:
    """Folders that a killed `place` has created are removed by `detach`; older ones stay."""
    (home / there).mkdir(parents=True, exist_ok=True)
    before = sorted(home.rglob("*"))
    kill_after(command, *CLAIM)
    if again:
        assert run_program(*CLAIM) == 0
        assert sorted(home.rglob("*")) == [
            home / "a",
            home / "a/ours",
            home / "a/ours/.clusterctl-cluster",
        ]
    folder = AttachedFolder(LocalTransport(), "~/a/ours", "a1b2c3")
    folder.remove()
    assert (sorted(home.rglob("*")), folder.remove()) == (before, ())


def test_place_refuses_the_folder_of_another_slurm_cluster(call: Place, home: Path) -> None:
    """Two clusters of a site share the home."""
    assert run_program(*CLAIM) == 0
    with refused("exists/taken-folder", UsageError, "--folder"):
        call("~/a/ours", site=replace(SITE, cluster_name="other"))
    assert (home / "a/ours/.clusterctl-cluster").read_text() == "a1b2c3\n2\ncampus\n"


class Killing(LocalTransport):
    """A transport that is killed before the command that completes the folder."""

    def run(self, argv, **options):
        if argv[3] == "finish":
            raise TransportError("killed")
        return super().run(argv, **options)


def test_place_killed_before_its_end_needs_no_new_build(call: Place, home: Path) -> None:
    with pytest.raises(TransportError):
        call(transport=Killing())
    assert not (home / "ours/env").exists()
    assert call().built is False
    assert (home / "ours/env/bin/python").exists()


@pytest.mark.parametrize("mark", [None, "c3d4\n0\nother\n"], ids=["none", "of-another-slurm"])
def test_refused_folder_keeps_environments_and_pythons(
    call: Place, home: Path, mark: str | None
) -> None:
    """Without a mark they are the user's. Another Slurm's login node may not run their Python."""
    (home / "ours/environments/mine").mkdir(parents=True)
    (home / "ours/environments/link").symlink_to("mine")
    (home / "ours/pythons/cpython-3.13.1-linux").mkdir(parents=True)
    (home / "ours/environments/mine/SHA256SUMS").touch()
    if mark is not None:
        (home / "ours/.clusterctl-cluster").write_text(mark)
    before = sorted(home.rglob("*"))
    with refused("exists/taken-folder", UsageError):
        call()
    assert sorted(home.rglob("*")) == before


def test_damaged_environment_of_other_packages_stays_until_it_is_built(
    call: Place, build: Build, home: Path
) -> None:
    """Jobs that wait use it. Without sums, the next job's environment is built."""
    build(home / "ours")
    other = home / "ours/environments/other"
    shutil.copytree((home / "ours/env").resolve(), other.with_name(".other.123456"), symlinks=True)
    other.symlink_to(".other.123456")
    (lost,) = other.glob("lib/python3*/site-packages/first.py")
    lost.unlink()
    assert not call().built
    assert attached(home).damaged() == ["environments/other"]
    assert (other / "bin/python").exists()
    assert not (other / "SHA256SUMS").exists()


def test_folders_of_the_user_are_not_checked(call: Place, build: Build, home: Path) -> None:
    build(home / "ours")
    for name in ("environments/mine", "pythons/mine"):
        (home / "ours" / name).mkdir(parents=True)
    call()
    assert attached(home).damaged() == []
    assert (home / "ours/pythons/mine").is_dir()


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("other")])
def test_environment_that_lost_files_is_made_again(
    call: Place, build: Build, home: Path, change: Callable[[Path], object]
) -> None:
    """A site may remove the old files of a folder, and leave the rest."""
    build(home / "ours")
    (module,) = (home / "ours/env/lib").glob("python3*/site-packages/first.py")
    change(module)
    assert attached(home).damaged() == [f"environments/{(home / 'ours/env').readlink().name}"]
    assert call().built
    assert module.exists()
    assert "other" not in module.read_text()
    assert attached(home).damaged() == []


def test_environment_that_is_gone_is_damaged(build: Build, home: Path) -> None:
    build(home / "ours")
    shutil.rmtree((home / "ours/env").resolve())
    assert attached(home).damaged()[-1] == "env"


def test_place_rejects_a_folder_with_other_files(call: Place, home: Path) -> None:
    (home / "ours").mkdir()
    (home / "ours/thesis.tex").write_text("mine")
    with refused("exists/taken-folder", UsageError):
        call()
    assert [path.name for path in (home / "ours").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "folder",
    [
        *(
            "~",
            "/",
            "//",
            "",
            "$SCRATCH",
            "~/my files",
            "$(touch here)/x",
            "~/a\nb",
            "~other/x",
            "/a/'b",
        ),
        *("~/a/../b", "~/.", "work", "/scratch/a:b", "/scratch/%u/x"),
    ],
)
def test_place_rejects_a_folder_that_is_a_home_or_needs_quotes(
    home: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """No wheels are downloaded before."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refused("option-invalid/remote-folder", UsageError):
        place(LocalTransport(), SITE, folder, "a1b2c3")
    assert list(home.iterdir()) == []


def test_place_expands_a_variable_of_the_cluster(
    call: Place, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    build(tmp_path / "scratch/a/ours")
    assert call("$SCRATCH/a/ours").folder == str(tmp_path / "scratch/a/ours")
    monkeypatch.delenv("SCRATCH")
    with refused("file-unwritable/remote-folder", TransferError, "SCRATCH"):
        call("$SCRATCH/ours")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "dom\\ada's"))
    with refused("option-invalid/remote-folder", UsageError, "dom"):
        call("$SCRATCH/ours")
    assert not (tmp_path / "dom\\ada's").exists()


def test_place_tells_the_disks_words_if_it_is_full(call: Place) -> None:
    with small_disk(1) as disk, refused("file-unwritable/remote", TransferError, "0 MiB"):
        call(f"{disk.path}/ours")


def test_choose_python_takes_the_first_that_jobs_can_use() -> None:
    pythons = {
        "/usr/bin/python3": "3.9.2",
        "/usr/bin/python3.15": "3.15.0",
        "/opt/bin/python3": "3.12.1",
    }
    assert choose_python(pythons) == "/opt/bin/python3"
    assert choose_python(pythons | {"/new/python3": "3.13.0"}, "/new/python3") == "/new/python3"
    for python in ("/usr/bin/python3", "/missing/python3"):
        with refused("host-unfit/python", UsageError, python):
            choose_python(pythons, python)
    with refused("host-unfit/python", UsageError, "/usr/bin/python3 (3.9.2)"):
        choose_python({"/usr/bin/python3": "3.9.2"})


def test_platform_of_rejects_what_has_no_wheels() -> None:
    assert platform_of("3.11.2", "2.36", "x86_64") == NodePlatform("3.11", 36)
    with refused("packages-unmet/platform", UsageError, "aarch64"):
        platform_of("3.11.2", "2.36", "aarch64")
    with refused("packages-unmet/platform", UsageError, "2.17"):
        platform_of("3.11.2", "2.17", "x86_64")


def test_job_profile_loads_modules_and_keeps_path(call: Place, build: Build, home: Path) -> None:
    build(home / "ours")
    call(modules=("openmpi/4.1.4", "no such"))
    script = f"""
        module() {{ echo "module $*"; [[ $2 != no* ]]; }}
        export XDG_RUNTIME_DIR=/run/user/1
        set -eu
        . {home}/ours/job-profile.sh
        echo "${{XDG_RUNTIME_DIR-unset}} $PATH"
    """
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, env=env
    )
    path = f"{os.environ['PATH']}:/opt/slurm/bin"
    assert done.stdout.splitlines() == [
        "module load openmpi/4.1.4",
        "module load no such",
        f"unset {path}",
    ]
    assert "no such" in done.stderr


def attached(home: Path, cluster_id: str = "a1b2c3") -> AttachedFolder:
    return AttachedFolder(LocalTransport(), str(home / "ours"), cluster_id)


def test_remove_takes_the_folder_and_nothing_else(build: Build, home: Path) -> None:
    build(home / "ours")
    (home / "ours/files").mkdir()
    (home / "ours/files/data").write_bytes(bytes(5000))
    (home / "ours/own notes").write_text("x")
    (home / "beside").write_text("x")
    entries = {entry.name: entry for entry in attached(home).entries()}
    assert {*entries} == {"env", "environments", "store", "files", "own notes"}
    assert (entries["files"].files, entries["files"].what != "", entries["own notes"].what) == (
        1,
        True,
        "",
    )
    assert {entry.name for entry in attached(home).remove()} == {*entries}
    assert [path.name for path in home.iterdir()] == ["beside"]
    assert attached(home).remove() == ()


@pytest.mark.parametrize("mark", ["c3d4\n", None])
def test_remove_leaves_a_folder_without_our_mark(home: Path, mark: str | None) -> None:
    (home / "ours").mkdir()
    (home / "ours/thesis.tex").write_text("mine")
    if mark is not None:
        (home / "ours/.clusterctl-cluster").write_text(mark)
    with refused("exists/foreign-folder", UsageError):
        attached(home).remove()
    assert (home / "ours/thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("command", ["rm", "mv", "rmdir"])
def test_remove_continues_after_a_kill(home: Path, command: str) -> None:
    assert run_program(*CLAIM) == 0
    (home / "a/ours/files").mkdir()
    kill_after(command, detach_module._DETACH, "~/a/ours", "a1b2c3")
    assert list(home.iterdir())
    AttachedFolder(LocalTransport(), "~/a/ours", "a1b2c3").remove()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("there", ["", "a", "a/ours"])
def test_remove_takes_the_folders_that_place_created(home: Path, there: str) -> None:
    (home / there).mkdir(parents=True, exist_ok=True)
    before = sorted(home.rglob("*"))
    assert run_program(*CLAIM) == 0
    AttachedFolder(LocalTransport(), "~/a/ours", "a1b2c3").remove()
    assert sorted(home.rglob("*")) == before


def test_remove_keeps_a_created_folder_with_other_files(home: Path) -> None:
    assert run_program(*CLAIM) == 0
    (home / "a/notes").touch()
    AttachedFolder(LocalTransport(), "~/a/ours", "a1b2c3").remove()
    assert sorted(home.rglob("*")) == [home / "a", home / "a/notes"]


def test_remove_keeps_an_empty_folder_of_the_user(home: Path) -> None:
    (home / "ours").mkdir()
    assert attached(home).entries() == attached(home).remove() == ()
    assert (home / "ours").is_dir()


def test_place_on_a_full_disk_leaves_nothing(call: Place) -> None:
    with small_disk(1) as disk:
        disk.fill()
        with refused("file-unwritable/remote-folder", TransferError):
            call(f"{disk.path}/a/ours")
        assert not (disk.path / "a").exists()


OLD = replace(SITE, pythons={"/usr/bin/python3": "3.6.8"})


@pytest.fixture
def standalone(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of a standalone Python, and the wheel `first` for its release."""
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", standalone_list(tmp_path, small_python()))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with new_wheelhouse(job_lock(), NodePlatform(RELEASE, 28)) as folder:
        a_wheel(folder, "first", "1.0")


def given(site: SiteDescription = OLD, folder: str = "~/ours") -> SiteDescription:
    return with_standalone_python(LocalTransport(), site, folder, "a1b2c3")


def test_old_site_gets_a_python_once(standalone: None, home: Path, tmp_path: Path) -> None:
    site = given()
    path = choose_python(site.pythons)
    assert path.startswith(f"{home}/ours/pythons/cpython-{RELEASE}.0-")
    placed = place(LocalTransport(), site, "~/ours", "a1b2c3")
    assert (placed.python, placed.version, placed.has_own_python) == (path, f"{RELEASE}.0", True)
    assert (home / "ours/env/bin/python").exists()
    # Nothing is downloaded or sent again, even from a machine without the download.
    (tmp_path / "downloads.json").unlink()
    shutil.rmtree(tmp_path / "cache")
    assert choose_python(given().pythons) == path
    entries = {entry.name: entry for entry in attached(home).entries()}
    assert {*entries} == {"env", "environments", "pythons", "store"}
    assert all(entry.is_made_by_attach for entry in entries.values())
    assert kept_files(LocalTransport(), "ours")["pythons"].number == 1
    attached(home).remove()
    assert list(home.iterdir()) == []


def test_newest_python_of_the_folder_is_chosen(home: Path) -> None:
    """The order of a shell has 3.13.10 before 3.13.9. Other folders are somebody's own."""
    for name in ("cpython-3.13.10-linux", "cpython-3.13.9-linux", "mine", "cpython"):
        python = home / "ours/pythons" / name / "bin/python3"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o700)
        sums = f"{file_sha256(python)}  bin/python3\n"
        (python.parents[1] / "SHA256SUMS").write_text(sums)
    pythons = {path: version for path, version in given().pythons.items() if "/ours/" in path}
    assert [*pythons.values()] == ["3.13.10", "3.13.9"]
    assert choose_python(given().pythons).startswith(f"{home}/ours/pythons/cpython-3.13.10-")


def test_site_with_a_python_gets_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(SITE) == SITE
    assert list(home.iterdir()) == []


def test_python_that_was_removed_is_sent_again(standalone: None, home: Path) -> None:
    path = choose_python(given().pythons)
    shutil.rmtree(home / "ours")
    assert choose_python(given().pythons) == path
    assert Path(path).exists()


def test_damaged_python_is_sent_again(standalone: None, home: Path) -> None:
    path = Path(choose_python(given().pythons))
    path.chmod(0o600)
    path.write_text("other")
    assert choose_python(given().pythons) == str(path)
    assert attached(home).damaged() == []


def test_damaged_pythons_are_taken_out_of_use(call: Place, build: Build, home: Path) -> None:
    build(home / "ours")
    for minor in (12, 13):
        (home / f"ours/pythons/cpython-3.{minor}.0-linux/lib").mkdir(parents=True)
    call()
    assert attached(home).damaged() == []


@pytest.mark.parametrize("command", ["mktemp", "tar", "sync", "mv"])
def test_killed_sending_of_a_python_continues(
    standalone: None, home: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    kill = f'{command}() {{ command {command} "$@"; kill -9 $$; }}\n'
    with monkeypatch.context() as patch:
        patch.setattr(place_module, "_PYTHON", kill + place_module._PYTHON)
        with pytest.raises(ClusterctlError):
            given()
    path = choose_python(given().pythons)
    assert Path(path).exists()
    assert sorted(one.name for one in (home / "ours/pythons").iterdir()) == [
        ".lock",
        Path(path).parents[1].name,
    ]


def test_python_that_does_not_run_there_is_refused(
    standalone: None, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = tmp_path / "more"
    more.mkdir()
    url = standalone_list(more, small_python("#!/bin/sh\nexit 3\n"))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", url)
    with refused("transfer-failed/python", TransferError):
        given()
    assert [one.name for one in (home / "ours/pythons").iterdir()] == [".lock"]


def test_site_without_a_download_stays_as_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", "file:///nowhere/downloads.json")
    with refused("transfer-failed/python-download", MachineError):
        given()
    assert list(home.iterdir()) == []
    with refused("packages-unmet/platform", UsageError):
        given(replace(OLD, glibc="2.17"))


def test_python_does_not_fit_a_small_disk(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = small_python(f"#!/bin/sh\n{'#' * (2 << 20)}\n")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", standalone_list(tmp_path, large))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with small_disk(1) as disk, refused("transfer-failed/python", TransferError, "No space left"):
        given(folder=f"{disk.path}/ours")


def test_environment_belongs_to_its_python(
    call: Place, build: Build, home: Path, tmp_path: Path
) -> None:
    """Nodes may lack the login node's Python, and have another of the same release."""
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    build(home / "ours")
    assert not call().built
    assert call(site=replace(SITE, pythons={str(other): VERSION})).built


@pytest.mark.parametrize("chosen", [("python/3.13",), ()])
def test_module_of_mpi_is_found_on_the_login_node(
    home: Path, build: Build, monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...]
) -> None:
    """Together with the modules that the user has chosen. Its newest version does not load."""
    build(home / "ours")
    # bash reads this file as a site's shells read the definition of the command `module`.
    settings = "set -u\ntrap 'echo bye' EXIT\necho hello\n"
    module = 'module() { : "$unset"; [[ $2 != openmpi/5.0 ]] && export "SITE_MPI=$2"; }\n'
    (home / "modules").write_text(settings + module)
    monkeypatch.setenv("BASH_ENV", str(home / "modules"))
    (packages,) = (home / "ours/env/lib").glob("python3*/site-packages")
    (packages / "mpi4py").mkdir()
    loads = "import os\nassert os.environ['SITE_MPI'] == 'openmpi/4.1'\nclass rc: pass\n"
    (packages / "mpi4py/__init__.py").write_text(loads)
    (packages / "mpi4py/MPI.py").touch()
    site = replace(SITE, modules=("openmpi/4.1", "openmpi/5.0"))
    placed = place(LocalTransport(), site, "~/ours", "a1b2c3", modules=chosen)
    assert placed.modules == (*chosen, "openmpi/4.1")
    profile = (home / "ours/job-profile.sh").read_text()
    assert re.findall("^module load ([^ ]*)", profile, re.MULTILINE) == [*placed.modules]
    # If no library is found, the modules stay.
    (packages / "mpi4py/MPI.py").unlink()
    placed = place(LocalTransport(), site, "~/ours", "a1b2c3", modules=chosen)
    assert placed.modules == chosen
