"""Finds templates/, terraform/, ansible/ and payload/ in a checkout and in a wheel alike; renders templates.

Templates only place values: logic lives in Python.
"""

from __future__ import annotations

import hashlib
import shlex
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError

_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_CONTENT = frozenset({"__pycache__", ".gitkeep"})


def asset(name: str) -> Path:
    """The path of one of the data folders.

    Raises:
        ClusterctlError: the folder is in neither place, so the installation is broken.
    """
    for candidate in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise ClusterctlError(
        f"the data folder {name}/ is missing",
        where=str(_PACKAGE),
        why="this installation of clusterctl is incomplete",
        fix="install clusterctl again from a wheel or a full checkout",
    )


def tree_files(root: Path) -> tuple[Path, ...]:
    """The files below ``root`` that are its content, sorted by name; compiled Python is not."""
    files = (path for path in root.rglob("*") if path.is_file())
    return tuple(sorted(path for path in files if not _NOT_CONTENT & set(path.relative_to(root).parts)))


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_hash(root: Path) -> str:
    """16 hex digits of the relative names and contents below ``root``; the same wherever the tree lies."""
    sha = hashlib.sha256()
    for path in tree_files(root):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part)
    return sha.hexdigest()[:16]


def digest(*parts: str | bytes) -> str:
    """A short stable hash of a phase's inputs."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()[:16]


def payload_hash() -> str:
    """The hash that names the payload on the nodes: /opt/clusterctl/payload/<hash>/payload."""
    return tree_hash(asset("payload"))


def job_lock() -> Path:
    """What the job environment of every node holds: a requirements file with versions and hashes."""
    return asset("payload") / "requirements.lock"


def gpu_lock() -> Path:
    """What it holds beside that on nodes with NVIDIA GPUs: CuPy, CUDA's libraries, NCCL, NVML."""
    return asset("payload") / "requirements-gpu.lock"


def install_inputs() -> tuple[bytes, ...]:
    """What decides what is installed on a host: the install half of the roles, and the jobs' Python.

    What only `configure.yml` reads (its tasks, handlers, templates) is left out, so that editing it installs
    nothing again. A role without an install half installs nothing; all tasks count of one that only installs.
    """
    ansible = asset("ansible")
    chosen = [ansible / "install.yml", job_lock()]
    installing = {path.parents[1].name for path in ansible.glob("roles/*/tasks/install.yml")}
    configuring = {path.parents[1].name for path in ansible.glob("roles/*/tasks/configure.yml")}
    for path in sorted(ansible.glob("roles/*/**/*")):
        _, role, inner, *_ = path.relative_to(ansible).parts
        whole = role not in configuring and inner == "tasks"
        counts = whole or inner in {"vars", "defaults", "files"} or path.name.startswith("install")
        if path.is_file() and role in installing and counts:
            chosen.append(path)
    return tuple(part for path in chosen for part in (path.name.encode(), path.read_bytes()))


if TYPE_CHECKING:
    from jinja2 import Environment


@lru_cache(maxsize=1)
def _environment() -> Environment:
    import jinja2  # noqa: PLC0415 - most verbs render nothing

    # The output is configuration and shell text, never HTML, hence no autoescape; `q` quotes for the shell.
    environment = jinja2.Environment(  # noqa: S701
        loader=jinja2.FileSystemLoader(asset("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment


def render(template: str, **values: Any) -> str:
    """The text of a file of templates/ with its values placed.

    Raises:
        jinja2.UndefinedError: the template names a value that was not given.
    """
    return _environment().get_template(template).render(**values)
