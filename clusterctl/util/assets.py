"""Finds the data folders (templates, ansible, ...) in a checkout and in a wheel alike; renders templates.

Templates only place values: logic lives in Python. Data files may also lie beside the code that reads them,
such as tables of what a program's words mean.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from clusterctl.errors import ClusterctlError, Failure

_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_CONTENT = frozenset({"__pycache__", ".gitkeep"})

T = TypeVar("T")
R = TypeVar("R", bound="Rule")


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
        code="installation-incomplete",
        where=str(_PACKAGE),
        why="this installation of clusterctl is incomplete",
        fix="install clusterctl again from a wheel or a full checkout",
    )


def tree_files(root: Path) -> tuple[Path, ...]:
    """The files below ``root`` that are its content, sorted by name; compiled Python is not."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = (name for name in folders if name not in _NOT_CONTENT)
        found += (Path(folder, name) for name in names if name not in _NOT_CONTENT)
    return tuple(sorted(path for path in found if path.is_file()))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_hash(root: Path) -> str:
    """16 hex digits of the relative names and contents below ``root``; the same wherever the tree lies."""
    files = tree_files(root)
    return digest(*(part for one in files for part in (one.relative_to(root).as_posix(), one.read_bytes())))


def digest(*parts: str | bytes) -> str:
    """A short stable hash of a phase's inputs."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()[:16]


@cache
def payload_hash() -> str:
    """The hash that names the payload in the store of a cluster."""
    return tree_hash(asset("payload"))


@cache
def ansible_hash() -> str:
    """The hash of the playbooks and roles, as they were when it was first asked for."""
    return tree_hash(asset("ansible"))


def job_lock() -> Path:
    """What the job environment of every node holds: a requirements file with versions and hashes."""
    return asset("payload") / "requirements.lock"


def gpu_lock() -> Path:
    """What it holds beside that on nodes with NVIDIA GPUs: CuPy, CUDA's libraries, NCCL, NVML."""
    return asset("payload") / "requirements-gpu.lock"


@cache
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
    """The text of a file of templates/ with its values placed."""
    return _environment().get_template(template).render(**values)


def table(path: Path, kind: type[T]) -> T:
    """What a TOML or YAML file holds, as that type; it is read once."""
    found: T = _read(path, cast(Hashable, kind))
    return found


@cache
def _read(path: Path, kind: Any) -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415 - slow, and not all verbs read such a file

    if path.suffix == ".toml":
        return TypeAdapter(kind).validate_python(tomllib.loads(path.read_text()))
    import yaml  # noqa: PLC0415 - the others have no use for it

    # In C: a tenth of the time that ruamel.yaml takes, which is for what users write.
    return TypeAdapter(kind).validate_python(yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader))


def yaml_text(document: Mapping[str, Any], *, offset: int = 0) -> str:
    """A document as YAML, in which lists are indented by ``offset``; no line is folded."""
    from ruamel.yaml import YAML  # noqa: PLC0415

    yaml, stream = YAML(), io.StringIO()
    yaml.width = 2**16
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    yaml.dump(document, stream)
    return stream.getvalue()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a text means in which one of the patterns of ``match`` is found.

    Groups of these patterns can stand in ``cause`` and ``fix``: `{name}`, `{name:what to say without it}`.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    code: str
    match: tuple[str, ...]
    cause: str
    fix: str
    retryable: bool = False

    def failure(self, words: Mapping[str, str], *, host: str | None, phase: str) -> Failure:
        """The failure that it stands for; ``words`` are the values of its texts."""
        cause, fix = filled(self.cause, words), filled(self.fix, words)
        return Failure(self.code, cause, host, phase, fix, self.retryable)


def filled(text: str, words: Mapping[str, str]) -> str:
    """The text with its words placed: `{name}`, `{name:what to say without it}`."""
    return text.format_map(_Words({name: _Word(value) for name, value in words.items()}))


def first_rule(rules: Iterable[R], text: str) -> tuple[R, dict[str, str]] | None:
    """The first rule that knows the text, and what its patterns' groups name, the first pattern's first."""
    for rule in rules:
        if found := [match for pattern in rule.match if (match := re.search(pattern, text))]:
            named = (group for match in reversed(found) for group in match.groupdict().items())
            return rule, {name: value for name, value in named if value}
    return None


class _Words(dict[str, "_Word"]):
    def __missing__(self, name: str) -> _Word:
        return _Word("")


class _Word(str):
    def __format__(self, otherwise: str) -> str:
        return str(self) or otherwise
