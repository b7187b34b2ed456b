"""Environments on the cluster: built once, whole or not there, whoever comes and whatever is
killed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import TransportError, UsageError
from clusterctl.jobs.environment import Environments, describe_pending_build
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.jobs.submit import PreparedJob, client_facts
from clusterctl.packages import wheelhouse
from clusterctl.packages.wheelhouse import Wheel, WheelLock, pins, wheel_path
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.sites.script import PLAIN, Environment
from clusterctl.spec.distributions import DEFAULT, distribution_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import planned_inventory
from clusterctl.util.assets import file_sha256, job_lock
from clusterctl.util.progress import SILENT
from tests.support import forks
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused, shows
from tests.support.wheels import a_wheel

HERE = distribution_of(DEFAULT)

Resolve = Callable[..., Environment]


def a_spec(requirements: Path | None = None) -> ClusterSpec:
    values = {"version": 1, "name": "demo", "partitions": [{"name": "train", "nodes": 2}]}
    more = {
        "users": [{"name": "hpc", "uid": 10000}],
        "software": {"python": {"requirements": requirements}},
    }
    return ClusterSpec.model_validate({**values, **more})


def environment_for(spec: ClusterSpec, job: JobSpec) -> Environment:
    """The environment that a job is prepared with; its other files are not looked at."""
    (prepared,) = Preparer(SILENT.note).plan(Submission.of((job,)), spec).jobs
    return prepared.environment


def based(environment: Environment) -> Environment:
    """The same on nodes whose Python is that of these tests, which has pip, too."""
    root = Path.home().parent / "root"
    root.mkdir(exist_ok=True)
    with suppress(FileExistsError):  # tests call this from several threads
        (root / "env").symlink_to(sys.prefix)
    return replace(environment, root=str(root))


@pytest.fixture
def home(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The job user's home, and the folder of the environments in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "the home"))
    # The folder of a test is sent, and uv's cache is no folder to send.
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "the home").mkdir()
    return tmp_path / "the home" / PLAIN.environments


@pytest.fixture
def index(tmp_path: Path, home: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    for version in ("1.0", "2.0"):
        a_wheel(folder, "first", version)
    program = {"tool.py": "def main(): print('from the tool')\n"}
    entry = {"tool-1.0.dist-info/entry_points.txt": "[console_scripts]\ntool = tool:main\n"}
    a_wheel(folder, "tool", files=program | entry)
    return folder


@pytest.fixture
def resolve(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """The environment of a job (and of a spec) whose requirements files have these lines."""
    monkeypatch.setattr(wheelhouse, "run_with_lines", forks.pip)
    (tmp_path / "a.sh").touch()

    def call(lines: str, spec_lines: str | None = None) -> Environment:
        files = []
        for name, text in (("job.txt", lines), ("spec.txt", spec_lines)):
            files.append(tmp_path / name)
            files[-1].write_text(f"--no-index\n--find-links {index}\n{text or ''}\n")
        job = JobSpec(name="a", script=tmp_path / "a.sh", requirements=files[0] if lines else None)
        return environment_for(a_spec(files[1] if spec_lines else None), job)

    return call


def locked(index: Path, *names: str) -> Environment:
    """The environment that has these wheels of the index, as if pip had been asked for them."""
    wheels = []
    for file in (f"{name}-py3-none-any.whl" for name in names):
        wheels.append(Wheel.of(file, file_sha256(index / file)))
        wheel_path(wheels[-1]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(index / file, wheel_path(wheels[-1]))
    return Environment(WheelLock(tuple(wheels), pins(job_lock())))


@pytest.fixture
def first(index: Path) -> Environment:
    return locked(index, "first-2.0")


def test_torchrun_needs_torch(resolve: Resolve, index: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    job = JobSpec(name="a", script=tmp_path / "a.py", launcher="torchrun")
    with refused("packages-unmet/torch", UsageError, "--requirements"):
        environment_for(a_spec(), job)
    a_wheel(index, "torch")
    (tmp_path / "job.txt").write_text(f"--no-index\n--find-links {index}\ntorch\n")
    assert environment_for(
        a_spec(), job.model_copy(update={"requirements": tmp_path / "job.txt"})
    ).lock


def test_replay_gets_the_very_wheels_of_its_lock(
    resolve: Resolve, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locked(index, "first-1.0", "tool-1.0").lock
    assert lock is not None
    notes: list[str] = []
    job = JobSpec(name="a", script=tmp_path / "a.sh")

    def resolve_again(text: str) -> Environment:
        facts = planned_inventory(a_spec(tmp_path / "spec.txt"))
        return Environments(notes.append).resolve(facts, HERE, job, replayed=text)

    # The cluster's own requirements are not those of then.
    assert resolve_again("") == PLAIN
    assert resolve_again(lock.text).lock == lock
    shutil.rmtree(wheel_path(lock.wheels[0]).parents[1])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert resolve_again(lock.text).lock == lock
    assert all(wheel_path(wheel).is_file() for wheel in lock.wheels)
    assert notes == ["downloading 2 wheels"]
    assert resolve_again(lock.text.replace("Python 3.", "Python 2.", 1)).lock == lock
    assert shows("\n".join(notes), "packages-for-another-python")
    wrong = lock.text.replace(lock.wheels[0].sha256, "0" * 64)
    with refused("packages-unmet/wheels-gone", UsageError, "HASHES"):
        resolve_again(wrong)
    outside = lock.text.replace(f"# {lock.wheels[0].file}", f"# ../../{lock.wheels[0].file}")
    # A file of elsewhere is none of the cache.
    assert len(WheelLock.read(outside, {}).wheels) == 1


def run(environment: Environment, command: str) -> str:
    """Return the stdout of a command in a shell with the PATH of a job."""
    argv = ["bash", "-c", f"export PATH={based(environment).path}:$PATH\n{command}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True, cwd="/").stdout.strip()


def build(environment: Environment, notes: list[str] | None = None) -> bool:
    return Environments((notes if notes is not None else []).append).build(
        LocalTransport(), based(environment)
    )


def names(home: Path) -> set[str]:
    return {path.name.rpartition(".")[0] or path.name for path in home.iterdir()} - {".lock"}


def test_environment_is_built_once_and_hides_packages_of_nodes(home: Path, index: Path) -> None:
    a_wheel(index, "numpy", "0.1")
    environment = locked(index, "first-1.0", "tool-1.0", "numpy-0.1")
    notes = []
    assert build(environment, notes)
    versions = "python -c 'import first, numpy, pytest; print(first.version, numpy.version)'"
    assert run(environment, versions) == "1.0 0.1"
    assert run(environment, "tool") == "from the tool"
    assert environment.lock is not None
    key = environment.lock.key
    assert names(home) == {key, f".{key}"}
    assert not list(home.glob(".*/wheels"))
    assert (home / key / "requirements.lock").read_text() == environment.lock.text
    assert notes[0].startswith("sending 3 wheels, ")
    assert notes[1:] == ["building the environment"]
    assert not build(environment, notes)
    assert len(notes) == 2


def test_describe_pending_build_reads_without_building(
    home: Path, tmp_path: Path, resolve: Resolve
) -> None:
    spec = a_spec(tmp_path / "spec.txt")
    (tmp_path / "spec.txt").write_text("first\n")
    assert describe_pending_build(a_spec(), HERE, LocalTransport()) == ""
    assert "resolved again" in describe_pending_build(spec, HERE, LocalTransport())
    assert not (tmp_path / "cache").exists()
    environment = resolve("", "first\ntool")
    assert "2 packages" in describe_pending_build(spec, HERE, LocalTransport())
    assert not home.exists()
    build(environment)
    assert describe_pending_build(spec, HERE, LocalTransport()) == ""
    (tmp_path / "spec.txt").write_text("first<2\n")
    assert "resolved again" in describe_pending_build(spec, HERE, LocalTransport())


def sending(environment: Environment, *, rented: bool = False) -> tuple[list[int], int]:
    """Build it: how many wheels were fetched (on a rented host) and sent, and how many bytes were
    sent.
    """
    notes: list[str] = []
    sent: set[int] = set()

    def progress(what: str, _done: int, total: int) -> None:
        if what == "sending":
            sent.add(total)

    Environments(notes.append, progress=progress).build(
        LocalTransport(), based(environment), rented=rented
    )
    assert not list((Path.home() / "clusterctl/store/partial").iterdir())
    return [int(count) for count in re.findall(r"(\d+) wheels?,", "\n".join(notes))], max(sent)


@pytest.fixture
def heavy(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment of two large wheels and a small one; a rented host's index is tmp_path /
    "its".
    """
    for name in ("heavy", "large"):
        a_wheel(index, name, files={f"{name}.py": "x = 1" + "\n" * (1 << 20)})
    (tmp_path / "its").mkdir()
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nno-index = true\nfind-links = {tmp_path}/its\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)  # it would count for the build, too
    return locked(index, "first-2.0", "heavy-1.0", "large-1.0")


def test_rented_host_fetches_large_wheels_itself(
    home: Path, tmp_path: Path, index: Path, heavy: Environment
) -> None:
    """By their hashes, and only those that its store lacks."""
    for path in index.glob("*"):
        shutil.copy(path, tmp_path / "its")
    counts, sent = sending(heavy, rented=True)
    assert (counts, sent < 1 << 20) == ([2, 1], True)
    shutil.rmtree(home)
    shutil.rmtree(tmp_path / "its")
    # All of it is in the store.
    assert sending(heavy, rented=True) == ([2, 1], 0)
    assert run(heavy, "python -c 'import first, heavy, large'") == ""


@pytest.mark.parametrize("reached", [True, False])
def test_wheel_that_the_host_cannot_download_is_sent(
    tmp_path: Path, index: Path, heavy: Environment, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """The host's index has another file under the name of a wheel. If PyPI answers, the next wheel
    is downloaded.
    """
    a_wheel(tmp_path / "its", "heavy", files={"heavy.py": "evil = 1\n"})
    shutil.copy(index / "large-1.0-py3-none-any.whl", tmp_path / "its")
    curl = tmp_path / "bin/curl"
    curl.parent.mkdir()
    curl.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\nexit {0 if reached else 6}\n')
    curl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{curl.parent}:{os.environ['PATH']}")
    counts, sent = sending(heavy, rented=True)
    assert (counts, sent < 2 << 20) == ([2, 2 if reached else 3], reached)
    assert (tmp_path / "asked").read_text().count("https://pypi.org/simple/") == 1
    assert run(heavy, "python -c 'import heavy, large; print(heavy.x)'") == "1"


def test_environment_built_by_many_at_once_is_built_once(home: Path, first: Environment) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: build(first), range(4))) == 1
    assert run(first, "python -c 'import first; print(first.version)'") == "2.0"


@pytest.mark.parametrize("other", ["pipe", "link"])
def test_lock_path_that_is_not_a_file_is_replaced(
    home: Path, first: Environment, tmp_path: Path, other: str
) -> None:
    """Opening a pipe waited for an hour, and a link's target lost its content."""
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    home.mkdir(parents=True)
    lock = home / ".lock"
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(victim)}[other](lock)
    assert build(first)
    assert lock.is_file()
    assert not lock.is_symlink()
    assert victim.read_text() == "theirs"


def test_lock_that_is_held_is_named(home: Path, first: Environment) -> None:
    home.mkdir(parents=True)
    notes: list[str] = []
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        named = (f"~/{PLAIN.environments}/.lock", "0.1 s")
        with refused("in-use/environment", TransportError, *named):
            Environments(notes.append, wait_s=0.1).build(LocalTransport(), based(first))
    assert [line.split()[0] for line in notes] == ["sending", "waiting"]


class Killing(LocalTransport):
    """Everything on the cluster is killed as soon as a file of the environment in the making is
    there.
    """

    def __init__(self, home: Path, file: str) -> None:
        self._home = home
        self._file = file

    @contextmanager
    def converse(self, argv, **options):
        with super().converse(argv, **options) as talk:
            over = threading.Event()  # the wheels are sent in a conversation of their own, before
            killer = threading.Thread(target=self._kill, args=(talk.process.pid, over))
            killer.start()
            try:
                yield talk
            finally:
                over.set()
                killer.join()

    def _kill(self, group: int, over: threading.Event) -> None:
        while not list(self._home.glob(f".*/{self._file}")):
            if over.wait(0.001):
                return
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def test_environments_that_no_job_has_used_for_long_are_removed(home: Path, index: Path) -> None:
    unused, used, kept = (locked(index, name) for name in ("first-1.0", "first-2.0", "tool-1.0"))
    for environment in (unused, used, kept):
        build(environment)
    for environment in (unused, used):
        lock = home / key_of(environment) / "requirements.lock"
        os.utime(lock, (0, 0))
    base = home / ".base.ABCDEF"
    base.mkdir()
    (home / "base").symlink_to(base.name)
    (base / "requirements.lock").touch()
    os.utime(base / "requirements.lock", (0, 0))
    # A submission uses it, and builds nothing.
    assert not build(used)
    build(locked(index, "first-1.0", "tool-1.0"))
    assert not (home / key_of(unused)).is_symlink()
    assert not list(home.glob(f".{key_of(unused)}.*"))
    for environment in (used, kept):
        assert (home / key_of(environment) / "bin/python").exists()
    assert (home / "base" / "requirements.lock").exists()


def key_of(environment: Environment) -> str:
    assert environment.lock is not None
    return environment.lock.key


def test_environment_with_an_interrupted_build_is_built_again(
    home: Path, first: Environment
) -> None:
    assert first.lock is not None
    with pytest.raises(TransportError):
        Environments(SILENT.note).build(Killing(home, "lib/*/*/*.pth"), based(first))
    assert not (home / first.lock.key).exists()
    assert len(list(home.glob(".*.??????"))) == 1
    assert build(first)
    assert len(list(home.glob(".*.??????"))) == 1
    assert run(first, "python -c 'import first; print(first.version)'") == "2.0"


def test_environment_without_its_sums_is_built_again(home: Path, first: Environment) -> None:
    """`attach` removes them if files were lost."""
    assert first.lock is not None
    assert build(first)
    (home / first.lock.key / "SHA256SUMS").unlink()
    assert build(first)
    assert not build(first)


def test_environment_that_fails_to_build_leaves_nothing(home: Path, first: Environment) -> None:
    with refused("packages-unmet/installation", TransportError, "/missing/env/bin/python"):
        Environments(SILENT.note).build(LocalTransport(), replace(first, root="/missing"))
    assert names(home) == set()


def test_job_adds_to_the_spec_and_keeps_its_versions(resolve: Resolve, index: Path) -> None:
    def versions(environment: Environment) -> list[str]:
        assert environment.lock is not None
        return sorted(f"{wheel.name} {wheel.version}" for wheel in environment.lock.wheels)

    assert versions(resolve("", "first")) == ["first 2.0"]
    a_wheel(index, "first", "3.0")
    assert versions(resolve("tool", "first")) == ["first 2.0", "tool 1.0"]
    assert versions(resolve("first>2", "first")) == ["first 3.0"]
    with refused("packages-unmet", UsageError):
        resolve("first>2", "first<2")


def test_job_with_its_own_python_uses_it(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("first\n")
    (tmp_path / "a.sh").touch()
    bundled = JobSpec(name="train", bundled="train")
    environment = environment_for(a_spec(file), bundled)
    assert (
        environment
        == PLAIN
        == environment_for(a_spec(), JobSpec(name="a", script=tmp_path / "a.sh"))
    )
    # There is nothing to build.
    assert not build(environment)
    assert not home.exists()
    with refused("option-invalid/requirements", UsageError):
        environment_for(a_spec(), bundled.model_copy(update={"requirements": file}))


@pytest.fixture
def program(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in a project's folder; pip finds the packages of ``index``."""
    monkeypatch.setattr(wheelhouse, "run_with_lines", forks.pip)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.py").touch()
    return folder / "a.py"


def prepared(job: JobSpec, spec: ClusterSpec | None = None) -> tuple[PreparedJob, list[str]]:
    """A job that `submit` has prepared, with the notes to the user."""
    notes: list[str] = []
    (done,) = Preparer(notes.append).plan(Submission.of((job,)), spec or a_spec()).jobs
    return done, notes


def names_in(job: PreparedJob) -> list[str]:
    lock = job.environment.lock
    return [f"{wheel.name}=={wheel.version}" for wheel in lock.wheels] if lock else []


def test_packages_of_a_file_beside_a_program_are_installed_and_recorded(program: Path) -> None:
    file = program.with_name("pyproject.toml")
    file.write_text('[project]\nname = "p"\nversion = "1"\ndependencies = ["first<2"]\n')
    job = JobSpec(name="a", script=program)
    found, notes = prepared(job)
    assert names_in(found) == ["first==1.0"]
    assert found.job.requirements == file
    assert any("pyproject.toml: 1 package" in note for note in notes)
    # The user may say no, and the cluster may install the same file for all jobs.
    refusing = job.model_copy(update={"requirements": False})
    assert names_in(prepared(refusing)[0]) == []
    assert prepared(job, a_spec(file))[0].job.requirements is None
    # Only Python programs have packages of Python.
    shell = program.with_name("a.sh")
    shell.touch()
    assert names_in(prepared(JobSpec(name="a", script=shell))[0]) == []


def test_packages_of_a_file_beside_a_program_that_do_not_exist_stop_the_job(program: Path) -> None:
    program.with_name("requirements.txt").write_text("missing\n")
    notes: list[str] = []
    with refused("packages-unmet", UsageError) as caught:
        Preparer(notes.append).plan(Submission.of((JobSpec(name="a", script=program),)), a_spec())
    # Before they are resolved, nobody knows.
    assert not any("installed" in note for note in notes)
    assert "--requirements none" in caught.value.fix


def test_file_beside_a_program_that_can_not_be_read_stops_the_job_with_a_way_on(
    program: Path,
) -> None:
    program.with_name("pyproject.toml").write_text("[project\n")
    job = JobSpec(name="a", script=program)
    with refused("file-invalid/packages", UsageError, "--requirements none"):
        prepared(job)
    assert names_in(prepared(job.model_copy(update={"requirements": False}))[0]) == []


@pytest.mark.parametrize(
    ("name", "text", "way"),
    [
        ("environment.yml", "dependencies: [gdal]\n", "--env-path"),
        ("pyproject.toml", "[tool.poetry.dependencies]\nfirst = '1'\n", "poetry export"),
        ("setup.py", "setup(install_requires=['first'])\n", "uv pip compile setup.py"),
    ],
)
def test_packages_that_pip_can_not_install_are_noted_with_the_way(
    program: Path, name: str, text: str, way: str
) -> None:
    program.with_name(name).write_text(text)
    found, notes = prepared(JobSpec(name="a", script=program))
    assert names_in(found) == []
    assert [way in note for note in notes if shows(note, "packages-not-installed")] == [True]


@pytest.mark.parametrize(
    ("chosen", "lock"), [(None, "poetry.lock"), ("pyproject.toml[more]", "pdm.lock")]
)
def test_lock_of_another_tool_beside_a_project_is_noted(
    program: Path, chosen: str | None, lock: str
) -> None:
    project = program.with_name("pyproject.toml")
    project.write_text(
        '[project]\nname = "p"\nversion = "1"\ndependencies = ["first"]\n'
        "optional-dependencies = {more = []}\n"
    )
    choice = None if chosen is None else program.with_name(chosen)
    job = JobSpec(name="a", script=program, requirements=choice)
    for is_there in (False, True):
        if is_there:
            program.with_name(lock).touch()
        found, notes = prepared(job)
        assert names_in(found) == ["first==2.0"]
        assert [lock in note for note in notes if shows(note, "lock-not-used")] == [True] * is_there


def test_packages_of_a_workspace_can_be_imported(program: Path) -> None:
    top = program.parent
    (top / "libs/b/src").mkdir(parents=True)
    sources = ("editable = '.'", "editable = 'libs/b'", "directory = '../outside'")
    text = "".join(f"[[package]]\nname='p'\nsource={{{source}}}\n" for source in sources)
    (top / "uv.lock").write_text(f"version = 1\nrequires-python = '>=3.11'\n{text}")
    (top / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\n')
    job = JobSpec(name="a", script=program, requirements=top / "pyproject.toml")
    assert prepared(job)[0].job.place.roots == ()
    job = job.model_copy(update={"requirements": top / "uv.lock"})
    found = Preparer(SILENT.note)._with_packages(job, planned_inventory(a_spec()))
    assert found.place.roots == (".", "libs/b/src")


def test_packages_of_a_workspace_behind_a_link_can_be_imported(program: Path) -> None:
    top = program.parent
    (top / "libs/b").mkdir(parents=True)
    (top / "uv.lock").write_text("[[package]]\nname='p'\nsource={editable='libs/b'}\n")
    (top.parent / "link").symlink_to(top)
    job = JobSpec(name="a", script=program, requirements=top.parent / "link" / "uv.lock")
    found = Preparer(SILENT.note)._with_packages(job, planned_inventory(a_spec()))
    assert found.place.roots == ("libs/b",)


def test_script_and_the_record_of_a_job(session, first: Environment, tmp_path: Path) -> None:
    assert first.lock is not None
    job = JobSpec(name="mine", script=tmp_path / "my program.py")
    (tmp_path / "my program.py").touch()
    text = session.site.render(Request.read(job), first)
    folder = f'"$HOME"/clusterctl/environments/{first.lock.key}/bin'
    assert f"export CLUSTERCTL_PATH={folder}:/opt/clusterctl/env/bin " in text
    assert f' {folder}/python "$files"/' in text
    assert client_facts(job, first, folder=tmp_path)["requirements"] == first.lock.text
