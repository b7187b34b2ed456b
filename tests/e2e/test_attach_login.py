"""Ways to a foreign Slurm cluster: with a second factor, from its own login node, past a long
queue.
"""

from __future__ import annotations

import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Protocol

import pytest

from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.remote_environment import pip_wheel
from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import job_lock
from tests.support.foreign.site import PASSWORD, Site
from tests.support.foreign.user import user_of
from tests.support.messages import codes
from tests.support.processes import ROOT, run_as_root
from tests.support.terminal import plain, terminal
from tests.support.verbs import CommandResult

NAME = "national"
# Where clusterctl is on the login node, with the Python and the packages that it needs there.
HERE = "/opt/here"
PACKAGES = (
    "ClusterShell Jinja2 PyYAML click packaging pathspec pip pydantic rich ruamel.yaml typer "
    "uv".split()
)
NOT_NEEDED = "test site-packages __pycache__ config-* idlelib *.a".split()


def logins(site: Site) -> list[str]:
    """How each connection of stud to the login node has ended its authentication."""
    lines = site.root(
        "login1", "journalctl --boot --output=cat --identifier=sshd --identifier=sshd-session"
    )
    return re.findall(r"^(Accepted|Connection closed)(?= .*\bstud\b)", lines, re.MULTILINE)


def test_second_factor_is_asked_once(national: Site, tmp_path: Path) -> None:
    """The question comes in the foreground of `attach`. All other commands share its connection."""
    # The client may be a Mac.
    user = user_of(national, "stud", tmp_path, has_linux=False)
    verb = user.clusterctl
    (user.folder / "own.sh").write_text("#!/bin/bash\necho there\n")
    with national.second_factor("stud"):
        before = logins(national)
        assert codes(verb("attach", "national", "-o", "json", rc=1)) == [
            "login-refused/needs-answer"
        ]
        with terminal(verb, "attach", "national") as window:
            window.read_until("assword:")
            window.type(f"{PASSWORD}\n")
            assert window.end() == 0, plain(window.shown)
        assert window.shown.count("assword:") == 1

        job = verb("submit", "own.sh", "--wait", "-o", "json").json["jobs"][0]["job_id"]
        assert "there" in verb("logs", job).stdout
        verb("collect", job)
        host = verb("shell", "--time", "5m", "--", "hostname").stdout.split()[-1]
        assert host in {"c1", "c2"}
        facts = {fact["fact"]: fact["value"] for fact in verb("doctor", "-o", "json").json["facts"]}
        assert facts["login node"].startswith("login1,")
        assert int(facts["remote commands"].split()[0]) > 10
        verb("detach", "--cluster", NAME)
        # Both `attach` first try without a question.
        assert logins(national)[len(before) :] == [
            "Connection closed",
            "Connection closed",
            "Accepted",
        ]


def files_of(names: Sequence[str]) -> set[str]:
    """Return the folders and files of packages, and of those that they need, in site-packages."""
    found: set[str] = set()
    left = [*names]
    while left:
        with suppress(PackageNotFoundError):
            package = distribution(left.pop())
            tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
            needs = [
                re.split(r"[^\w.-]", need)[0]
                for need in package.requires or ()
                if "extra" not in need
            ]
            left += needs if tops - found else []
            found |= tops
    return found


class Verb(Protocol):
    def __call__(self, *argv: str) -> CommandResult: ...


@pytest.fixture
def on_login_node(national: Site) -> Iterator[Verb]:
    """Clusterctl of this checkout on the login node, as stud."""
    machine = national.lab.host("login1")
    wheels = wheelhouse(job_lock(), NodePlatform("3.13", 28))
    pip = pip_wheel()
    folders = {
        f"{HERE}/python": (Path(sys.base_prefix), ["bin", "lib"]),
        f"{HERE}/packages": (Path(sysconfig.get_path("purelib")), sorted(files_of(PACKAGES))),
        f"{HERE}/program": (ROOT, ["clusterctl", "payload", "templates"]),
        f"{HERE}/cache/clusterctl": (cache_home(), [wheels.name, pip.parent.name]),
    }
    for target, (source, names) in folders.items():
        left = (
            [f"--exclude={name}" for name in NOT_NEEDED] if source == Path(sys.base_prefix) else []
        )
        pack = shlex.join(["tar", "-C", str(source), *left, "-c", *names])
        there = f"/proc/{machine.leader}/root{target}"
        run_as_root("sh", "-euc", f"mkdir -p {there}; {pack} | tar -C {there} -x --no-same-owner")
    national.root(
        "login1", f"mkdir {HERE}/state; chown -R stud {HERE}/state {HERE}/cache; chmod 755 {HERE}"
    )
    words = {
        "HOME": "/home/stud",
        "SHELL": "/bin/bash",
        "PATH": "/usr/bin:/bin",
        "LD_LIBRARY_PATH": f"{HERE}/python/lib",
        "PYTHONPATH": f"{HERE}/program:{HERE}/packages",
        "XDG_CACHE_HOME": f"{HERE}/cache",
        "CLUSTERCTL_HOME": f"{HERE}/state",
    }
    python = f"{HERE}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    argv = ["env", *(f"{key}={value}" for key, value in words.items()), python, "-m", "clusterctl"]
    yield partial(machine.inside, *argv, user="stud")
    national.root("login1", f"rm -rf {HERE}")


def test_attach_from_the_login_node_itself(national: Site, on_login_node: Verb) -> None:
    """`attach` needs no SSH there, and `detach` leaves no file."""
    before = national.listing("stud")
    connections = logins(national)
    answer = on_login_node("attach", ".", "--name", NAME, "-o", "json").json
    assert (answer["proven"], answer["account"]) == (True, "proj1")
    ran = on_login_node("submit", "probe", "--nodes", "2", "--wait", "-o", "json").json
    job = ran["jobs"][0]["job_id"]
    (run,) = on_login_node("collect", job, "--out", f"{HERE}/state", "-o", "json").json["runs"]
    assert run["state"] == "COMPLETED"
    on_login_node("detach", "--cluster", NAME)
    assert national.listing("stud") == before
    assert logins(national) == connections


def test_job_that_proves_mpi_may_wait_longer_than_attach(national: Site, tmp_path: Path) -> None:
    user = user_of(national, "stud", tmp_path)
    verb = user.clusterctl
    before = national.listing("stud")
    others = national.ssh(
        "stud", "cd /tmp && sbatch -A proj1 -N 2 --exclusive --wrap 'sleep 3600' --parsable"
    )
    answer = verb("attach", "national", "-o", "json").json
    assert (answer["proven"], answer["ok"]) == (False, True)
    job = answer["proof"]["job_id"]
    national.ssh("stud", f"scancel {others.stdout.split()[-1]}")
    result = verb("attach", "national", "-o", "json")
    again = result.json
    assert (again["proven"], again["proof"]["job_id"]) == (True, job), result.stderr
    facts = {fact["fact"]: fact["learned"] for fact in verb("doctor", "-o", "json").json["facts"]}
    assert facts["MPI"] == f"job {job} on c1, c2"
    verb("detach", "--cluster", NAME)
    assert national.listing("stud") == before
