"""The data folders of clusterctl (templates, ansible, ...), in a checkout or a wheel; rendering of
templates.

Templates only insert values: logic is in Python. Some data files are not in a data folder but
beside the code that reads them, such as tables that explain a program's messages.
"""

from __future__ import annotations

import hashlib
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
R = TypeVar("R", bound="ErrorRule")


def data_folder(name: str) -> Path:
    """Return the path of a data folder. Raises ClusterctlError if the installation lacks the
    folder.
    """
    for candidate in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise incomplete(f"the data folder {name}/")


def incomplete(part: str) -> ClusterctlError:
    """Return the error that a part of clusterctl's installation is missing."""
    return ClusterctlError(
        f"{part} is missing",
        about="installation",
        where=str(_PACKAGE),
        why="this installation of clusterctl is incomplete",
        fix="install clusterctl again from a wheel or a full checkout",
    )


def tree_files(root: Path) -> tuple[Path, ...]:
    """Return the files below ``root``, sorted by path, without compiled Python."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = (name for name in folders if name not in _NOT_CONTENT)
        files += (Path(folder, name) for name in names if name not in _NOT_CONTENT)
    return tuple(sorted(path for path in files if path.is_file()))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_hash(root: Path) -> str:
    """Return a hash of the relative names and the contents of the files below ``root``: 16 hex
    digits.
    """
    files = tree_files(root)
    return digest(
        *(part for file in files for part in (file.relative_to(root).as_posix(), file.read_bytes()))
    )


def digest(*parts: str | bytes) -> str:
    """Return a hash of these parts, in this order, as 16 hex digits that are the same in every
    process.
    """
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()[:16]


@cache
def payload_hash() -> str:
    """Return the hash of the files of the training program. On clusters, its folder is named by the
    hash.
    """
    return tree_hash(data_folder("payload"))


@cache
def ansible_hash() -> str:
    """Return a hash of all playbooks and roles, computed at the first call."""
    return tree_hash(data_folder("ansible"))


def job_lock() -> Path:
    """Return the path of the requirements (versions and hashes) of the nodes' Python environment
    for jobs.
    """
    return data_folder("payload") / "requirements.lock"


def gpu_lock() -> Path:
    """Return the path of the requirements that nodes with NVIDIA GPUs need in addition, such as
    CuPy.
    """
    return data_folder("payload") / "requirements-gpu.lock"


@cache
def install_inputs() -> tuple[bytes, ...]:
    """Return all files that determine the software that `up` installs on a host: names and contents
    in turn.

    A role's files that only its configure.yml reads are left out, so that changing them installs
    nothing.
    """
    ansible = data_folder("ansible")
    files = [ansible / "install.yml", job_lock()]
    installing = {path.parents[1].name for path in ansible.glob("roles/*/tasks/install.yml")}
    configuring = {path.parents[1].name for path in ansible.glob("roles/*/tasks/configure.yml")}
    for path in sorted(ansible.glob("roles/*/**/*")):
        _, role, inner, *_ = path.relative_to(ansible).parts
        is_install_task = role not in configuring and inner == "tasks"
        counts = (
            is_install_task
            or inner in {"vars", "defaults", "files"}
            or path.name.startswith("install")
        )
        if path.is_file() and role in installing and counts and path.suffix != ".pyc":
            files.append(path)
    return tuple(part for path in files for part in (path.name.encode(), path.read_bytes()))


if TYPE_CHECKING:
    from jinja2 import Environment


@lru_cache(maxsize=1)
def _environment() -> Environment:
    import jinja2

    # No autoescape, because the output is configuration and shell text, not HTML. `q` quotes for
    # the shell.
    environment = jinja2.Environment(  # noqa: S701
        loader=jinja2.FileSystemLoader(data_folder("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment


def render(template: str, **values: Any) -> str:
    """Return the text of a file in templates/ with these values inserted."""
    return _environment().get_template(template).render(**values)


def read_table(path: Path, kind: type[T]) -> T:
    """Return the content of a TOML or YAML file, validated as ``kind``. Each file is read once."""
    content: T = _read(path, cast(Hashable, kind))
    return content


@cache
def _read(path: Path, kind: Any) -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415 - slow to import

    if path.suffix == ".toml":
        return TypeAdapter(kind).validate_python(tomllib.loads(path.read_text()))
    import yaml

    # The C loader takes a tenth of the time of ruamel.yaml, which is for files that users write.
    return TypeAdapter(kind).validate_python(yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader))


@dataclass(frozen=True, kw_only=True)
class ErrorRule:
    """An explanation (cause and fix) of all messages that match a pattern in ``match``.

    In ``cause`` and ``fix``, `{name}` is replaced by a named group of the pattern; `{name:text}` by
    text if the group is empty.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    code: str
    match: tuple[str, ...]
    cause: str
    fix: str
    about: str = ""
    retryable: bool = False

    def failure(self, words: Mapping[str, str], *, host: str | None, phase: str) -> Failure:
        """Return a failure with this rule's cause and fix; ``words`` (name -> value) are
        inserted.
        """
        cause = fill_in(self.cause, words)
        fix = fill_in(self.fix, words)
        return Failure(self.code, cause, host, phase, fix, self.retryable, self.about)


def fill_in(text: str, words: Mapping[str, str]) -> str:
    """Replace `{name}` in a text by its value in ``words``, `{name:text}` by `text` if it has no
    value.
    """
    return text.format_map(_Words({name: _Word(value) for name, value in words.items()}))


def first_rule(rules: Iterable[R], text: str) -> tuple[R, dict[str, str]] | None:
    """Return the first rule that matches a text, and its pattern's groups by name; None: no
    match.
    """
    for rule in rules:
        if matches := [match for pattern in rule.match if (match := re.search(pattern, text))]:
            groups = (group for match in reversed(matches) for group in match.groupdict().items())
            return rule, {name: value for name, value in groups if value}
    return None


class _Words(dict[str, "_Word"]):
    def __missing__(self, name: str) -> _Word:
        return _Word("")


class _Word(str):
    def __format__(self, otherwise: str) -> str:
        return str(self) or otherwise
