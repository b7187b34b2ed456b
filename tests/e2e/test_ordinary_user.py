"""clusterctl by an ordinary user who may run just the helper as root: all results theirs, the jobs theirs.

That the sudoers line allows nothing but the helper is a spy, too: any other use of sudo would fail.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.install import PLAIN_PATH, ROOT, Installed, build_wheel, install, pip_settings
from tests.support.remains import marked
from tests.support.residue import Machine, left_behind, look_as_root
from tests.support.verbs import Clusterctl

SUDOERS = Path("/etc/sudoers.d")
INSTALL_PAGE = ROOT / "docs" / "install.md"

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions:
  - {{name: train, nodes: 2}}
"""
WHO_AM_I = """\
#!/bin/bash
srun bash -c 'echo "$(hostname) $(id -un) $(id -u) $(id -gn) $HOME"; touch "$HOME/was-here-$(hostname)"'
"""


@dataclass(frozen=True)
class Person:
    """An account of this machine, their clusterctl, and the folder where they work."""

    name: str
    uid: int
    home: Path
    work: Path
    installed: Installed
    clusterctl: Clusterctl
    cluster: str

    @property
    def state(self) -> Path:
        return self.home / ".local" / "state" / "clusterctl"

    @property
    def rule(self) -> str:
        """The sudoers line of docs/install.md, for this account and its installation."""
        (line,) = re.findall(r"^ *(ada ALL=.*helper \*)$", INSTALL_PAGE.read_text(), re.MULTILINE)
        _, rest = str(line).split(" ", 1)
        return f"{self.name} " + rest.replace(
            "/opt/clusterctl/bin/python", str(self.installed.python).replace(" ", "\\ ")
        )

    def runs(self, *argv: str) -> str:
        """What a program prints that they run in their folder."""
        return as_root("sudo", "-n", "-u", self.name, "--", "env", "-C", str(self.work), *argv)


def as_root(*argv: str, stdin: str = "") -> str:
    """What a program prints that root runs.

    Raises:
        AssertionError: it failed.
    """
    words = list(argv) if os.geteuid() == 0 else ["sudo", "-n", "--", *argv]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"$ {shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A new user, without any right so far, who installed clusterctl in their home as pipx would."""
    name = f"kim-2_{secrets.token_hex(2)}"
    wheel = build_wheel(tmp_path_factory.mktemp("dist"))
    with ExitStack() as stack:
        # Not below pytest's own folder, which is for its user's eyes only.
        folder = Path(tempfile.mkdtemp(prefix=marked("home of ")))
        stack.callback(as_root, "rm", "-rf", "--", str(folder))
        folder.chmod(0o755)
        home = folder / f"{name} at home"
        work = home / "my work"
        work.mkdir(parents=True)
        installed = install(wheel, home / "venv")
        as_root("useradd", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/sh", name)
        stack.callback(as_root, "userdel", name)
        # Folders only: the files of the environment may be links into the cache of whoever runs this test.
        as_root("find", str(home), "-type", "d", "-exec", "chown", f"{name}:", "{}", "+")
        script = folder / "clusterctl"
        script.write_text(_as_person(name, home, work, installed))
        script.chmod(0o755)
        before = look_as_root(Machine(home))
        runner = Clusterctl(folder / "unused", folder, {}, script)  # the script drops its variables
        yield Person(
            name, pwd.getpwnam(name).pw_uid, home, work, installed, runner, f"u{secrets.token_hex(3)}"
        )
        left = left_behind(before, lambda: look_as_root(Machine(home)))
        assert not left, "left behind on this machine:\n" + "\n".join(left)


def _as_person(name: str, home: Path, work: Path, installed: Installed) -> str:
    """A script that runs clusterctl as someone's login would: their folder, their variables and no others."""
    login = {"HOME": home, "USER": name, "LOGNAME": name, "PATH": PLAIN_PATH, "LANG": "C.UTF-8"}
    variables = [f"{key}={value}" for key, value in {**login, **pip_settings()}.items()]
    argv = ["sudo", "-n", "-u", name, "--", "env", "-C", str(work), "-i", *variables, str(installed.script)]
    return f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n'


@contextmanager
def allowed(person: Person) -> Iterator[None]:
    """While this lasts, they may start the helper, and nothing else, as root."""
    file = SUDOERS / f"clusterctl-test-{person.name}"
    try:
        as_root("tee", str(file), stdin=person.rule + "\n")
        as_root("chmod", "440", str(file))
        as_root("visudo", "--check", "--quiet", "--file", str(file))
        yield
    finally:
        as_root("rm", "-f", "--", str(file))


@pytest.fixture(scope="module")
def rights(person: Person) -> Iterator[None]:
    with allowed(person):
        yield
        if as_root("find", str(person.home), "-path", str(person.state / person.cluster)):
            person.clusterctl("down", "--yes", "--discard-runs", rc=None)


@pytest.fixture(scope="module")
def up(person: Person, rights: None) -> dict[str, Any]:
    """Their cluster."""
    as_root(
        "sudo",
        "-n",
        "-u",
        person.name,
        "tee",
        f"{person.work}/cluster.yaml",
        stdin=SPEC.format(name=person.cluster),
    )
    as_root("sudo", "-n", "-u", person.name, "tee", f"{person.work}/who am i.sh", stdin=WHO_AM_I)
    return dict(person.clusterctl("-o", "json", "up").json)


@pytest.fixture(scope="module")
def trained(person: Person, up: dict[str, Any]) -> Path:
    """The folder of a two-node training of theirs."""
    person.clusterctl("submit", "train", "--nodes", "2", "--wait")
    (run,) = person.clusterctl("-o", "json", "collect").json["runs"]
    return Path(run["dir"])


def belonging_to_others(person: Person) -> list[str]:
    """What lies in their home and isn't theirs. Of the installation only folders: see `person`."""
    venv = str(person.installed.venv)
    files = ["(", "-type", "d", "-o", "-not", "-path", f"{venv}/*", "-o", "-name", "*.pyc", ")"]
    return as_root("find", str(person.home), *files, "-not", "-user", person.name).splitlines()


def test_without_rights_there_is_one_error_and_a_way_out(person: Person) -> None:
    ran = person.clusterctl("-o", "json", "up", rc=1)
    (failure,) = ran.json["failures"]
    assert failure["code"] == "machine", str(ran)
    assert "no right" in failure["cause"]
    assert "sudo -v" in failure["fix"]
    assert "password" in failure["fix"]
    assert sum(line.startswith("error: ") for line in ran.stderr.splitlines()) == 1
    assert "no clusters" in person.clusterctl("list").stdout
    assert "make" in person.clusterctl("plan").stdout, "to look at what would be takes no right"


def test_up_in_their_name(person: Person, up: dict[str, Any]) -> None:
    assert up["ready"]
    assert up["workspace"] == str(person.state / person.cluster)
    assert up["probed"] == [f"{person.cluster}-train-{i}" for i in (1, 2)]
    (listed,) = person.clusterctl("-o", "json", "list").json["clusters"]
    assert listed["cluster"] == person.cluster
    assert "no changes" in person.clusterctl("plan", "--check").stdout


def test_the_job_runs_under_their_name_and_number(person: Person, up: dict[str, Any]) -> None:
    answer = person.clusterctl("-o", "json", "submit", "who am i.sh", "--nodes", "2", "--wait").json
    said = sorted(person.clusterctl("logs", answer["job_id"]).stdout.splitlines())
    assert said == [
        f"{person.cluster}-train-{i} {person.name} {person.uid} {person.name} /shared/home/{person.name}"
        for i in (1, 2)
    ]
    (run,) = person.clusterctl("-o", "json", "collect", answer["job_id"]).json["runs"]
    accounting = json.loads(person.runs("cat", f"{run['dir']}/sacct.json"))
    assert {job["association"]["user"] for job in accounting["jobs"]} == {person.name}


def test_everything_written_is_theirs(person: Person, trained: Path) -> None:
    assert trained.parent == person.work / "runs"
    result = json.loads(person.runs("cat", f"{trained}/metrics.jsonl").splitlines()[-1])
    assert result["kind"] == "result"
    assert result["accuracy"] >= 0.95
    assert belonging_to_others(person) == []
    assert person.runs("find", str(person.work), str(person.state), "-not", "-readable") == ""


def test_the_state_folder_is_private(person: Person, trained: Path) -> None:
    assert as_root("find", str(person.state), "-type", "f")
    exposed = ["(", "-type", "d", "-not", "-perm", "700", "-o", "-type", "f", "-not", "-perm", "600", ")"]
    assert as_root("find", str(person.state), *exposed, "-printf", "%m %p\\n") == ""


def test_root_leaves_their_cluster_alone(person: Person, trained: Path, clusterctl: Clusterctl) -> None:
    """The name is theirs and unlike any other, so that a mistake here costs nobody a cluster."""
    spec = clusterctl.cwd / "same-name.yaml"
    spec.write_text(SPEC.format(name=person.cluster))
    listed = clusterctl("-o", "json", "list").json["clusters"]
    assert person.cluster not in [entry["cluster"] for entry in listed]
    ran = clusterctl("-f", spec, "down", "--yes", rc=2)
    assert "there is no cluster" in ran.stderr
    assert person.clusterctl("-o", "json", "status").json["ready"]


def test_another_home_of_theirs_leaves_it_alone_too(person: Person, trained: Path) -> None:
    script = person.clusterctl.script.with_name("elsewhere")
    text = person.clusterctl.script.read_text()
    script.write_text(text.replace(" -i ", f" -i CLUSTERCTL_HOME={shlex.quote(f'{person.home}/another')} "))
    script.chmod(0o755)
    elsewhere = Clusterctl(person.clusterctl.home, person.clusterctl.cwd, {}, script)
    ran = elsewhere("down", "--yes", rc=2)
    assert "there is no cluster" in ran.stderr
    assert person.clusterctl("-o", "json", "status").json["ready"]


def test_down_leaves_their_runs_and_nothing_else(person: Person, trained: Path) -> None:
    person.clusterctl("submit", "who am i.sh", "--wait")
    done = person.clusterctl("-o", "json", "down", "--yes").json
    assert [Path(run).parent for run in done["runs"]] == [person.work / "runs"]
    assert as_root("find", str(person.home), "-path", str(person.state / person.cluster)) == ""
    assert belonging_to_others(person) == []
    assert "no clusters" in person.clusterctl("list").stdout
