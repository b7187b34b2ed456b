"""An ordinary user of this machine who has clusterctl's wheel and types the commands of the manual.

`allowed` gives the user the line of sudoers from docs/install.md; without it the user has no
rights.
"""

from __future__ import annotations

import pwd
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.install import (
    LOCK,
    ROOT,
    SOURCE_ONLY,
    build_wheel,
    pip_settings,
    run,
    uv_settings,
)
from tests.support.processes import run_as_root
from tests.support.remains import marked
from tests.support.residue import nothing_left
from tests.support.verbs import Clusterctl

CLUSTER = "demo"
SPEC = (
    "version: 1\n"
    f"name: {CLUSTER}\n"
    "provider: {type: local}\n"
    "partitions:\n"
    "  - {name: train, nodes: 2}\n"
)
_SUDOERS = Path("/etc/sudoers.d")
_INSTALL_PAGE = ROOT / "docs" / "install.md"
_TYPING_S = 1200  # PyTorch is fetched, sent and unpacked


@dataclass(frozen=True)
class Person:
    """An account of this machine. ``clusterctl`` runs as this user in ``work``, where the spec is."""

    name: str
    uid: int
    home: Path
    clusterctl: Clusterctl

    @property
    def venv(self) -> Path:
        """The environment that contains clusterctl and its dependencies, and nothing else."""
        return self.home / "venv"

    @property
    def work(self) -> Path:
        return self.home / "my work"

    @property
    def state(self) -> Path:
        return self.home / ".local" / "state" / "clusterctl"

    @property
    def rule(self) -> str:
        """The sudoers line of docs/install.md, for this account and its installation."""
        (line,) = re.findall(r"^ *(ada ALL=.*helper \*)$", _INSTALL_PAGE.read_text(), re.MULTILINE)
        _, rest = str(line).split(" ", 1)
        python = str(self.venv / "bin/python").replace(" ", "\\ ")
        return f"{self.name} {rest.replace('/opt/clusterctl/bin/python', python)}"

    def runs(self, *argv: str) -> str:
        """Run a program as the user, in the user's folder. Return its output."""
        return run_as_root("sudo", "-n", "-u", self.name, "--", "env", "-C", self.work, *argv)

    def writes(self, name: str, text: str) -> None:
        """Write a file in the user's folder, as the user."""
        run_as_root("sudo", "-n", "-u", self.name, "tee", self.work / name, stdin=text)

    def types(self, text: str, place: Path) -> tuple[int, str, Path]:
        """Run a command. Return its exit code, its output, and its current folder at the end."""
        script = f"exec 2>&1\n{text}\ncode=$?\necho; pwd\nexit $code"
        argv = [*_as_login(self.name, self.home, place), "bash", "-c", script]
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TYPING_S,
            check=False,
        )
        output, _, where = done.stdout.rstrip("\n").rpartition("\n")
        return done.returncode, output + done.stderr, Path(where or place)

    def folder(self, name: str) -> Path:
        """Return a folder of the user, which is created if it is missing."""
        place = self.home / name
        code, output, _ = self.types(f"mkdir -p {shlex.quote(str(place))}", self.home)
        assert code == 0, output
        return place


def _as_login(name: str, home: Path, place: Path) -> list[str]:
    """The start of a command line that runs as the login of a user, with the user's folder and
    variables only.
    """
    login = {"HOME": home, "USER": name, "LOGNAME": name, "LANG": "C.UTF-8", "COLUMNS": "200"}
    path = f"{home}/venv/bin:/usr/local/bin:/usr/bin:/bin"  # nothing of this checkout's environment
    variables = [
        f"{key}={value}" for key, value in {**login, "PATH": path, **pip_settings()}.items()
    ]
    return ["sudo", "-n", "-u", name, "--", "env", "-C", str(place), "-i", *variables]


@contextmanager
def new_person() -> Iterator[Person]:
    """Create a user without rights, with clusterctl installed in the home folder, as by pipx."""
    name = f"kim-2_{secrets.token_hex(2)}"
    with ExitStack() as stack:
        # Not below pytest's own folder, which is for its user's eyes only.
        folder = Path(tempfile.mkdtemp(prefix=marked("home of ")))
        stack.callback(run_as_root, "rm", "-rf", "--", folder)
        folder.chmod(0o755)
        home = folder / f"{name} at home"
        script = folder / "clusterctl"
        (home / "my work").mkdir(parents=True)
        _install(build_wheel(folder / "dist"), home / "venv")
        run_as_root("useradd", "--no-create-home", "--home-dir", home, "--shell", "/bin/sh", name)
        stack.callback(run_as_root, "userdel", name)
        # Folders only: the files of the environment may be links into the cache of whoever runs
        # this test.
        run_as_root("find", home, "-type", "d", "-exec", "chown", f"{name}:", "{}", "+")
        argv = [*_as_login(name, home, home / "my work"), f"{home}/venv/bin/clusterctl"]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
        script.chmod(0o755)
        runner = Clusterctl(folder / "unused", folder, {}, script)  # the script drops its variables
        with nothing_left(home):
            yield Person(name, pwd.getpwnam(name).pw_uid, home, runner)


@contextmanager
def allowed(one: Person) -> Iterator[None]:
    """Allow the user to start the helper as root, and nothing else, during the context."""
    file = _SUDOERS / f"clusterctl-test-{one.name}"
    try:
        run_as_root("tee", file, stdin=one.rule + "\n")
        run_as_root("chmod", "440", file)
        run_as_root("visudo", "--check", "--quiet", "--file", file)
        yield
    finally:
        run_as_root("rm", "-f", "--", file)


def _install(wheel: Path, venv: Path) -> None:
    """Install a wheel into a new environment, by a Python that any user of this machine can read.

    The packages are those of the lock, from uv's cache where they are there, else from the package
    index that the caller's pip is set to.
    """
    uv, env, from_index = uv_settings()
    run([uv, "venv", "--quiet", "--no-config", "--python", _shared_python(), venv], env=env)
    target: list[str | Path] = ["--quiet", "--no-config", "--python", venv / "bin" / "python"]
    wheels = ["--only-binary", ":all:", "--no-binary", SOURCE_ONLY]
    run([uv, "pip", "sync", *target, *from_index, *wheels, "--require-hashes", LOCK], env=env)
    run([uv, "pip", "install", *target, "--offline", "--no-deps", wheel], env=env)


def _shared_python() -> Path:
    """The system's Python if it is new enough, else the one that this environment was made from."""
    program = "import sys; sys.exit(sys.version_info < (3, 11))"
    system = Path("/usr/bin/python3")
    if system.exists() and subprocess.run([system, "-c", program], check=False).returncode == 0:
        return system
    return Path(sys._base_executable)  # type: ignore[attr-defined]
